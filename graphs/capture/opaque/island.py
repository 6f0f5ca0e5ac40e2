"""A call of a module that runs in eager mode, with an autograd graph of its own: an island.

The graph around it sees four things: the tensors that go in (those of the call, parameters and
buffers), the tensors that come out, gradients, and what the call has saved for backward.

- What the call saves of its own inputs and outputs is not kept here: it is read again from those
  that the backward pass is given, which may have been recomputed meanwhile.
- Gradients that other readers of an input have made before are where its sum begins, so the terms
  are added in the order of eager mode.
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

from graphs.capture.as_eager import outside_of_functions
from graphs.capture.refuse import SideEffectError, buffers_of, refuse_replaced_buffers
from graphs.model_calls import HOLE, Call, named_state, nested, same_strides


@dataclass(frozen=True)
class Autocast:
    """The state of autocast in which the module is called.

    Its cache of casts stays off: it would hold them to the end of the caller's autocast block. It
    makes no difference to weights that are used once.
    """

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        kind = device.type
        on = torch.is_autocast_enabled(kind)
        return cls(kind, torch.get_autocast_dtype(kind) if on else None)

    def context(self) -> Any:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.dtype, cache_enabled=False)


@dataclass(frozen=True)
class Asked:
    """Whether gradients are on where the module is called, and which of its tensors need one.

    tangents: strides of the gradients of its outputs, by position, where they are not contiguous:
        the strides of the gradients that it makes, which other operators read, follow from them.
    """

    grad_enabled: bool
    needs: tuple[bool, ...]
    tangents: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def now(cls, tensors: Sequence[torch.Tensor], *, first: Sequence[int]) -> Asked:
        """first: as in `Island`."""
        on = torch.is_grad_enabled()
        again = {i for i, at in enumerate(first) if at != i}
        return cls(
            on, tuple(on and t.requires_grad and i not in again for i, t in enumerate(tensors))
        )


@dataclass(eq=False)
class _Packed:
    """A saved tensor: itself, or (index among the known tensors, geometry) of a view of one."""

    tensor: torch.Tensor | None
    view: tuple[int, tuple[int, ...], tuple[int, ...], int] | None = None


@dataclass(eq=False)
class _Box:
    """What the hooks of saved tensors see. No edge of the graph, which holds the hooks.

    packed: while the call runs. known: inputs and outputs, while the backward pass runs.
    """

    packed: list[_Packed] = field(default_factory=list)
    known: list[torch.Tensor | None] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> _Packed:
        # detached: a tensor holds the node that made it, which may be the one that saves it
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

    def hand_back(
        self, known: Sequence[torch.Tensor], given: set[int] | None
    ) -> tuple[set[int], int]:
        """Let go of what was saved of known tensors.

        Returns which of them will be read, and the bytes of what stays saved.

        given: those that the backward pass is given (None: all). Another one is kept as a copy.
        """
        places: dict[int | None, int] = {}
        for position, given_tensor in enumerate(known):
            places.setdefault(_storage(given_tensor), position)
        found: set[int] = set()
        for each in self.packed:
            tensor = each.tensor
            index = None if tensor is None else places.get(_storage(tensor))
            if tensor is None or index is None or tensor.dtype != known[index].dtype:
                continue
            if given is not None and index not in given:
                each.tensor = tensor.clone()
                continue
            offset = tensor.storage_offset() - known[index].storage_offset()
            each.view = index, tuple(tensor.shape), tensor.stride(), int(offset)
            each.tensor = None
            found.add(index)
        kept = (each.tensor for each in self.packed if each.tensor is not None)
        storages = {_storage(t): t for t in kept if _storage(t) not in places}
        n_bytes = sum(t.untyped_storage().nbytes() for key, t in storages.items() if key)
        self.packed.clear()  # autograd holds them
        return found, n_bytes


@dataclass(eq=False)
class Saved:
    """What a call has saved for backward; freeing it frees that.

    outputs, inputs: edges of the autograd graph; None where no gradient passes.
    """

    box: _Box = field(default_factory=_Box)
    outputs: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)


def _storage(tensor: torch.Tensor) -> int | None:
    if tensor.layout != torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


class _Entrance(torch.autograd.Function):
    """Where the island's graph ends: gradients are taken here and go no further."""

    @staticmethod
    def forward(ctx: Any, _token: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        raise AssertionError("gradients end here")


class _Called(nn.Module):
    """Calls the module, its hooks too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = buffers_of(self.inner)
        output = self.inner(*args, **kwargs)
        refuse_replaced_buffers(before, self.inner)
        return output


def state_of(module: nn.Module) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Parameters, then buffers, each once; and the position of each attribute of a module."""
    tensors: dict[int, torch.Tensor] = {}
    for each in (*module.parameters(), *module.buffers()):
        tensors.setdefault(id(each), each)
    positions = {key: index for index, key in enumerate(tensors)}
    names = {f"inner.{name}": positions[id(tensor)] for name, tensor in named_state(module)}
    return list(tensors.values()), names


AsPlanned = Callable[[nested.Spec, list[torch.Tensor]], list[torch.Tensor]]


def first_places(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor the position of the first that is the same object."""
    places: dict[int, int] = {}
    return tuple(places.setdefault(id(tensor), i) for i, tensor in enumerate(tensors))


@dataclass(frozen=True, eq=False)
class Island:
    """One call of a module on flat lists of tensors: those of the call, parameters, buffers.

    call: its tensors are dropped.
    first: for each tensor of the call, the position where the same object is given first; its
        gradient goes there. names: attribute of the module -> position in its state.
    asked: the mode that the module is called in, and for each tensor whether it needs a gradient.
    n_parameters: of the state.
    changed: positions (in the whole list) of buffers that the call changes.
    given: positions of the tensors (outputs counted after the inputs) that the backward pass is
        given (None: all).
    overwritten: position of a tensor of the call that is written in place and returned -> which of
        the outputs it is. The call is given a copy.
    """

    module: nn.Module
    call: Call
    first: tuple[int, ...]
    names: dict[str, int]
    asked: Asked
    n_parameters: int
    device: torch.device
    autocast: Autocast
    changed: tuple[int, ...] = ()
    given: frozenset[int] | None = None
    overwritten: Mapping[int, int] = field(default_factory=dict)

    @property
    def needs(self) -> tuple[bool, ...]:
        return self.asked.needs

    @functools.cached_property
    def n_inputs(self) -> int:
        return sum(item is HOLE for item in self.call.rest)

    def forward(self, tensors: Sequence[torch.Tensor], as_planned: AsPlanned | None = None) -> Ran:
        """Call the module. Raises SideEffectError where it changes what it was given.

        as_planned: gives the outputs the layout that the backward pass will find them in.
        """
        n = self.n_inputs
        saved = Saved()
        with outside_of_functions(), torch.set_grad_enabled(self.asked.grad_enabled):
            inputs = self._inputs(tensors[:n], saved)
            state, new = self._state(tensors, saved)
            watched = [t for i, t in enumerate(tensors) if i not in self.changed]
            versions = [t._version for t in watched]
            args, kwargs = self.call.arguments(inputs)
            with self.autocast.context(), saved_tensors_hooks(saved.box.pack, saved.box.unpack):
                output = torch.func.functional_call(
                    _Called(self.module), state, args, kwargs, tie_weights=False
                )
            if [t._version for t in watched] != versions:
                raise SideEffectError(
                    f"{type(self.module).__name__} changes one of its arguments, parameters or "
                    "buffers in place"
                )
            flat, spec = nested.flatten(output)
            outs = [item for item in flat if isinstance(item, torch.Tensor)]
            saved.outputs = [get_gradient_edge(t) if t.requires_grad else None for t in outs]
            outs = [t.detach() for t in outs]
        if as_planned is not None:  # first: views of outputs are saved as views of the final ones
            outs = as_planned(spec, outs)
        given = None if self.given is None else {*self.given}
        read, packed_bytes = saved.box.hand_back([*tensors, *outs], given)
        rest = [HOLE if isinstance(item, torch.Tensor) else item for item in flat]
        buffers = [new[i] for i in self.changed]
        return Ran(outs, buffers, saved, spec, rest, frozenset(read), packed_bytes)

    def _inputs(self, tensors: Sequence[torch.Tensor], saved: Saved) -> list[torch.Tensor]:
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

    def _state(
        self, tensors: Sequence[torch.Tensor], saved: Saved
    ) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
        """The module's attributes, and the buffers among them that it may write."""
        n, new, state = self.n_inputs, {}, []
        for i in range(n, len(tensors)):
            if i < n + self.n_parameters:
                leaf: torch.Tensor = nn.Parameter(tensors[i].detach(), requires_grad=self.needs[i])
                state.append(leaf)
                saved.inputs.append(get_gradient_edge(leaf) if self.needs[i] else None)
                continue
            if i in self.changed:
                new[i] = tensors[i].clone()
            state.append(new.get(i, tensors[i].detach()))
            saved.inputs.append(None)
        return {name: state[at] for name, at in self.names.items()}, new

    def backward(
        self,
        saved: Saved,
        known: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        starts: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """The gradients of the tensors that need one, in order; None where none arrives.

        known: the inputs and outputs, where they are given.
        starts: for each of these gradients the sum of those that other readers made before.
        """
        pairs = zip(saved.outputs, gradients, strict=True)
        roots = [(edge, g) for edge, g in pairs if edge is not None and g is not None]
        wanted = [edge for edge in saved.inputs if edge is not None]
        begun = zip(wanted, starts, strict=True)
        roots += [(edge, start) for edge, start in begun if start is not None]
        if not roots:
            return [None] * len(wanted)
        saved.box.known = list(known)
        with outside_of_functions():
            found = torch.autograd.grad(
                [edge for edge, _ in roots], wanted, [g for _, g in roots], allow_unused=True
            )
        saved.box.known = []
        given = [t for t in (*known, *gradients, *starts) if t is not None]
        taken = {_storage(tensor) for tensor in given}
        return [_own(gradient, taken) for gradient in found]


@dataclass(frozen=True, eq=False)
class Ran:
    """A call that has run: tensors that came out, new buffers, what it saved, the output without
    its tensors, which inputs and outputs it has saved, and the bytes of other saved tensors."""

    outs: list[torch.Tensor]
    buffers: list[torch.Tensor]
    saved: Saved
    spec: nested.Spec
    rest: list[Any]
    read: frozenset[int]
    packed_bytes: int


def _own(gradient: torch.Tensor | None, taken: set[int | None]) -> torch.Tensor | None:
    """The gradient in memory of its own, with the same strides."""
    if gradient is None:
        return None
    if _storage(gradient) in taken:
        copy = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
        geometry = gradient.storage_offset(), gradient.shape, gradient.stride()
        storage: Any = gradient.untyped_storage()
        gradient = copy.set_(storage.clone(), *geometry)
    taken.add(_storage(gradient))
    return gradient


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor with these strides; a copy where they are others."""
    if same_strides(tensor.shape, tensor.stride(), strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
