"""A step that runs again with another program, from where it started.

There are three reasons. The gradients that arrive are of other outputs than the program was made
for, or in another memory layout, which is known when the backward pass begins. Memory has run short
in the forward or the backward pass, and a program of a tighter plan may fit. Or the disk has failed
in one of them, and another program needs none. What the first program has kept is dropped; the
other one runs its forward pass from the same inputs, random state and buffers, so it has the same
bits.

Its backward pass goes piece by piece, as the engine asks for the gradients that the first program
still owes. So what was accumulated before stays as it is, and hooks fire once, where the gradients
leave the first program.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx

from graphs.capture import Capture
from graphs.model_calls import Call
from scheduler_runtime.execute.before_step import BeforeStep
from scheduler_runtime.execute.out_of_memory import is_out_of_memory
from scheduler_runtime.execute.random_state import get_state
from scheduler_runtime.execute.spill_file import DiskError

Place = tuple[str, ...] | int
"""Of a tensor that a program starts from: its path in the module, or its index in the call."""


class Underway(Protocol):
    """A step of a program that has run its forward pass again."""

    def piece(self, position: int) -> Mapping[Place, torch.Tensor | None]:
        """Run one piece of the backward pass; returns the gradients that it completes."""

    def close(self) -> None:
        """Free what is kept."""


class OnTensors(Protocol):
    """A program that can run on other tensors than those of the module and the call."""

    @property
    def reached(self) -> frozenset[Place]:
        """The leaves that it makes a gradient of."""

    def again(
        self, tensors: Mapping[Place, torch.Tensor], arrived: Mapping[int, torch.Tensor]
    ) -> Underway:
        """Run the forward pass, for these gradients of the flat outputs."""


@dataclass(frozen=True)
class Shortage:
    """Memory that ran short in a step, or a disk that failed.

    error: as it came. where: "forward pass", "backward pass", "step" (outside of both).
    held_bytes: what the step that runs again finds beside what its plan counts.
    """

    error: Exception
    where: str
    held_bytes: int = 0


@dataclass(frozen=True)
class Arrived:
    """Gradients that arrive.

    outputs: indices of the flat outputs that they are of.
    strides: pairs of such an index and their strides. Expanded ones have none: they are copied, and
        sums over them are the same in either layout.
    """

    outputs: tuple[int, ...]
    strides: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, gradients: Mapping[int, torch.Tensor]) -> Arrived:
        """gradients: by the index of the output."""
        laid_out = {at: each.stride() for at, each in gradients.items() if 0 not in each.stride()}
        return cls(tuple(gradients), tuple(laid_out.items()))


Tighter = Callable[[OnTensors, Shortage], OnTensors]
"""A program of the same step that takes less memory than this one, or no disk. Raises the error
where there is none."""


@dataclass(frozen=True)
class Others:
    """Where other programs for a call come from.

    for_gradients: for these gradients, while so many bytes are held.
    tighter: where memory runs short (None: then the step ends with the error).
    began: called with each step.
    without_disk: where the disk fails (None: as above).
    """

    for_gradients: Callable[[Call, Arrived, int], OnTensors]
    tighter: Tighter | None = None
    began: Callable[[Again], None] = lambda _again: None
    without_disk: Tighter | None = None

    def survives(self, error: Exception) -> bool:
        """Whether a step runs again after this error, if there is another program."""
        if isinstance(error, DiskError):
            return self.without_disk is not None
        return self.tighter is not None and is_out_of_memory(error)

    @property
    def survive_errors(self) -> bool:
        """Whether a step may run again after an error."""
        return self.tighter is not None or self.without_disk is not None

    def instead_of(self, program: OnTensors, shortage: Shortage) -> OnTensors:
        """Another program, for an error that a step survives."""
        of_disk = isinstance(shortage.error, DiskError)
        other = self.without_disk if of_disk else self.tighter
        assert other is not None
        drop_frames(shortage.error)
        return other(program, shortage)


def can_run_again(captured: Capture) -> bool:
    """Whether the gradients that arrive may be others than planned: of several made outputs, or of
    one that has several layouts.
    """
    made = {captured.outputs[index] for index in captured.differentiable} - {*captured.sources}
    return len(made) > 1 or any(
        sum(size > 1 for size in captured.outputs[index].meta["val"].shape) > 1
        for index in captured.tangents
    )


def kept_bytes(captured: Capture, device: torch.device, *, always: bool = False) -> int:
    """What `Again` keeps from the forward pass to the end of the step, besides what is there.

    always: whether every step can run again.
    """
    if not (always or can_run_again(captured)):
        return 0
    copies = sum(node.meta["val"].nbytes for node in captured.mutations)
    return int(copies) + _random_bytes(device)


def step_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where the step of these tensors computes; scalars of a step on a card may be on the CPU."""
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


