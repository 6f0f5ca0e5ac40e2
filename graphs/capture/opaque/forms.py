"""What the graph knows about an island: forms of its tensors, bytes, costs, random generators."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.capture.opaque.island import Island
from graphs.capture.refuse import generators_of, restore_state, state_of_generator
from graphs.costs import ObservedRun
from graphs.model_calls import nested


@dataclass(frozen=True)
class Form:
    """The dtype of a tensor, its layout (shape, strides, offset) and the size of its storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.untyped_storage().nbytes(),
        )

    def empty(self, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of this form."""
        n = self.storage_bytes // self.dtype.itemsize
        storage = torch.empty(n, dtype=self.dtype, device=device)
        return storage.as_strided(self.shape, self.strides, self.offset)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class RandomSources:
    """The random generators that a module may draw from: torch's, Python's, NumPy's, its own.

    device: its generator counts, beside that of the CPU.
    others: the generators that are not torch's default ones.
    """

    device: torch.device
    others: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> RandomSources:
        return cls(device, tuple(generators_of(module).values()))

    def states(self) -> tuple[Any, ...]:
        """The states of all generators, as `set_states` takes them."""
        return self.torch_states(), self.other_states()

    def torch_states(self) -> tuple[torch.Tensor, ...]:
        """The states of torch's default generators: of the CPU, and of the card if it is used."""
        on_card = (torch.cuda.get_rng_state(self.device),) if self.device.type == "cuda" else ()
        return torch.get_rng_state(), *on_card

    def other_states(self) -> tuple[Any, ...]:
        """The states of the other generators."""
        return tuple(map(state_of_generator, self.others))

    def set_states(self, states: Sequence[Any]) -> None:
        """Set the states of all generators."""
        (on_host, *on_card), others = states
        torch.set_rng_state(on_host)
        for state in on_card:
            torch.cuda.set_rng_state(state, self.device)
        for generator, state in zip(self.others, others, strict=True):
            restore_state(generator, state)

    @contextlib.contextmanager
    def states_restored(self) -> Iterator[None]:
        """Restore the states of all generators on exit."""
        states = self.states()
        try:
            yield
        finally:
            self.set_states(states)


@dataclass(frozen=True, eq=False)
class OpaqueCall:
    """One call of an opaque part, as two nodes of the graph.

    path: of the module, method or function.
    island: the call itself.
    random: the generators that it may draw from.
    inputs: forms of the tensors of the call.
    outs: forms of the tensors that it returns.
    differentiable: for each tensor that it returns, whether it requires a gradient.
    spec: structure of the output, whose leaves are tensors and None.
    positions: positions of the tensors among the output's leaves.
    gradients: forms of the gradients that it makes, for the island's tensors that need one.
    saved_bytes: bytes kept for backward beside inputs and outputs; with a margin if they vary.
    least_bytes: saved_bytes without the margin.
    outside_bytes: bytes of saved tensors that exist without the call (constants); not in
        saved_bytes.
    forward, backward: operators, time and workspace of each pass.
    recomputable: whether it may be recomputed; not with hooks, which may have any effect, nor if
        it takes random numbers from the operating system, or gave other results when it ran again
        (it draws from a generator that nothing holds).
    draws: whether it draws numbers from torch's default generators.
    """

    path: str
    island: Island
    random: RandomSources
    inputs: tuple[Form, ...]
    outs: tuple[Form, ...]
    differentiable: tuple[bool, ...]
    spec: nested.Spec
    positions: tuple[int, ...]
    gradients: tuple[Form, ...]
    saved_bytes: int
    least_bytes: int
    outside_bytes: int
    forward: ObservedRun
    backward: ObservedRun
    recomputable: bool
    draws: bool

    def described(self) -> dict[str, Any]:
        """As JSON: the facts that depend on values, so that another run may find others."""
        return {
            "saved_bytes": self.saved_bytes,
            "reads": sorted(self.island.reads or ()),
            "differentiable": list(self.differentiable),
        }

    def as_planned(self, planned: Mapping[str, Any]) -> OpaqueCall:
        """The call with the facts of a plan, so that the traced graph is that of the plan.

        Returns the call unchanged if it does not fit the plan: it saves more bytes, needs gradients
        of other outputs, or is a call of another module.

        planned: what `described` returned when the plan was made.
        """
        known = len(self.island.needs) + len(self.outs)
        reads, flags = frozenset(planned["reads"]), tuple(planned["differentiable"])
        needed = (f for f, edge in zip(self.differentiable, flags, strict=True) if not edge)
        # The plan must save enough bytes, and count each output as differentiable that is so here.
        if planned["saved_bytes"] < self.least_bytes or any(needed) or not reads <= {*range(known)}:
            return self
        island = dataclasses.replace(self.island, reads=reads)
        saved_bytes = planned["saved_bytes"]
        return dataclasses.replace(
            self, island=island, saved_bytes=saved_bytes, differentiable=flags
        )

    def output(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The module's output, with these tensors as its leaves."""
        flat: list[Any] = [None] * self.spec.num_leaves
        for position, tensor in zip(self.positions, tensors, strict=True):
            flat[position] = tensor
        return nested.unflatten(flat, self.spec)
