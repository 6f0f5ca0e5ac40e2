"""Gradients that values decide, or that tracing changes: each is one operator, as in eager mode.

PyTorch's backward functions of these operators take another formula while a dispatch mode is there,
as it is in a trace, because eager mode's formula looks at values:

- `prod`: the result divided by each factor, where none is zero; in a trace, products of the others.
- `cumprod` of complex numbers: it computes with selected elements; products and quotients of
  complex numbers may have other last bits where a kernel's vectors begin elsewhere.
- `max`, `min`, `median` of a whole tensor, on the CPU: zeros, filled at the places found; in a
  trace, a mask times a number, which makes -0 of a negative one.
- the value of `masked_fill`: the sum of what the mask selects; in a trace, of zeros besides.

So each of these functions is an operator here, which runs eager mode's own function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey

from graphs.model_calls import TraceError

aten = torch.ops.aten
_library: Any = torch.library.Library("checkpoint_solver", "FRAGMENT")  # type: ignore[no-untyped-call]
_ours = torch.ops.checkpoint_solver
_EXCLUDED = (
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradNestedTensor,
)

Kernel = Callable[..., torch.Tensor]


@contextlib.contextmanager
def outside_of_functions() -> Iterator[None]:
    """Autograd as outside of an autograd function, in which a planned step runs."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _EXCLUDED:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def _own(operator: torch._ops.OpOverload) -> Kernel:
    """The gradient of the operator's first argument, by its backward function of eager mode."""

    def run(gradient: torch.Tensor, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        with outside_of_functions(), torch.enable_grad():
            function: Any = operator(tensor.detach().requires_grad_(), *rest).grad_fn
        with torch.no_grad():
            return function(gradient).to(tensor.dtype).contiguous()  # type: ignore[no-any-return]

    return run


def _contiguous(_gradient: torch.Tensor, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _of_product(
    gradient: torch.Tensor, tensor: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> torch.Tensor:
    if dim is not None and not keepdim and tensor.dim():
        gradient = gradient.unsqueeze(dim)
    return _laid_out_alike("torch.prod", gradient, tensor)


def _laid_out_alike(name: str, gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Raises TraceError where the layout depends on the values."""
    if not (gradient / tensor).is_contiguous():
        raise TraceError(
            f"{name} has a gradient whose memory layout depends on whether a value is zero, if "
            "its input or the gradient that it gets is not contiguous; call .contiguous() on its "
            "input and its result",
            runs_in_eager=True,
            short=f"the layout of the gradient of {name} depends on the values",
        )
    return _contiguous(gradient, tensor)


def _define(schema: str, run: Kernel, meta: Kernel) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, meta, "Meta")
    return getattr(_ours, name).default


_PRODUCTS = {
    operator: _define(f"{name}(Tensor gradient, Tensor self{rest}) -> Tensor", _own(operator), meta)
    for operator, name, rest, meta in (
        (aten.prod.default, "prod_gradient", "", _of_product),
        (aten.prod.dim_int, "prod_dim_gradient", ", int dim, bool keepdim", _of_product),
    )
}
_COMPLEX_ONLY = {
    aten.cumprod.default: _define(
        "cumprod_gradient(Tensor gradient, Tensor self, int dim) -> Tensor",
        _own(aten.cumprod.default),
        lambda gradient, tensor, _dim: _laid_out_alike("torch.cumprod", gradient, tensor),
    ),
}
_SELECTIONS = {
    getattr(aten, name).default: _define(
        f"{name}_gradient(Tensor gradient, Tensor self) -> Tensor",
        _own(getattr(aten, name).default),
        _contiguous,
    )
    for name in ("max", "min", "median", "nanmedian")
}
_sum_of_selected = _define(
    "sum_of_selected(Tensor gradient, Tensor mask) -> Tensor",
    lambda gradient, mask: gradient.masked_select(mask).sum(),
    lambda gradient, _mask: gradient.new_empty(()),
)


class _Reduced(torch.autograd.Function):
    """An operator of one tensor; its gradient is one operator too."""

    @staticmethod
    def forward(ctx: Any, operator: Any, gradient: Any, tensor: torch.Tensor, *rest: Any) -> Any:
        ctx.gradient, ctx.rest = gradient, rest
        ctx.save_for_backward(tensor)
        return operator(tensor, *rest)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        found = ctx.gradient(gradient, *ctx.saved_tensors, *ctx.rest)
        return None, None, found, *(None for _ in ctx.rest)


class _MaskedFill(torch.autograd.Function):
    """`masked_fill` with a value that is trained."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
        ctx.save_for_backward(mask)
        return aten.masked_fill.Tensor(tensor, mask, value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        of_tensor = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        return of_tensor, None, _sum_of_selected(gradient, mask)


def _reduced(operator: Any, gradient: Any) -> Kernel:
    n_given = len(gradient._schema.arguments) - 1
    defaults = [argument.default_value for argument in operator._schema.arguments]

    def kernel(tensor: torch.Tensor, *args: Any, dtype: Any = None, **named: Any) -> torch.Tensor:
        wanted = torch.is_grad_enabled() and tensor.requires_grad
        if not wanted or (operator in _COMPLEX_ONLY and not tensor.is_complex()):
            kind = {} if dtype is None else {"dtype": dtype}
            return operator._op_dk(DispatchKey.Autograd, tensor, *args, **named, **kind)  # type: ignore[no-any-return]
        names = [argument.name for argument in operator._schema.arguments[1 + len(args) : n_given]]
        given = dict(zip(names, defaults[1 + len(args) : n_given], strict=True)) | named
        tensor = tensor if dtype is None else tensor.to(dtype)
        apply: Any = _Reduced.apply
        return apply(operator, gradient, tensor, *args, *given.values())  # type: ignore[no-any-return]

    return kernel


def _masked_fill(operator: Any) -> Kernel:
    def kernel(tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or not value.requires_grad:
            return operator._op_dk(DispatchKey.Autograd, tensor, mask, value)  # type: ignore[no-any-return]
        apply: Any = _MaskedFill.apply
        filled: torch.Tensor = apply(tensor, mask, value)
        return tensor.copy_(filled) if operator is aten.masked_fill_.Tensor else filled

    return kernel


def gradients_of_eager(device: torch.device) -> Mapping[torch._ops.OpOverload, Kernel]:
    """What these operators are while a step for this device is traced, at its autograd key."""
    found = {**_PRODUCTS, **_COMPLEX_ONLY, **(_SELECTIONS if device.type == "cpu" else {})}
    return {op: _reduced(op, gradient) for op, gradient in found.items()} | {
        op: _masked_fill(op) for op in (aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
    }
