"""One operator call of a traced step, and what it computes and moves: FLOPs and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, shape_wrapper

aten = torch.ops.aten


@dataclass(frozen=True)
class OpCall:
    """An operator call with tensors (fake ones, or real) in the places of its tensor arguments.

    target: an OpOverload, or a higher-order operator. value: what the call returns.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any

    @classmethod
    def from_node(cls, node: torch.fx.Node) -> OpCall:
        """The call of a traced fx node, by the values in its `meta`."""
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs),
            lambda item: item.meta.get("val"),  # a subgraph of a higher-order operator has none
        )
        return cls(target=node.target, args=args, kwargs=kwargs, value=node.meta.get("val"))

    @property
    def packet(self) -> Any:
        """The operator whatever its overload; None for what is no ATen operator."""
        return getattr(self.target, "overloadpacket", None)

    def inputs(self) -> list[torch.Tensor]:
        return _tensors((self.args, dict(self.kwargs)))

    def outputs(self) -> list[torch.Tensor]:
        return _tensors(self.value)

    def mutated(self) -> list[torch.Tensor]:
        """The inputs that the call writes, by its schema."""
        schema = getattr(self.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return []
        given = {
            argument.name: value
            for argument, value in zip(schema.arguments, self.args, strict=False)
        } | dict(self.kwargs)
        written = (a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
        return _tensors([given.get(name) for name in written])

    def made_bytes(self) -> int:
        """Bytes of the storages that the call allocates for its outputs, each once."""
        return sum(_storages(self.outputs(), but=self.inputs()).values())

    def is_view(self) -> bool:
        """Whether it returns other views of its inputs' storages, and does no more."""
        outputs = self.outputs()
        return bool(outputs) and not _storages(outputs, but=self.inputs()) and not self.mutated()

    def key(self) -> Any:
        """Equal for calls that cost the same: operator, options, and per tensor its shape, strides,
        dtype and device type."""
        return (self.target, _described(self.args), _described(self.kwargs))


def _tensors(items: Any) -> list[torch.Tensor]:
    return [item for item in pytree.tree_leaves(items) if isinstance(item, torch.Tensor)]


def _storages(tensors: Iterable[torch.Tensor], *, but: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage of the tensors, but for those of others."""
    old = {item.untyped_storage()._cdata for item in but}
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return {storage: n_bytes for storage, n_bytes in found.items() if storage not in old}


def _described(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        strides = item.stride() if item.layout == torch.strided else item.layout
        return (tuple(item.shape), strides, item.dtype, item.device.type)
    if isinstance(item, list | tuple):
        return tuple(_described(part) for part in item)
    if isinstance(item, Mapping):
        return tuple((name, _described(part)) for name, part in sorted(item.items()))
    return (type(item), repr(item))


# ---- FLOPs -------------------------------------------------------------------------------------


Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores and their product with the values; grouped queries read a head of keys together.

    As in torch's registry, a causal mask is not counted as half of the work.
    """
    n_scores = math.prod(query[:-1]) * key[-2]
    return 2 * n_scores * (query[-1] + value[-1])


def _attention_backward(
    _: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any
) -> int:
    """The scores again, then the gradients of values, probabilities, queries and keys."""
    n_scores = math.prod(query[:-1]) * key[-2]
    return 2 * n_scores * (3 * query[-1] + 2 * value[-1])


def _rnn(inputs: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """cuDNN's RNN: every weight matrix of every layer meets every step of every sequence."""
    matrices = sum(math.prod(shape) for shape in weights if len(shape) == 2)
    return 2 * math.prod(inputs[:-1]) * matrices


def _rnn_backward(inputs: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    return 2 * _rnn(inputs, weights)


def _mkldnn_rnn(inputs: Shape, of_input: Shape, of_hidden: Shape, *_: Any, **__: Any) -> int:
    """One layer of nn.LSTM on the CPU, one way: both matrices meet every step."""
    return 2 * math.prod(inputs[:-1]) * (math.prod(of_input) + math.prod(of_hidden))


def _mkldnn_rnn_backward(
    inputs: Shape, of_input: Shape, of_hidden: Shape, *_: Any, **__: Any
) -> int:
    return 2 * _mkldnn_rnn(inputs, of_input, of_hidden)


def _addbmm(_: Shape, one: Shape, other: Shape, *__: Any, **___: Any) -> int:
    """A batch of products, summed over the batch."""
    return 2 * math.prod(one) * other[-1]


def _trilinear(*arguments: Any, **_: Any) -> int:
    """nn.Bilinear and its gradients: two products and a sum of three tensors, each expanded."""
    shapes: list[list[int]] = []
    for shape, expanded in zip(arguments[:3], arguments[3:6], strict=True):
        sizes = iter(shape)
        n_dims = len(shape) + len(expanded)
        shapes.append([1 if dim in expanded else next(sizes) for dim in range(n_dims)])
    n_terms: int = math.prod(max(sizes) for sizes in zip(*shapes, strict=True))
    return 3 * n_terms


def _grouped_mm(one: Shape, other: Shape, *_: Any, out_shape: Shape = (), **__: Any) -> int:
    """Rows or columns of the groups lie beside each other in a matrix, so each meets one group."""
    if len(one) == len(other) == 2:  # the inner dimension is what the groups share
        return 2 * one[0] * one[1] * other[1]
    return 2 * math.prod(out_shape) * one[-1]


_FORMULAS: tuple[tuple[Callable[..., int], tuple[str, ...]], ...] = (
    (
        _attention,
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math_for_mps",
        ),
    ),
    (
        _attention_backward,
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
    ),
    (_rnn, ("_cudnn_rnn",)),
    (_rnn_backward, ("_cudnn_rnn_backward",)),
    (_mkldnn_rnn, ("mkldnn_rnn_layer",)),
    (_mkldnn_rnn_backward, ("mkldnn_rnn_layer_backward",)),
    (_grouped_mm, ("_grouped_mm",)),
    (_addbmm, ("addbmm",)),
    (_trilinear, ("_trilinear",)),
)

FLOPS: Mapping[Any, Callable[..., int]] = {
    getattr(aten, name): formula
    for formula, names in _FORMULAS
    for name in names
    if hasattr(aten, name)
}
"""What torch's registry lacks, of shapes: also a `custom_mapping` for torch's FlopCounterMode.

Attention that the registry knows is here too: in older torch it refuses grouped queries. Attention
of torch.nn.MultiheadAttention's fast path is not: it has no backward.
"""

_wrapped: Callable[[Callable[..., int]], Callable[..., int]] = shape_wrapper
_FLOPS_OF_TENSORS = {packet: _wrapped(formula) for packet, formula in FLOPS.items()}


def flops_of(call: OpCall) -> int:
    """Floating-point operations of matrix products, convolutions and attention; others count 0."""
    packet = call.packet if call.packet is not None else call.target
    formula = _FLOPS_OF_TENSORS.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    return int(formula(*call.args, **call.kwargs, out_val=call.value))


# ---- bytes -------------------------------------------------------------------------------------

_READS_ROWS = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""Of their first input they read as many bytes as they write, not all of it."""

_NOT_READ: Mapping[Any, tuple[int, ...]] = {
    aten.nll_loss_forward: (0,),  # one number per target
    aten.nll_loss2d_forward: (0,),
    aten.nll_loss_backward: (1,),
    aten.nll_loss2d_backward: (1,),
    aten.max_pool2d_with_indices_backward: (1,),
    aten.avg_pool2d_backward: (1,),
    aten.zeros_like: (0,),
    aten.ones_like: (0,),
    aten.full_like: (0,),
    aten.rand_like: (0,),
    aten.randn_like: (0,),
    aten.new_zeros: (0,),
    aten.new_ones: (0,),
    aten.new_full: (0,),
    aten.fill_: (0,),
    aten.zero_: (0,),
    aten.copy_: (0,),
    aten._foreach_copy_: (0,),
    aten._foreach_zero_: (0,),
}
"""Positions of inputs of which the shape matters, or a number here and there."""

_WRITES_NOTHING = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}


def bytes_moved(call: OpCall) -> int:
    """Bytes of all tensors read and written, each once; none for a view.

    Of an expanded tensor the storage counts, not the numbers that are only there in name.
    """
    if call.packet in _WRITES_NOTHING or call.is_view():
        return 0
    made = [item for item in call.outputs() if all(item is not old for old in call.inputs())]
    written = sum(map(_n_bytes, made)) + sum(map(_n_bytes, call.mutated()))
    unread = _NOT_READ.get(call.packet, ())
    args = [arg for position, arg in enumerate(call.args) if position not in unread]
    if call.packet in _READS_ROWS:
        rest = _tensors((args[1:], dict(call.kwargs)))
        return 2 * written + sum(map(_n_bytes, rest))
    read = {id(item): item for item in _tensors((args, dict(call.kwargs)))}
    return written + sum(map(_n_bytes, read.values()))


def _n_bytes(tensor: torch.Tensor) -> int:
    n_bytes = tensor.numel() * tensor.element_size()
    if tensor.layout != torch.strided:
        return n_bytes
    return min(n_bytes, tensor.untyped_storage().nbytes())


def dtype_of(call: OpCall) -> str:
    """The dtype that the operator computes in, as torch names it: that of its largest
    floating-point input, else output; float32 where there is none."""
    for tensors in (call.inputs(), call.outputs()):
        floating = [item for item in tensors if item.dtype.is_floating_point]
        if floating:
            largest = max(floating, key=lambda item: item.numel())
            return str(largest.dtype).removeprefix("torch.")
    return "float32"