class Again:
    """What a forward pass started from, so that it can run again, and the step that then runs.

    own: the program that the step begins with.
    tensors: placeholder of the traced graph -> parameter, buffer or batch tensor.
    places: of each of them.
    before: what forward changes of them, and of generators.
    written: the placeholders of those that it changes.
    positions: of the flat outputs that the program computes.
    draws_backward: whether its backward pass does.
    accumulates: whether each gradient is added to one that exists, and dropped.
    """

    def __init__(
        self,
        others: Others,
        call: Call,
        own: OnTensors,
        tensors: Mapping[fx.Node, torch.Tensor],
        *,
        places: Mapping[fx.Node, Place],
        before: BeforeStep,
        written: Sequence[fx.Node],
        positions: Sequence[int],
        draws_backward: bool,
        accumulates: bool,
    ) -> None:
        self._others, self._call, self._program = others, call, own
        self._positions = positions
        self._tensors, self._places = tensors, places
        self.leaves = tuple(node for node, each in tensors.items() if each.requires_grad)
        self._versions = [(t, t._version) for node, t in tensors.items() if node not in written]
        self._before = before
        self._wrote_alone = True
        self._device = step_device(tensors.values())
        self._draws_backward, self._accumulates = draws_backward, accumulates
        self._arrived: dict[int, torch.Tensor] = {}
        self._underway: Underway | None = None
        self._next_piece = 0
        self._made: dict[Place, torch.Tensor | None] = {}
        self._delivered: set[Place] = set()
        kind = self._device.type
        self._autocast = torch.autocast(
            kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )
        others.began(self)

    @property
    def leaf_tensors(self) -> tuple[torch.Tensor, ...]:
        """Those of the module and of the call that get a gradient of their own."""
        found = (self._tensors[node] for node in self.leaves)
        return tuple(tensor for tensor in found if tensor.is_leaf)

    def survives(self, error: Exception) -> bool:
        """Whether the step runs again after this error, if there is another program."""
        return self._others.survives(error)

    def put_back(self) -> None:
        """Buffers as they were before the forward pass."""
        self._before.put_back_tensors()

    def back_to_start(self, error: Exception) -> None:
        """After an error in the forward pass: buffers and generators are as before it."""
        drop_frames(error)
        self._before.put_back()

    def shorten(self, error: Exception) -> None:
        """Memory ran short outside of both passes: the next step has a tighter program.

        Raises the error where there is none.
        """
        with self._autocast:
            self._others.instead_of(self._program, Shortage(error, "step"))

    def begin_backward(self, arrived: Sequence[torch.Tensor | None]) -> None:
        """Hold the gradients that have arrived, if the step may run again."""
        if self._others.survive_errors:
            self._hold(arrived)

    def for_gradients(self, arrived: Sequence[torch.Tensor | None]) -> None:
        """Run the forward pass again, with a program for the gradients that have arrived."""
        if not self.can_restart:
            raise RuntimeError(
                "an output of the model gets a gradient that was not planned for, and the step "
                "cannot run again, because a parameter or the batch has changed since its forward "
                "pass: call backward first, or say which outputs the loss is computed from: "
                "fit(model, loss_outputs=lambda output: ...)"
            )
        self._hold(arrived)
        with self._as_in_forward(runs_it=False), torch.enable_grad(), self._autocast:
            copies = self._before.values  # and as many of what is there now
            held = [*self._arrived.values(), *copies, *copies]
            held_bytes = sum(each.untyped_storage().nbytes() for each in held)
            held_bytes += _random_bytes(self._device)
            found = Arrived.of(self._arrived)
            self._program = self._others.for_gradients(self._call, found, held_bytes)
        self._forward(None)

    def after_backward(self, error: Exception) -> None:
        """Run the forward pass again, with a program that takes less memory, or no disk.

        Raises the error where there is none, or where the step cannot run again.
        """
        drop_frames(error)
        if not self.can_restart:
            error.add_note(
                "The step cannot run again with another plan: parameters or the batch have "
                "changed since its forward pass (an optimizer inside of the backward pass)."
            )
            raise error
        if self._draws_backward:
            error.add_note(
                "The step cannot run again with another plan: its backward pass draws random "
                "numbers."
            )
            raise error
        self._forward(error)

    def gradients(self, nodes: Sequence[fx.Node]) -> Mapping[fx.Node, torch.Tensor | None]:
        """Of these leaves, from the step that runs again."""
        while True:
            try:
                return self._gradients(nodes)
            except Exception as error:
                if not self.survives(error):
                    raise
                failed = error
            self.after_backward(failed)

    def end(self) -> None:
        """The step is over; nothing is kept for another one."""
        self._drop_step()
        self._arrived = {}

    def _gradients(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, torch.Tensor | None]:
        assert self._underway is not None
        wanted = {node: self._places[node] for node in nodes}
        due = self._program.reached.intersection(wanted.values())
        while not due <= self._made.keys():
            made = self._underway.piece(self._next_piece)
            self._next_piece += 1
            self._made |= {at: each for at, each in made.items() if at not in self._delivered}
            del made
        self._delivered |= due
        return {node: self._made.pop(place, None) for node, place in wanted.items()}

    def _forward(self, failed: Exception | None) -> None:
        """Up to where the gradients arrive. failed: why another program is needed."""
        while True:
            self._drop_step()
            if failed is not None:
                shortage = Shortage(failed, "backward pass", self._delivered_bytes())
                with self._autocast:  # plans note it
                    self._program = self._others.instead_of(self._program, shortage)
            try:
                with self._as_in_forward(runs_it=True):
                    tensors = {self._places[node]: each for node, each in self._tensors.items()}
                    self._underway = self._program.again(tensors, self._arrived)
                return
            except Exception as error:
                if not self.survives(error):
                    raise
                failed = error

    @contextmanager
    def _as_in_forward(self, *, runs_it: bool) -> Iterator[None]:
        """Buffers and generators as they were before the forward pass; afterwards as they are now.

        runs_it: whether the forward pass runs inside. What it alone has written is then the same.
        """
        now = self._before.now()
        self._wrote_alone &= self._before.is_last
        self._before.put_back()
        is_same = False
        try:
            yield
            is_same = runs_it and self._wrote_alone
        finally:
            if not is_same:
                now.put_back_tensors()
            self._before.forward_ended()
            now.put_back_random()

    def _hold(self, arrived: Sequence[torch.Tensor | None]) -> None:
        pairs = zip(self._positions, arrived, strict=True)
        self._arrived = {position: each for position, each in pairs if each is not None}

    @property
    def can_restart(self) -> bool:
        """Whether what the step started from is still there."""
        return all(tensor._version == version for tensor, version in self._versions)

    def _delivered_bytes(self) -> int:
        """Of gradients that the engine has: they are there while the forward pass runs again."""
        if self._accumulates:
            return 0
        sizes = {self._places[node]: self._tensors[node].nbytes for node in self.leaves}
        return sum(sizes[place] for place in self._delivered)

    def deliver(self, nodes: Iterable[fx.Node]) -> None:
        """The first program has given the gradients of these."""
        self._delivered.update(self._places[node] for node in nodes)

    def _drop_step(self) -> None:
        if self._underway is not None:
            self._underway.close()
        self._underway, self._next_piece = None, 0
        self._made.clear()


def _random_bytes(device: torch.device) -> int:
    """Of a generator's state; of a CUDA device, too, it is in the memory of the host."""
    return int(get_state(device).nbytes) if device.type == "cpu" else 0


def drop_frames(error: Exception) -> None:
    """The functions that an error has left hold tensors."""
    traceback.clear_frames(error.__traceback__)
