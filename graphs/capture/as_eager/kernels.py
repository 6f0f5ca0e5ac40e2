"""Trace the operators that eager mode runs, not the decompositions that compilers prefer.

While PyTorch traces, some operators are replaced by Python decompositions even where none was asked
for: dropout by its fused form (other bits in half precision on the CPU, and a smaller mask than
eager keeps), upsampling by index arithmetic. A plan must run what eager runs, to the bit, and count
what eager holds. So these registrations are set aside while a step is captured.

Random fills in place (`x.normal_()`) become new tensors, whose strides are others where x has gaps
or is transposed: the same numbers would fall on other elements. On the CPU operators of ours fill
such tensors in eager's order. Two limits: on CUDA fills of tensors that are not contiguous have not
been compared with eager mode, and `out=` of a random operator must be contiguous.

Batch norm keeps its decomposition: the eager kernels write the running statistics without saying so
in their signature, and the decomposition is what makes that visible (and gives the same bits).
Where eager mode runs cuDNN's (on CUDA, in training), the operator is one that says so and runs it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey

from graphs.calls import TraceError
from graphs.capture.as_eager import rnn

logger = logging.getLogger(__name__)

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_UPSAMPLING = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)
_LOSSES = ("multi_margin_loss", "multilabel_margin_loss_forward")
"""Taken apart, their terms are added up in another order."""


_library = torch.library.Library("checkpoint_solver", "DEF")


def _define(schema: str, *, cpu: Callable[..., torch.Tensor], meta: Callable[..., object]) -> None:
    """A random operator of ours, which runs again with the same numbers as PyTorch's do."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.nondeterministic_seeded,))
    _library.impl(name, cpu, "CPU")
    _library.impl(name, meta, "Meta")


def _dropout_noise(like: torch.Tensor, p: float) -> torch.Tensor:
    """What eager dropout multiplies by, filled in the order of the input's strides."""
    return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)


def _strided_like(like: torch.Tensor, *_: object) -> torch.Tensor:
    """An empty tensor with the same strides (empty_like closes gaps)."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


_define(
    "dropout_noise(Tensor like, float p) -> Tensor",
    cpu=_dropout_noise,
    meta=lambda like, _p: torch.empty_like(like),
)
_define(
    "bernoulli_fill(Tensor like, float p) -> Tensor",
    cpu=lambda like, p: _strided_like(like).bernoulli_(p),
    meta=_strided_like,
)
_define(
    "normal_fill(Tensor like, float mean, float std) -> Tensor",
    cpu=lambda like, mean, std: _strided_like(like).normal_(mean, std),
    meta=_strided_like,
)
_define(
    "random_fill(Tensor like, int low, int? high) -> Tensor",
    cpu=lambda like, low, high: _strided_like(like).random_(low, high),
    meta=_strided_like,
)


def _eager_dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout as eager mode computes it on the CPU.

    Its in-place steps are one operator here: taken apart they would be functionalised into others,
    whose noise is contiguous whatever the input's strides are, and so falls on other elements.
    """
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    noise: torch.Tensor = torch.ops.checkpoint_solver.dropout_noise(tensor.detach(), p)
    return tensor * noise


_AUTOGRAD = DispatchKey.AutogradCPU
_bernoulli = torch.ops.aten.bernoulli_.float
_normal = torch.ops.aten.normal_.default
_random = getattr(torch.ops.aten.random_, "from")


def own_generator(operator: object) -> TraceError:
    """Why a call that is handed a generator is refused."""
    return TraceError(
        f"{operator} draws from a generator of its own, whose numbers a planned step could not "
        "draw again; leave generator= out, the default one is replayed"
    )


def _eager_bernoulli(
    tensor: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    if generator is not None:
        raise own_generator(_bernoulli)
    if tensor.is_contiguous():  # as PyTorch traces it: one tensor less
        return _bernoulli._op_dk(_AUTOGRAD, tensor, p)  # type: ignore[no-any-return]
    return tensor.copy_(torch.ops.checkpoint_solver.bernoulli_fill(tensor.detach(), p))


def _eager_normal(
    tensor: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    if generator is not None:
        raise own_generator(_normal)
    if tensor.is_contiguous():
        return _normal._op_dk(_AUTOGRAD, tensor, mean, std)  # type: ignore[no-any-return]
    return tensor.copy_(torch.ops.checkpoint_solver.normal_fill(tensor.detach(), mean, std))


def _eager_random(
    tensor: torch.Tensor, low: int, high: int | None, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """PyTorch's functional form is called `from`, a word that its own generated code trips over."""
    if generator is not None:
        raise own_generator(_random)
    return tensor.copy_(torch.ops.checkpoint_solver.random_fill(tensor.detach(), low, high))


_FILLS: Mapping[torch._ops.OpOverload, Callable[..., torch.Tensor]] = {
    _bernoulli: _eager_bernoulli,
    _normal: _eager_normal,
    _random: _eager_random,
}


_cudnn_batch_norm = torch.ops.aten.cudnn_batch_norm.default
_Tensors = tuple[torch.Tensor, ...]


def _eager_cudnn_batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    factor: float,
    eps: float,
) -> _Tensors:
    """cuDNN's batch norm by an operator whose signature tells that the statistics are written.

    It chooses between cuDNN and PyTorch's own kernel as eager mode does, by the same function.
    """
    if training and mean is not None and variance is not None:
        updating: Callable[..., _Tensors] = torch.ops.aten._batch_norm_with_update.default
        try:
            return updating(tensor, weight, bias, mean, variance, factor, eps)
        except RuntimeError as error:
            # The size of what cuDNN keeps for the backward pass is asked of cuDNN itself.
            logger.warning(
                "cuDNN's batch norm cannot be traced (%s); PyTorch's own kernel is planned in its "
                "place, whose last bits may differ from eager mode's",
                error,
            )
    kernel: Callable[..., _Tensors] = torch._decomp.decompositions.cudnn_batch_norm
    return kernel(tensor, weight, bias, mean, variance, training, factor, eps)


@contextlib.contextmanager
def eager_kernels(device: torch.device) -> Iterator[None]:
    """Set the decompositions aside that differ from eager mode on this device."""
    replaced: dict[tuple[torch._ops.OpOverload, DispatchKey], Callable[..., Any] | None]
    replaced = {
        (getattr(getattr(torch.ops.aten, name), overload), key): None
        for name in _UPSAMPLING
        for overload in ("vec", "default")
        for key in _KEYS
    }
    replaced |= {
        (getattr(torch.ops.aten, name).default, key): None for name in _LOSSES for key in _KEYS
    }
    if device.type == "cuda":
        replaced[_cudnn_batch_norm, DispatchKey.Autograd] = _eager_cudnn_batch_norm
    if device.type == "cpu":  # on CUDA eager runs the fused dropout too
        replaced |= {(torch.ops.aten.dropout.default, key): _eager_dropout for key in _KEYS}
        replaced |= {(operator, _AUTOGRAD): kernel for operator, kernel in _FILLS.items()}
        replaced |= {(op, key): run for op, run in rnn.KERNELS.items() for key in _KEYS}
    before = {(operator, key): operator.py_kernels.get(key) for operator, key in replaced}
    _register(replaced)
    try:
        yield
    finally:
        _register(before)


def _register(
    kernels: Mapping[tuple[torch._ops.OpOverload, DispatchKey], Callable[..., Any] | None],
) -> None:
    """Put each kernel in its place; None: nothing is registered there."""
    for (operator, key), kernel in kernels.items():
        if kernel is None:
            operator.py_kernels.pop(key, None)
        else:
            operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()
