"""Corrects fake tensors for CPU operators whose meta function disagrees with the kernel.

PyTorch computes fake tensors by meta functions. Some of them reject arguments that the CPU kernel
accepts, or return another dtype, other strides or another storage size than the kernel. The traced
step, or its bytes, would then differ from eager mode. `cpu_kernel_result` replaces such a meta
function; `correct_fake_result` corrects its result.

The strides of a kernel's result are found by running the kernel on small tensors, of at most two
elements per dimension, whose strides are in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from graphs.model_calls import named_arguments

aten = torch.ops.aten
_ROW_BYTES = 16
"""Alignment of the rows of a grouped product."""
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOT_REDUCED = 0


def cpu_kernel_result(
    mode: FakeTensorMode, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The fake result of an operator on CPU tensors.

    Returns NotImplemented if PyTorch's meta function can be used.
    """
    rule = _RULES.get(operator)
    if rule is None or not _are_fake_cpu_tensors(args[:2]):
        return NotImplemented
    with mode:
        return rule(args[0], args[1], named_arguments(operator, args, kwargs))


def _grouped_product(one: torch.Tensor, other: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
    """The product of groups of rows (mixtures of experts).

    PyTorch's meta function accepts only bfloat16, and leaves out the padding by which the kernel
    aligns the rows of the result.
    """
    dtype = one.dtype
    if dtype not in _GROUPED_DTYPES or other.dtype != dtype or arguments.get("bias") is not None:
        return NotImplemented
    if arguments.get("out_dtype") not in (None, dtype):
        return NotImplemented
    offsets = arguments.get("offs")
    sizes: tuple[int, ...] = (one.shape[-2], other.shape[-1])
    if one.dim() == other.dim():
        groups = one.shape[0] if one.dim() == 3 or offsets is None else offsets.shape[0]
        sizes = (groups, *sizes)
    unit = _ROW_BYTES // one.element_size()
    row = -(-sizes[-1] // unit) * unit
    strides = (row * sizes[-2], row, 1)[-len(sizes) :]
    return torch.empty_strided(sizes, strides, dtype=dtype, device=one.device)


def _reduced_loss(one: torch.Tensor, other: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
    """A reduced loss whose kernel computes all terms in the storage of its result.

    So the scalar keeps the bytes of all terms alive.
    """
    is_same_form = one.shape == other.shape and one.dtype == other.dtype
    if arguments.get("reduction") == _NOT_REDUCED or not is_same_form or one.numel() == 0:
        return NotImplemented
    return torch.empty(one.shape, dtype=one.dtype, device=one.device).as_strided((), ())


def _ctc_loss(log_probs: torch.Tensor, _: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
    """The losses, and the tensor that is saved for backward.

    The latter's width depends on the length of the longest target, a value of the batch. (If the
    step computes that length, reading it raises, see `graphs.capture.as_eager.known_values`.)
    """
    n_steps, n_rows, _n_labels = log_probs.shape
    longest = int(arguments["target_lengths"].max())
    return log_probs.new_empty(n_rows), log_probs.new_empty(n_rows, n_steps, 2 * longest + 1)


def _with_targets_in_bytes(
    operator: Any, _one: torch.Tensor, _other: torch.Tensor, arguments: Mapping[str, Any]
) -> Any:
    """`nll_loss`, or its backward, with targets in uint8, which the kernels accept too."""
    if arguments["target"].dtype != torch.uint8:
        return NotImplemented
    return operator(**{**arguments, "target": arguments["target"].long()})


def correct_fake_result(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """Correct the fake result of an operator on CPU tensors: dtypes, strides and storage size.

    result: as PyTorch's meta function has computed it.
    """
    if operator in _FUNCTIONAL_WRITES:  # the same on every device
        return _in_clone_of_storage(args[0], result)
    if operator not in _CORRECTED:
        return result
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
    if not _are_fake_cpu_tensors(tensors):
        return result
    if operator in _NORMS and any(item.dtype != tensors[0].dtype for item in tensors):
        # Half-precision values with float32 parameters, as under autocast: the kernel's mean and
        # deviation are in float32, the meta function's in the values' dtype.
        out, mean, deviation, *rest = result
        result = (out, mean.to(torch.float32), deviation.to(torch.float32), *rest)
    if operator in _RESIZED and result.numel() < tensors[0].numel():
        # The kernel allocates as many elements as the input has and then reshapes: a smaller
        # result keeps the whole storage (ATen/native/Im2Col.cpp, Col2Im.cpp).
        storage = tensors[0].new_empty(tensors[0].numel())
        result = storage.as_strided(result.shape, result.stride())
    if operator in _STRIDES_BY_KERNEL:
        result = _with_kernel_strides(operator, args, kwargs, result)
    return result


def _in_clone_of_storage(view: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result of a functional write, on a clone of the written view's whole storage.

    The kernels call `clone_preserve_strides`.

    view: the view that is written.
    result: as the meta function has it, without the rest of the storage.
    """
    n = view.untyped_storage().nbytes() // view.element_size()
    if not isinstance(view, FakeTensor) or n <= result.numel():
        return result
    pairs = zip(view.shape, view.stride(), strict=True)
    is_expanded = any(size > 1 and not stride for size, stride in pairs)
    if view.is_conj() or view.is_neg() or is_expanded:
        return result  # computed, or copied without the repeated elements
    return view.new_empty(n).as_strided(view.shape, view.stride(), view.storage_offset())


def _with_kernel_strides(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """The result with its strides in the order that the kernel gives them."""
    tensors = [item for item in args if isinstance(item, torch.Tensor)]
    if all(item.is_contiguous() for item in tensors) or any(not t.numel() for t in tensors):
        return result
    arguments = named_arguments(operator, args, {})
    with unset_fake_temporarily(), torch.no_grad():
        small = operator(*(_small_argument(a, name) for name, a in arguments.items()), **kwargs)

    def in_kernel_order(one: Any, other: Any) -> Any:
        if not isinstance(one, torch.Tensor) or other is None:  # None: a gradient not asked for
            return one
        return one.as_strided(one.shape, _dense_strides(one.shape, _dims_by_stride(other)))

    if isinstance(result, torch.Tensor):
        return in_kernel_order(result, small)
    return tuple(in_kernel_order(one, other) for one, other in zip(result, small, strict=True))


def _are_fake_cpu_tensors(items: Sequence[Any]) -> bool:
    return all(isinstance(item, FakeTensor) and item.device.type == "cpu" for item in items)


def _small_argument(item: Any, name: str) -> Any:
    """An argument for a small run of the kernel.

    A tensor becomes a real one of at most two elements per dimension, with strides in the same
    order.
    """
    if name == "normalized_shape":
        return [min(size, 2) for size in item]
    if not isinstance(item, torch.Tensor):
        return item
    shape = [min(size, 2) for size in item.shape]
    strides = list(_dense_strides(shape, _dims_by_stride(item)))
    if item.stride()[-1:] != (1,) and 1 not in item.stride():  # a slice of every other element
        strides = [2 * stride for stride in strides]
    strides = [0 if whole == 0 else own for whole, own in zip(item.stride(), strides, strict=True)]
    return torch.ones(4 ** len(shape), dtype=item.dtype).as_strided(shape, strides)


def _dims_by_stride(tensor: torch.Tensor) -> list[int]:
    """The tensor's dimensions from the largest stride to the smallest."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, for dimensions in this order (the largest stride first)."""
    strides, stride = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride *= max(1, shape[dim])
    return tuple(strides)


_Rule = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], Any]
_REDUCED_LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)
_LOSSES_OF_CLASSES = (aten.nll_loss_forward.default, aten.nll_loss_backward.default)
_RULES: dict[Any, _Rule] = {
    aten._grouped_mm.default: _grouped_product,
    aten._ctc_loss.Tensor: _ctc_loss,
    **dict.fromkeys(_REDUCED_LOSSES, _reduced_loss),
    **{each: partial(_with_targets_in_bytes, each) for each in _LOSSES_OF_CLASSES},
}
_FUNCTIONAL_WRITES = (
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
)
_RESIZED = (aten.im2col.default, aten.col2im.default)
_NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
)
_STRIDES_BY_KERNEL_NAMES = """
    _native_batch_norm_legit_functional native_batch_norm_backward native_layer_norm_backward
    log_sigmoid_forward log_sigmoid_backward elu_backward hardsigmoid_backward
    hardswish_backward hardtanh_backward leaky_relu_backward softplus_backward
    _log_softmax_backward_data _prelu_kernel_backward huber_loss_backward mse_loss_backward
    smooth_l1_loss_backward roll
"""
_STRIDES_BY_KERNEL = frozenset(
    getattr(aten, name).default for name in _STRIDES_BY_KERNEL_NAMES.split()
)
"""Operators whose kernel returns other strides than the meta function, for some order of the
strides of their arguments (`tests/graphs/costs/test_operators.py` checks a list of them)."""
_CORRECTED = _STRIDES_BY_KERNEL.union(_NORMS, _RESIZED)
