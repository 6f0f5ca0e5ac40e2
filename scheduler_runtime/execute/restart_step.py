"""Run a step again from its start, with another program.

There are three reasons to do so. Gradients arrive for other outputs than the program was made for,
or in another memory layout; that is known when the backward pass begins. Memory has run out in the
forward or the backward pass, and a program of a tighter plan may fit. Or the disk has failed in one
of them, and another program needs none. What the first program has saved is dropped. The other
program runs its forward pass from the same inputs, random state and buffers, so its results are
bitwise identical.

Its backward pass runs piece by piece, whenever the engine asks the first program for gradients that
it has not delivered yet. So gradients that were accumulated before stay as they are, and hooks fire
once, where the gradients leave the first program.
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
"""Where an input tensor of a program comes from: its path in the module, or its index in the call.
"""


class Underway(Protocol):
    """A step that runs again, after its forward pass."""

    def piece(self, position: int) -> Mapping[Place, torch.Tensor | None]:
        """Run one piece of the backward pass; returns the gradients that it completes."""

    def close(self) -> None:
        """Free what is saved for backward."""


class OnTensors(Protocol):
    """A program that can run on other tensors than those of the module and the call."""

    @property
    def reached(self) -> frozenset[Place]:
        """The places of the leaves that the program makes gradients for."""

    def again(
        self, tensors: Mapping[Place, torch.Tensor], arrived: Mapping[int, torch.Tensor]
    ) -> Underway:
        """Run the forward pass, up to where the gradients of the outputs arrive.

        arrived: position among the flat outputs -> its gradient.
        """


@dataclass(frozen=True)
class Shortage:
    """An error that ended a step: memory ran out, or the disk failed.

    error: the error.
    where: "forward pass", "backward pass", or "step" (outside of both).
    held_bytes: memory in use when the step runs again that its plan does not count.
    """

    error: Exception
    where: str
    held_bytes: int = 0


@dataclass(frozen=True)
class Arrived:
    """The gradients of outputs that arrive at the start of a backward pass.

    outputs: indices of the flat outputs that get one.
    strides: pairs of such an index and the strides of its gradient. Expanded gradients are left
        out: they are copied, and sums over them are the same in either layout.
    """

    outputs: tuple[int, ...]
    strides: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, gradients: Mapping[int, torch.Tensor]) -> Arrived:
        """gradients: index of the flat output -> its gradient."""
        laid_out = {at: each.stride() for at, each in gradients.items() if 0 not in each.stride()}
        return cls(tuple(gradients), tuple(laid_out.items()))


Tighter = Callable[[OnTensors, Shortage], OnTensors]
"""Finds a program of the same step that takes less memory than this one, or no disk. Raises the
shortage's error if there is none."""


@dataclass(frozen=True)
class Others:
    """Provides other programs for a call whose step must run again.

    for_gradients: makes a program for the gradients that have arrived, given the bytes that are
        held meanwhile.
    tighter: finds a program for when memory runs out (None: the step ends with the error).
    began: called at the start of each step.
    without_disk: finds a program for when the disk fails (None: the step ends with the error).
    """

    for_gradients: Callable[[Call, Arrived, int], OnTensors]
    tighter: Tighter | None = None
    began: Callable[[Again], None] = lambda _again: None
    without_disk: Tighter | None = None

    def survives(self, error: Exception) -> bool:
        """Whether to run the step again after this error, if another program can be found."""
        if isinstance(error, DiskError):
            return self.without_disk is not None
        return self.tighter is not None and is_out_of_memory(error)

    @property
    def survive_errors(self) -> bool:
        """Whether a step may run again after an error."""
        return self.tighter is not None or self.without_disk is not None

    def instead_of(self, program: OnTensors, shortage: Shortage) -> OnTensors:
        """Another program for a step that has failed with an error it survives."""
        of_disk = isinstance(shortage.error, DiskError)
        other = self.without_disk if of_disk else self.tighter
        assert other is not None
        drop_frames(shortage.error)
        return other(program, shortage)


def can_run_again(captured: Capture) -> bool:
    """Whether gradients may arrive that are not planned: there are several differentiable outputs,
    or the gradient of one can have several memory layouts.
    """
    made = {captured.outputs[index] for index in captured.differentiable} - {*captured.sources}
    return len(made) > 1 or any(
        sum(size > 1 for size in captured.outputs[index].meta["val"].shape) > 1
        for index in captured.tangents
    )


def kept_bytes(captured: Capture, device: torch.device, *, always: bool = False) -> int:
    """Bytes of the copies that `Again` keeps from the forward pass to the end of the step.

    always: whether every step may run again, not only those for which `can_run_again` holds.
    """
    if not (always or can_run_again(captured)):
        return 0
    copies = sum(node.meta["val"].nbytes for node in captured.mutations)
    return int(copies) + _random_bytes(device)


