"""Runs a call of a module in eager mode, with an autograd graph of its own: an island.

The graph around it sees four things: the tensors that go in (those of the call, parameters and
buffers), the tensors that come out, gradients, and what the call has saved for backward.

- If the call saves its own inputs and outputs for backward, they are not kept here: the backward
  pass is given them, possibly recomputed.
- If other readers of an input have already made gradients for it, the island's gradients are added
  to their sum one by one, so that the terms are added in the order of eager mode.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from graphs.capture.as_eager import autograd_keys_included
from graphs.capture.refuse import SideEffectError, buffers_of, refuse_replaced_buffers
from graphs.model_calls import (
    HOLE,
    Call,
    dense_storage_key,
    named_state,
    nested,
    same_strides,
    strided_like,
)


@dataclass(frozen=True)
class Autocast:
    """The state of autocast in which the module is called (dtype None: off).

    Autocast's cache is off in an island: it would hold the cast weights to the end of the caller's
    autocast block, and makes no difference for weights that are used once.
    """

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def current(cls, device: torch.device) -> Autocast:
        kind = device.type
        is_on = torch.is_autocast_enabled(kind)
        return cls(kind, torch.get_autocast_dtype(kind) if is_on else None)

    def context(self) -> Any:
        """A context with this state."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.dtype, cache_enabled=False)


@dataclass(frozen=True)
class GradientRequest:
    """Which gradients a call is asked for.

    grad_enabled: whether gradients are enabled where the module is called.
    needs: for each tensor of the island, whether it needs a gradient.
    tangent_strides: position of an output -> strides of its gradient, if not contiguous. The
        strides of the gradients that the call makes depend on them.
    """

    grad_enabled: bool
    needs: tuple[bool, ...]
    tangent_strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def current(cls, tensors: Sequence[torch.Tensor], *, first: Sequence[int]) -> GradientRequest:
        """What a call with these tensors is asked for in the present gradient mode.

        first: as in `Island`; only the first of several equal tensors needs a gradient.
        """
        on = torch.is_grad_enabled()
        repeated = {i for i, at in enumerate(first) if at != i}
        return cls(
            on, tuple(on and t.requires_grad and i not in repeated for i, t in enumerate(tensors))
        )


@dataclass(eq=False)
class _Packed:
    """A saved tensor: the tensor itself, or how to view a known tensor (an input or output).

    view: index of the known tensor, shape, strides, offset relative to it in elements.
    """

    tensor: torch.Tensor | None
    view: tuple[int, tuple[int, ...], tuple[int, ...], int] | None = None


@dataclass(eq=False)
class _SavedTensorHooks:
    """The state of the hooks on saved tensors; has no edges of the graph, which holds the hooks.

    packed: the saved tensors, while the call runs.
    known: inputs and outputs, while the backward pass runs.
    """

    packed: list[_Packed] = field(default_factory=list)
    known: list[torch.Tensor | None] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> _Packed:
        # detached: a tensor holds the autograd node that made it, maybe the one that saves it
        self.packed.append(_Packed(tensor.detach()))
        return self.packed[-1]

    pack.is_of_trace = True  # type: ignore[attr-defined]

    def unpack(self, packed: _Packed) -> torch.Tensor:
        if packed.view is None:
            assert packed.tensor is not None
            return packed.tensor
        index, shape, strides, offset = packed.view
        base = self.known[index]
        assert base is not None
        return base.as_strided(shape, strides, base.storage_offset() + offset)

    def release_known(
        self, known: Sequence[torch.Tensor], reads: set[int] | None
    ) -> tuple[set[int], int]:
        """Stop holding saved tensors that are known tensors or views of them.

        Returns the indices of the known tensors that backward will read, and the bytes of the
        tensors that stay saved.

        known: inputs and outputs of the call.
        reads: indices of those that the backward pass is given (None: all); others are copied.
        """
        position_of: dict[int | None, int] = {}
        for position, given_tensor in enumerate(known):
            position_of.setdefault(dense_storage_key(given_tensor), position)
        found: set[int] = set()
        for each in self.packed:
            tensor = each.tensor
            index = None if tensor is None else position_of.get(dense_storage_key(tensor))
            if tensor is None or index is None or tensor.dtype != known[index].dtype:
                continue
            if reads is not None and index not in reads:
                each.tensor = tensor.clone()
                continue
            offset = tensor.storage_offset() - known[index].storage_offset()
            each.view = index, tuple(tensor.shape), tensor.stride(), int(offset)
            each.tensor = None
            found.add(index)
        kept = [each.tensor for each in self.packed if each.tensor is not None]
        storages = [t.untyped_storage() for t in kept if t.layout == torch.strided]
        kept_bytes = {storage._cdata: storage.nbytes() for storage in storages}
        n_bytes = sum(n for key, n in kept_bytes.items() if key not in position_of)
        self.packed.clear()  # autograd holds them
        return found, n_bytes


