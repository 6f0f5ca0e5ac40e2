"""One operator call of a traced step, its FLOPs and the bytes it moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, shape_wrapper

from graphs.model_calls import named_arguments, storage_key

aten = torch.ops.aten


@dataclass(frozen=True)
class OpCall:
    """An operator call; its tensors are fake, meta or real ones.

    target: an OpOverload, or a higher-order operator.
    args: positional arguments.
    kwargs: keyword arguments.
    value: what the call returns.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any

    @classmethod
    def from_node(cls, node: torch.fx.Node) -> OpCall:
        """The call that a traced fx node makes, with the values recorded in `meta["val"]`."""
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs),
            lambda item: item.meta.get("val"),  # a subgraph of a higher-order operator has none
        )
        return cls(target=node.target, args=args, kwargs=kwargs, value=node.meta.get("val"))

    @property
    def packet(self) -> Any:
        """The operator without its overload; None if the target is not an OpOverload."""
        return getattr(self.target, "overloadpacket", None)

    def inputs(self) -> list[torch.Tensor]:
        return tensors_in((self.args, dict(self.kwargs)))

    def outputs(self) -> list[torch.Tensor]:
        return tensors_in(self.value)

    def mutated(self) -> list[torch.Tensor]:
        """The inputs that the call writes in place, according to its schema."""
        schema = getattr(self.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return []
        given = named_arguments(self.target, self.args, self.kwargs)
        written = (a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
        return tensors_in([given.get(name) for name in written])

    def made_bytes(self) -> int:
        """Bytes of the storages that the call allocates for its outputs (views allocate none)."""
        return sum(_storages(self.outputs(), minus=self.inputs()).values())

    def is_view(self) -> bool:
        """Whether the call does nothing but return views of its inputs' storages."""
        outputs = self.outputs()
        return bool(outputs) and not _storages(outputs, minus=self.inputs()) and not self.mutated()

    def reads_values(self) -> bool:
        """Whether the shape of a result, or a number returned to Python (`.item()`), depends on
        values."""
        tags = getattr(self.target, "tags", ())
        if torch.Tag.dynamic_output_shape in tags:
            return not self._has_fixed_shapes()
        return torch.Tag.data_dependent_output in tags

    def _has_fixed_shapes(self) -> bool:
        """Whether a call that can have results of any shape has not: indices that are numbers, a
        given size. PyTorch tags the operator, not the call."""
        if self.packet is aten.index:
            return not any(t.dtype in _MASKS for t in tensors_in(self.args[1:]))
        if self.packet is aten.repeat_interleave:
            return self.kwargs.get("output_size") is not None
        return False

    def key(self) -> Any:
        """A key that is equal for calls that cost the same: the operator, its options, and the
        shape, strides, dtype and device type of each tensor."""
        return (self.target, _key_of(self.args), _key_of(self.kwargs))


@dataclass(frozen=True)
class Cost:
    """Seconds of one run, and bytes allocated besides inputs and outputs while it runs."""

    time_s: float
    workspace_bytes: int = 0


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an operator's arguments or results, in order.

    Operators nest only lists, tuples and dicts; pytree, which handles more, is ten times slower.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def _storages(tensors: Iterable[torch.Tensor], *, minus: Iterable[torch.Tensor]) -> dict[int, int]:
    """The storages of `tensors` that no tensor of `minus` uses: their id -> bytes."""
    old = {storage_key(item) for item in minus}
    found = {storage_key(t): t.untyped_storage().nbytes() for t in tensors}
    return {storage: n_bytes for storage, n_bytes in found.items() if storage not in old}


def _key_of(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        strides = item.stride() if item.layout == torch.strided else item.layout
        return (tuple(item.shape), strides, item.dtype, item.device.type)
    if isinstance(item, list | tuple):
        return tuple(_key_of(part) for part in item)
    if isinstance(item, Mapping):
        return tuple((name, _key_of(part)) for name, part in sorted(item.items()))
    return (type(item), repr(item))


# ---- FLOPs -------------------------------------------------------------------------------------


Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """The scores and their product with the values. With grouped queries, several heads share keys.

    As in torch's registry, a causal mask is not counted as half of the work.
    """
    n_scores = math.prod(query[:-1]) * key[-2]
    return 2 * n_scores * (query[-1] + value[-1])


def _attention_backward(
    _: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any
) -> int:
    """The scores, recomputed, then the gradients of values, probabilities, queries and keys."""
    n_scores = math.prod(query[:-1]) * key[-2]
    return 2 * n_scores * (3 * query[-1] + 2 * value[-1])


def _rnn(inputs: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """cuDNN's RNN: every step of every sequence is multiplied by every weight matrix."""
    matrices = sum(math.prod(shape) for shape in weights if len(shape) == 2)
    return 2 * math.prod(inputs[:-1]) * matrices


def _mkldnn_rnn(inputs: Shape, of_input: Shape, of_hidden: Shape, *_: Any, **__: Any) -> int:
    """One direction of one layer of nn.LSTM on the CPU: every step is multiplied by the input's and
    the hidden state's matrix."""
    return 2 * math.prod(inputs[:-1]) * (math.prod(of_input) + math.prod(of_hidden))


def _two_products_each(forward: Callable[..., int]) -> Callable[..., int]:
    """A backward pass that computes the gradients of inputs and weights: two products each."""
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def _trilinear(*arguments: Any, **_: Any) -> int:
    """nn.Bilinear and its gradients: two products and a sum of three tensors, each expanded."""
    shapes = map(expanded_shape, arguments[:3], arguments[3:6])
    n_terms: int = math.prod(max(sizes) for sizes in zip(*shapes, strict=True))
    return 3 * n_terms


def expanded_shape(shape: Shape, added: Sequence[int]) -> list[int]:
    """The shape with further dimensions of size 1, at the positions `added` of the result."""
    sizes = iter(shape)
    return [1 if dim in added else next(sizes) for dim in range(len(shape) + len(added))]


def _grouped_mm(one: Shape, other: Shape, *_: Any, out_shape: Shape = (), **__: Any) -> int:
    """The groups are rows or columns of one matrix; each is multiplied within its group only."""
    if len(one) == len(other) == 2:  # the inner dimension is what the groups share
        return 2 * one[0] * one[1] * other[1]
    return 2 * math.prod(out_shape) * one[-1]


_FORMULAS: Mapping[Callable[..., int], str] = {
    _attention: """
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps
    """,
    _attention_backward: """
        _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward
    """,
    _rnn: "_cudnn_rnn",
    _two_products_each(_rnn): "_cudnn_rnn_backward",
    _mkldnn_rnn: "mkldnn_rnn_layer",
    _two_products_each(_mkldnn_rnn): "mkldnn_rnn_layer_backward",
    _grouped_mm: "_grouped_mm",
    # one product, or a batch of them (also summed over the batch)
    lambda _, one, other, *__, **___: 2 * math.prod(one) * other[-1]: "addbmm addmm_ baddbmm_",
    _trilinear: "_trilinear",
}

FLOPS: Mapping[Any, Callable[..., int]] = {
    getattr(aten, name): formula
    for formula, names in _FORMULAS.items()
    for name in names.split()
    if hasattr(aten, name)
}
"""FLOPs as a function of shapes, for operators that torch's registry lacks; can also be passed to
FlopCounterMode as `custom_mapping`.

Attention is here although the registry has it, because in older torch that formula rejects grouped
queries. The fast path of torch.nn.MultiheadAttention is not, because it has no backward.
"""

_on_tensors: Callable[[Callable[..., int]], Callable[..., int]] = shape_wrapper
_FLOPS_OF_TENSORS = {packet: _on_tensors(formula) for packet, formula in FLOPS.items()}


def flops_of(call: OpCall) -> int:
    """Floating-point operations of the call; 0 for operators without a formula. Matrix products,
    convolutions, attention and RNNs have one."""
    packet = call.packet if call.packet is not None else call.target
    formula = _FLOPS_OF_TENSORS.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    return int(formula(*call.args, **call.kwargs, out_val=call.value))


# ---- bytes -------------------------------------------------------------------------------------

_MASKS = (torch.bool, torch.uint8)
"""Types of indices that select where they are not zero; others are numbers of rows."""
_READS_ROWS = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""Operators that read only as many bytes of their first input as they write, not all of it."""

_SHAPE_ONLY = """
    zeros_like ones_like full_like rand_like randn_like new_zeros new_ones new_full fill_ zero_
    copy_ _foreach_copy_ _foreach_zero_
"""
_NOT_READ: Mapping[Any, tuple[int, ...]] = {
    aten.nll_loss_forward: (0,),  # one element per target
    aten.nll_loss2d_forward: (0,),
    aten.nll_loss_backward: (1,),
    aten.nll_loss2d_backward: (1,),
    aten.max_pool2d_with_indices_backward: (1,),
    aten.avg_pool2d_backward: (1,),
    **{getattr(aten, name): (0,) for name in _SHAPE_ONLY.split()},
}
"""Positions of inputs that count as not read: only their shape, or a few elements, are."""

_ALLOCATIONS = "empty empty_like empty_strided new_empty new_empty_strided"
_WRITES_NOTHING = {getattr(aten, name) for name in _ALLOCATIONS.split()}


def bytes_moved(call: OpCall) -> int:
    """Bytes of all tensors that the call reads and writes, each counted once; 0 for a view.

    An expanded tensor counts the bytes of its storage.
    """
    if call.packet in _WRITES_NOTHING or call.is_view():
        return 0
    inputs = call.inputs()
    made = [item for item in call.outputs() if all(item is not old for old in inputs)]
    written = sum(map(_bytes_of, made)) + sum(map(_bytes_of, call.mutated()))
    unread = _NOT_READ.get(call.packet, ())
    args = [arg for position, arg in enumerate(call.args) if position not in unread]
    if call.packet in _READS_ROWS:
        rest = tensors_in((args[1:], dict(call.kwargs)))
        return 2 * written + sum(map(_bytes_of, rest))
    arguments = getattr(getattr(call.target, "_schema", None), "arguments", ())
    out = {argument.name for argument in arguments if argument.is_out}  # written, not read
    others = [value for name, value in call.kwargs.items() if name not in out]
    read = {id(item): item for item in tensors_in((args, others))}
    return written + sum(map(_bytes_of, read.values()))


def _bytes_of(tensor: torch.Tensor) -> int:
    n_bytes = tensor.numel() * tensor.element_size()
    if tensor.layout != torch.strided:
        return n_bytes
    return min(n_bytes, tensor.untyped_storage().nbytes())


def dtype_of(call: OpCall) -> str:
    """The name of the dtype that the operator is taken to compute in: that of its largest
    floating-point input, else of its largest floating-point output, else "float32"."""
    for tensors in (call.inputs(), call.outputs()):
        floating = [item for item in tensors if item.dtype.is_floating_point]
        if floating:
            largest = max(floating, key=lambda item: item.numel())
            return str(largest.dtype).removeprefix("torch.")
    return "float32"
