"""Gradients for which tracing changes PyTorch's formula: each becomes one operator instead.

The backward functions of some operators look at values in eager mode, and so take another formula
while a dispatch mode is active, as it is in a trace:

- `prod`: in eager mode the result divided by each factor, if no factor is zero; in a trace the
  product of the other factors.
- `cumprod` of complex numbers: eager mode computes with selected elements. The last bits of complex
  products and quotients may depend on where an element is within a kernel's vector.
- `max`, `min`, `median` of a whole tensor, on the CPU: in eager mode zeros, filled at the positions
  found; in a trace a mask times the gradient, which gives -0 if the gradient is negative.
- the value of `masked_fill`: in eager mode the sum of the elements that the mask selects; in a
  trace the sum includes zeros in place of the other elements.

Here each of these gradients is an operator that runs eager mode's own formula, so that the traced
step is bitwise identical.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey

from graphs.capture.own_operators import define
from graphs.model_calls import TraceError

aten = torch.ops.aten
_AUTOGRAD_KEYS = (
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradNestedTensor,
)

Kernel = Callable[..., torch.Tensor]


@contextlib.contextmanager
def autograd_keys_included() -> Iterator[None]:
    """While inside, let autograd record as usual, although a planned step runs in a Function.

    PyTorch excludes autograd's dispatch keys inside of an `autograd.Function`.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def _eager_gradient_of(operator: torch._ops.OpOverload) -> Kernel:
    """A kernel that computes the gradient of `operator`'s first argument as eager mode does.

    It runs the operator once more, to get its backward function, and calls that function.
    """

    def run(gradient: torch.Tensor, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        with autograd_keys_included(), torch.enable_grad():
            function: Any = operator(tensor.detach().requires_grad_(), *rest).grad_fn
        with torch.no_grad():
            return function(gradient).to(tensor.dtype).contiguous()  # type: ignore[no-any-return]

    return run


def _contiguous_meta(_gradient: torch.Tensor, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _product_gradient_meta(
    gradient: torch.Tensor, tensor: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> torch.Tensor:
    if dim is not None and not keepdim and tensor.dim():
        gradient = gradient.unsqueeze(dim)
    return _fixed_layout_meta("torch.prod", gradient, tensor)


def _fixed_layout_meta(name: str, gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The fake gradient, contiguous. Raises TraceError if its layout depends on values."""
    if not (gradient / tensor).is_contiguous():
        raise TraceError(
            f"{name} has a gradient whose memory layout depends on whether a value is zero, if "
            "its input or the gradient that it gets is not contiguous; call .contiguous() on its "
            "input and its result",
            runs_in_eager=True,
            short=f"the layout of the gradient of {name} depends on the values",
        )
    return _contiguous_meta(gradient, tensor)


_PRODUCTS = {
    operator: define(
        f"{name}(Tensor gradient, Tensor self{rest}) -> Tensor",
        CompositeExplicitAutograd=_eager_gradient_of(operator),
        Meta=meta,
    )
    for operator, name, rest, meta in (
        (aten.prod.default, "prod_gradient", "", _product_gradient_meta),
        (aten.prod.dim_int, "prod_dim_gradient", ", int dim, bool keepdim", _product_gradient_meta),
    )
}
_COMPLEX_ONLY = {
    aten.cumprod.default: define(
        "cumprod_gradient(Tensor gradient, Tensor self, int dim) -> Tensor",
        CompositeExplicitAutograd=_eager_gradient_of(aten.cumprod.default),
        Meta=lambda gradient, tensor, _dim: _fixed_layout_meta("torch.cumprod", gradient, tensor),
    ),
}
_SELECTIONS = {
    getattr(aten, name).default: define(
        f"{name}_gradient(Tensor gradient, Tensor self) -> Tensor",
        CompositeExplicitAutograd=_eager_gradient_of(getattr(aten, name).default),
        Meta=_contiguous_meta,
    )
    for name in ("max", "min", "median", "nanmedian")
}
_sum_of_selected = define(
    "sum_of_selected(Tensor gradient, Tensor mask) -> Tensor",
    CompositeExplicitAutograd=lambda gradient, mask: gradient.masked_select(mask).sum(),
    Meta=lambda gradient, _mask: gradient.new_empty(()),
)


class _WithGradientOperator(torch.autograd.Function):
    """Calls an operator of one tensor, and another operator for its gradient."""

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
    """`masked_fill` with a value that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
        ctx.save_for_backward(mask)
        return aten.masked_fill.Tensor(tensor, mask, value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        tensor_gradient = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        return tensor_gradient, None, _sum_of_selected(gradient, mask)


def _kernel_with_gradient(operator: Any, gradient: Any) -> Kernel:
    """The kernel of `operator` while tracing; `gradient` is its backward, if one is needed."""
    options = operator._schema.arguments[1 : len(gradient._schema.arguments) - 1]

    def kernel(tensor: torch.Tensor, *args: Any, dtype: Any = None, **named: Any) -> torch.Tensor:
        needs_gradient = torch.is_grad_enabled() and tensor.requires_grad
        if not needs_gradient or (operator in _COMPLEX_ONLY and not tensor.is_complex()):
            dtype_argument = {} if dtype is None else {"dtype": dtype}
            return operator._op_dk(DispatchKey.Autograd, tensor, *args, **named, **dtype_argument)  # type: ignore[no-any-return]
        arguments = {each.name: each.default_value for each in options[len(args) :]} | named
        tensor = tensor if dtype is None else tensor.to(dtype)
        apply: Any = _WithGradientOperator.apply
        return apply(operator, gradient, tensor, *args, *arguments.values())  # type: ignore[no-any-return]

    return kernel


def _masked_fill_kernel(operator: Any) -> Kernel:
    """The kernel of `masked_fill` or `masked_fill_` while tracing."""

    def kernel(tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or not value.requires_grad:
            return operator._op_dk(DispatchKey.Autograd, tensor, mask, value)  # type: ignore[no-any-return]
        apply: Any = _MaskedFill.apply
        filled: torch.Tensor = apply(tensor, mask, value)
        return tensor.copy_(filled) if operator is aten.masked_fill_.Tensor else filled

    return kernel


def eager_gradient_kernels(device: torch.device) -> Mapping[torch._ops.OpOverload, Kernel]:
    """Operator -> kernel to register at the device's autograd key while a step is traced."""
    found = {**_PRODUCTS, **_COMPLEX_ONLY, **(_SELECTIONS if device.type == "cpu" else {})}
    return {op: _kernel_with_gradient(op, gradient) for op, gradient in found.items()} | {
        op: _masked_fill_kernel(op) for op in (aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
    }