@dataclass(eq=False)
class Saved:
    """What a call has saved for backward; freeing this object frees the saved tensors.

    outputs, inputs: edges of the autograd graph for each output and input; None if no gradient
        passes there.
    """

    hooks: _SavedTensorHooks = field(default_factory=_SavedTensorHooks)
    outputs: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)


class _Entrance(torch.autograd.Function):
    """Detaches the inputs: the end of the island's autograd graph, where gradients are taken."""

    @staticmethod
    def forward(ctx: Any, _token: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        raise AssertionError("gradients end here")


class _CallWithHooks(nn.Module):
    """Calls the module with its hooks, and refuses that it replaces its buffers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = buffers_of(self.inner)
        output = self.inner(*args, **kwargs)
        refuse_replaced_buffers(before, self.inner)
        return output


def state_of(module: nn.Module) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The module's parameters, then its buffers, each once; and attribute name -> position."""
    tensors: dict[int, torch.Tensor] = {}
    for each in (*module.parameters(), *module.buffers()):
        tensors.setdefault(id(each), each)
    positions = {key: index for index, key in enumerate(tensors)}
    names = {f"inner.{name}": positions[id(tensor)] for name, tensor in named_state(module)}
    return list(tensors.values()), names


AsPlanned = Callable[[nested.Spec, list[torch.Tensor]], list[torch.Tensor]]
"""(structure of the output, its tensors) -> the same tensors in the planned layout."""


def first_positions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor, the position of the first one that is the same object."""
    places: dict[int, int] = {}
    return tuple(places.setdefault(id(tensor), i) for i, tensor in enumerate(tensors))


@dataclass(frozen=True, eq=False)
class Island:
    """One call of a module on one flat list: tensors of the call, then parameters and buffers.

    call: the arguments, without their tensors.
    first: for each tensor of the call, the position of the first one that is the same object; its
        gradient goes there.
    names: attribute of the module -> position in its state (parameters and buffers).
    request: which gradients the call is asked for.
    n_parameters: number of parameters in the state.
    autocast: the state of autocast in which the module is called.
    changed_buffers: positions (in the whole list) of buffers that the call changes.
    reads: positions of the tensors (outputs counted after the whole list) that the backward pass is
        given (None: all).
    overwritten: position of a tensor of the call that is written in place and returned -> index of
        the output that it is. The call gets a copy of such a tensor.
    """

    module: nn.Module
    call: Call
    first: tuple[int, ...]
    names: dict[str, int]
    request: GradientRequest
    n_parameters: int
    device: torch.device
    autocast: Autocast
    changed_buffers: tuple[int, ...] = ()
    reads: frozenset[int] | None = None
    overwritten: Mapping[int, int] = field(default_factory=dict)

    @property
    def needs(self) -> tuple[bool, ...]:
        return self.request.needs

    @functools.cached_property
    def n_inputs(self) -> int:
        return sum(item is HOLE for item in self.call.rest)

    def forward(
        self, tensors: Sequence[torch.Tensor], as_planned: AsPlanned | None = None
    ) -> CallResult:
        """Call the module. Raises SideEffectError if it changes a tensor that it must not change.

        as_planned: puts the outputs into the layout in which the backward pass will get them.
        """
        n, saved = self.n_inputs, Saved()
        with autograd_keys_included(), torch.set_grad_enabled(self.request.grad_enabled):
            inputs = self._inputs(tensors[:n], saved)
            state, buffer_copies = self._module_state(tensors, saved)
            versions = [t._version for t in tensors]  # of what is changed, the call has copies
            args, kwargs = self.call.arguments(inputs)
            with self.autocast.context(), saved_tensors_hooks(saved.hooks.pack, saved.hooks.unpack):
                output = torch.func.functional_call(
                    _CallWithHooks(self.module), state, args, kwargs, tie_weights=False
                )
            if [t._version for t in tensors] != versions:
                raise SideEffectError(
                    f"{type(self.module).__name__} changes one of its arguments or parameters in "
                    "place, or a buffer by something else than its attribute (a list, a view)"
                )
            flat, spec = nested.flatten(output)
            outs = [item for item in flat if isinstance(item, torch.Tensor)]
            saved.outputs = [get_gradient_edge(t) if t.requires_grad else None for t in outs]
            outs = [t.detach() for t in outs]
        # Before `release_known`: saved views of outputs become views of the final outputs.
        if as_planned is not None:
            outs = as_planned(spec, outs)
        given = None if self.reads is None else {*self.reads}
        read, packed_bytes = saved.hooks.release_known([*tensors, *outs], given)
        rest = [HOLE if isinstance(item, torch.Tensor) else item for item in flat]
        buffers = [buffer_copies[i] for i in self.changed_buffers]
        return CallResult(outs, buffers, saved, spec, rest, frozenset(read), packed_bytes)

    def _inputs(self, tensors: Sequence[torch.Tensor], saved: Saved) -> list[torch.Tensor]:
        """The tensors to call the module with: leaves of the island's graph, copies if written."""
        found = [tensor.detach() for tensor in tensors]
        saved.inputs = [None] * len(found)
        needed = [i for i in range(len(found)) if self.needs[i]]
        if needed:
            token = torch.empty(0, requires_grad=True)
            entered: Any = _Entrance.apply(  # type: ignore[no-untyped-call]
                token, *(found[i] for i in needed)
            )
            for i, tensor in zip(needed, entered, strict=True):
                found[i], saved.inputs[i] = tensor, get_gradient_edge(tensor)
        for i in self.overwritten:
            found[i] = found[i].clone()
        return [found[i] for i in self.first]  # the module may ask `query is key`

    def _module_state(
        self, tensors: Sequence[torch.Tensor], saved: Saved
    ) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
        """The tensors for the module's attributes, and copies of the buffers that it may write."""
        n, buffer_copies, state = self.n_inputs, {}, []
        for i in range(n, len(tensors)):
            if i < n + self.n_parameters:
                leaf: torch.Tensor = nn.Parameter(tensors[i].detach(), requires_grad=self.needs[i])
                state.append(leaf)
                saved.inputs.append(get_gradient_edge(leaf) if self.needs[i] else None)
                continue
            if i in self.changed_buffers:
                buffer_copies[i] = tensors[i].clone()
            state.append(buffer_copies.get(i, tensors[i].detach()))
            saved.inputs.append(None)
        return {name: state[at] for name, at in self.names.items()}, buffer_copies

    def backward(
        self,
        saved: Saved,
        known: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        starts: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """The gradients of the tensors that need one, in order; None if no gradient arrives.

        saved: what the forward pass has saved.
        known: the inputs and outputs; None for those that are not given.
        gradients: the gradients of the outputs.
        starts: for each gradient to compute, the sum of those that other readers of the tensor have
            made already; the island's terms are added to it.
        """
        pairs = zip(saved.outputs, gradients, strict=True)
        roots = [(edge, g) for edge, g in pairs if edge is not None and g is not None]
        input_edges = [edge for edge in saved.inputs if edge is not None]
        starts_of_edges = zip(input_edges, starts, strict=True)
        roots += [(edge, start) for edge, start in starts_of_edges if start is not None]
        if not roots:
            return [None] * len(input_edges)
        saved.hooks.known = list(known)
        with autograd_keys_included():
            found = torch.autograd.grad(
                [edge for edge, _ in roots], input_edges, [g for _, g in roots], allow_unused=True
            )
        saved.hooks.known = []
        given_tensors = [t for t in (*known, *gradients, *starts) if t is not None]
        used_storages = {dense_storage_key(tensor) for tensor in given_tensors}
        return [_in_own_memory(gradient, used_storages) for gradient in found]


@dataclass(frozen=True, eq=False)
class CallResult:
    """The results of a call.

    outs: the tensors that it returned.
    buffers: new values of the buffers that it changes.
    saved: what it saved for backward.
    spec, rest: structure of its output, and the leaves with HOLE in place of tensors.
    saved_positions: positions of the inputs and outputs that it saved for backward.
    packed_bytes: bytes of the other saved tensors.
    """

    outs: list[torch.Tensor]
    buffers: list[torch.Tensor]
    saved: Saved
    spec: nested.Spec
    rest: list[Any]
    saved_positions: frozenset[int]
    packed_bytes: int


def _in_own_memory(gradient: torch.Tensor | None, storages: set[int | None]) -> torch.Tensor | None:
    """The gradient in memory of its own, with the same strides.

    storages: storages that are in use; that of the result is added.
    """
    if gradient is None:
        return None
    if dense_storage_key(gradient) in storages:
        copy = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
        geometry = gradient.storage_offset(), gradient.shape, gradient.stride()
        storage: Any = gradient.untyped_storage()
        gradient = copy.set_(storage.clone(), *geometry)
    storages.add(dense_storage_key(gradient))
    return gradient


def with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor with these strides; a copy if it has others."""
    if same_strides(tensor.shape, tensor.stride(), strides):
        return tensor
    return strided_like(tensor, strides=strides).copy_(tensor)