def step_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device on which a step with these inputs runs; scalars may be on the CPU all the same."""
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


class Again:
    """What a step needs to run again from its start, and then the step that runs again.

    others: provides the other program.
    call: the call of the module.
    own: the program that the step begins with.
    tensors: placeholder of the traced graph -> parameter, buffer or batch tensor.
    places: placeholder -> the place of its tensor.
    before: the state before the step of the tensors that forward writes, and of generators.
    written: the placeholders of these tensors.
    positions: positions of the flat outputs that the program computes.
    draws_backward: whether the backward pass draws random numbers.
    accumulates: whether each gradient is added to an existing one, and then freed.
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
        """The tensors of the module and the call whose gradients are accumulated in `.grad`."""
        found = (self._tensors[node] for node in self.leaves)
        return tuple(tensor for tensor in found if tensor.is_leaf)

    def survives(self, error: Exception) -> bool:
        """Whether to run the step again after this error, if another program can be found."""
        return self._others.survives(error)

    def put_back(self) -> None:
        """Restore the buffers to their values before the forward pass."""
        self._before.put_back_tensors()

    def back_to_start(self, error: Exception) -> None:
        """After an error in the forward pass, restore buffers and generators."""
        drop_frames(error)
        self._before.put_back()

    def shorten(self, error: Exception) -> None:
        """Find a tighter program for the next step, after memory ran out outside of both passes.

        Raises the error if there is none.
        """
        with self._autocast:
            self._others.instead_of(self._program, Shortage(error, "step"))

    def begin_backward(self, arrived: Sequence[torch.Tensor | None]) -> None:
        """Hold the gradients that have arrived, if the step may have to run again."""
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
            copies = self._before.values  # `_as_in_forward` holds as many of the present values
            held = [*self._arrived.values(), *copies, *copies]
            held_bytes = sum(each.untyped_storage().nbytes() for each in held)
            held_bytes += _random_bytes(self._device)
            found = Arrived.of(self._arrived)
            self._program = self._others.for_gradients(self._call, found, held_bytes)
        self._forward(None)

    def after_backward(self, error: Exception) -> None:
        """After an error in the backward pass, run the forward pass again with another program.

        Raises the error if there is no such program, or if the step cannot run again.
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
        """The gradients of these leaves, from the step that runs again."""
        while True:
            try:
                return self._gradients(nodes)
            except Exception as error:
                if not self.survives(error):
                    raise
                failed = error
            self.after_backward(failed)

    def end(self) -> None:
        """End the step, and free what is held to run it again."""
        self._drop_step()
        self._arrived = {}

    def _gradients(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, torch.Tensor | None]:
        assert self._underway is not None
        wanted = {node: self._places[node] for node in nodes}
        due = self._program.reached.intersection(wanted.values())
        # run on until all of these are made; the first program has delivered some others already
        while not due <= self._made.keys():
            made = self._underway.piece(self._next_piece)
            self._next_piece += 1
            self._made |= {at: each for at, each in made.items() if at not in self._delivered}
            del made
        self._delivered |= due
        return {node: self._made.pop(place, None) for node, place in wanted.items()}

    def _forward(self, failed: Exception | None) -> None:
        """Run the forward pass again, with ever tighter programs until one succeeds.

        failed: the error for which another program is needed (None: `_program` is it already).
        """
        while True:
            self._drop_step()
            if failed is not None:
                shortage = Shortage(failed, "backward pass", self._delivered_bytes())
                with self._autocast:  # plans record the autocast state
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
        """In this context, buffers and generators are as before the forward pass; afterwards they
        are as they are now.

        runs_it: whether the forward pass runs inside. If nothing else has written the buffers, it
            writes the same values again, and they need not be restored.
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
        """Whether the step's inputs are unchanged."""
        return all(tensor._version == version for tensor, version in self._versions)

    def _delivered_bytes(self) -> int:
        """Bytes of gradients already delivered, which are in memory while forward runs again."""
        if self._accumulates:
            return 0
        sizes = {self._places[node]: self._tensors[node].nbytes for node in self.leaves}
        return sum(sizes[place] for place in self._delivered)

    def deliver(self, nodes: Iterable[fx.Node]) -> None:
        """Note that the first program has delivered the gradients of these leaves."""
        self._delivered.update(self._places[node] for node in nodes)

    def _drop_step(self) -> None:
        if self._underway is not None:
            self._underway.close()
        self._underway, self._next_piece = None, 0
        self._made.clear()


def _random_bytes(device: torch.device) -> int:
    """Bytes of a generator's state on the device; a CUDA generator's is in host memory."""
    return int(get_state(device).nbytes) if device.type == "cpu" else 0


def drop_frames(error: Exception) -> None:
    """Clear the frames in an error's traceback, which hold tensors."""
    traceback.clear_frames(error.__traceback__)
