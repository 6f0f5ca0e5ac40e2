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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx

from graphs.capture import Capture
from graphs.model_calls import Call, LayoutForShapes
from scheduler_runtime.execute.before_step import StateBeforeStep
from scheduler_runtime.execute.out_of_memory import is_out_of_memory
from scheduler_runtime.execute.random_state import get_state
from scheduler_runtime.execute.spill_file import DiskError

Place = tuple[str, ...] | int
"""Where an input tensor of a program comes from: its path in the module, or its index in the call.
"""


class RestartedStep(Protocol):
    """A step that runs again, after its forward pass."""

    def run_piece(self, position: int) -> Mapping[Place, torch.Tensor | None]:
        """Run one piece of the backward pass; returns the gradients that it completes."""

    def close(self) -> None:
        """Free what is saved for backward."""


class RerunnableProgram(Protocol):
    """A program that can run on other tensors than those of the module and the call."""

    @property
    def gradient_places(self) -> frozenset[Place]:
        """The places of the leaves that the program makes gradients for."""

    def rerun(
        self, tensors: Mapping[Place, torch.Tensor], output_gradients: Mapping[int, torch.Tensor]
    ) -> RestartedStep:
        """Run the forward pass, up to where the gradients of the outputs arrive.

        output_gradients: position among the flat outputs -> its gradient.
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
class ArrivedGradients:
    """The gradients of outputs that arrive at the start of a backward pass.

    outputs: indices of the flat outputs that get one.
    layouts: pairs of such an index and the layout of its gradient. Expanded gradients are left
        out: they are copied, and sums over them are the same in either layout.
    """

    outputs: tuple[int, ...]
    layouts: tuple[tuple[int, LayoutForShapes], ...]

    @classmethod
    def of(cls, gradients: Mapping[int, torch.Tensor]) -> ArrivedGradients:
        """gradients: index of the flat output -> its gradient."""
        not_expanded = {at: each for at, each in gradients.items() if 0 not in each.stride()}
        layouts = {at: LayoutForShapes.of(each) for at, each in not_expanded.items()}
        return cls(tuple(gradients), tuple(layouts.items()))


ProgramFinder = Callable[[RerunnableProgram, Shortage], RerunnableProgram]
"""Finds a program of the same step that takes less memory than this one, or no disk. Raises the
shortage's error if there is none."""


@dataclass(frozen=True)
class OtherPrograms:
    """Provides other programs for a call whose step must run again.

    for_gradients: makes a program for the gradients that have arrived, given the bytes that are
        held meanwhile.
    tighter: finds a program for when memory runs out (None: the step ends with the error).
    on_begin: called at the start of each step.
    without_disk: finds a program for when the disk fails (None: the step ends with the error).
    """

    for_gradients: Callable[[Call, ArrivedGradients, int], RerunnableProgram]
    tighter: ProgramFinder | None = None
    on_begin: Callable[[RestartableStep], None] = lambda _step: None
    without_disk: ProgramFinder | None = None

    def survives(self, error: Exception) -> bool:
        """Whether to run the step again after this error, if another program can be found."""
        if isinstance(error, DiskError):
            return self.without_disk is not None
        return self.tighter is not None and is_out_of_memory(error)

    @property
    def may_survive_errors(self) -> bool:
        """Whether a step may run again after an error."""
        return self.tighter is not None or self.without_disk is not None

    def find_instead_of(self, program: RerunnableProgram, shortage: Shortage) -> RerunnableProgram:
        """Another program for a step that has failed with an error it survives."""
        is_of_disk = isinstance(shortage.error, DiskError)
        find = self.without_disk if is_of_disk else self.tighter
        assert find is not None
        drop_frames(shortage.error)
        return find(program, shortage)


def can_run_again(captured: Capture) -> bool:
    """Whether gradients may arrive that are not planned: there are several differentiable outputs,
    or the gradient of one can have several memory layouts.
    """
    computed = {captured.outputs[index] for index in captured.differentiable} - {*captured.sources}
    return len(computed) > 1 or any(
        sum(size > 1 for size in captured.outputs[index].meta["val"].shape) > 1
        for index in captured.tangents
    )


def restart_copy_bytes(captured: Capture, device: torch.device, *, always: bool = False) -> int:
    """Bytes of the copies that `RestartableStep` keeps from the forward pass to the step's end.

    always: whether every step may run again, not only those for which `can_run_again` holds.
    """
    if not (always or can_run_again(captured)):
        return 0
    copies = sum(node.meta["val"].nbytes for node in captured.mutations)
    return int(copies) + _random_bytes(device)


def step_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device on which a step with these inputs runs; scalars may be on the CPU all the same."""
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


class RestartableStep:
    """What a step needs to run again from its start, and then the step that runs again.

    others: provides the other program.
    call: the call of the module.
    first_program: the program that the step begins with.
    tensors: placeholder of the traced graph -> parameter, buffer or batch tensor.
    places: placeholder -> the place of its tensor.
    before: the state before the step of the tensors that forward writes, and of generators.
    written: the placeholders of these tensors.
    positions: positions of the flat outputs that the program computes.
    draws_backward: whether the backward pass draws random numbers.
    runs_once: why the forward pass must not run again ("": it may).
    accumulates: whether each gradient is added to an existing one, and then freed.
    """

    def __init__(
        self,
        others: OtherPrograms,
        call: Call,
        first_program: RerunnableProgram,
        tensors: Mapping[fx.Node, torch.Tensor],
        *,
        places: Mapping[fx.Node, Place],
        before: StateBeforeStep,
        written: Sequence[fx.Node],
        positions: Sequence[int],
        draws_backward: bool,
        runs_once: str,
        accumulates: bool,
    ) -> None:
        self._others, self._call = others, call
        self._first_program = self._program = first_program
        self._runs_once = runs_once
        self._positions = positions
        self._tensors, self._places = tensors, places
        self.leaves = tuple(node for node, each in tensors.items() if each.requires_grad)
        self._versions = [(t, t._version) for node, t in tensors.items() if node not in written]
        self._before = before
        self._device = step_device(tensors.values())
        self._draws_backward, self._accumulates = draws_backward, accumulates
        self._output_gradients: dict[int, torch.Tensor] = {}
        self._restarted: RestartedStep | None = None
        self._next_piece = 0
        self._computed_gradients: dict[Place, torch.Tensor | None] = {}
        self._delivered_places: set[Place] = set()
        kind = self._device.type
        self._autocast = torch.autocast(
            kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )
        others.on_begin(self)

    @property
    def leaf_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the module and the call whose gradients are accumulated in `.grad`."""
        found = (self._tensors[node] for node in self.leaves)
        return tuple(tensor for tensor in found if tensor.is_leaf)

    def survives(self, error: Exception) -> bool:
        """Whether to run the step again after this error, if another program can be found."""
        return self._others.survives(error)

    def restore_buffers(self) -> None:
        """Restore the buffers to their values before the forward pass."""
        self._before.restore_tensors()

    def restore_after_error(self, error: Exception) -> None:
        """After an error in the forward pass, restore buffers and generators."""
        drop_frames(error)
        self._before.restore()

    def tighten_next_step(self, error: Exception) -> None:
        """Find a tighter program for the next step, after memory ran out outside of both passes.

        Raises the error if there is none.
        """
        with self._autocast:
            self._others.find_instead_of(self._program, Shortage(error, "step"))

    def begin_backward(self, output_gradients: Sequence[torch.Tensor | None]) -> None:
        """Hold the gradients that have arrived, if the step may have to run again."""
        if self._others.may_survive_errors:
            self._hold_gradients(output_gradients)

    def restart_for_gradients(self, output_gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the forward pass again, with a program for the gradients that have arrived."""
        why = self._runs_once
        if not self.can_restart:
            why = "a parameter or the batch has changed since its forward pass"
        if why:
            raise RuntimeError(
                "an output of the model gets a gradient that was not planned for, and the step "
                f"cannot run again, because {why}: call backward first, or say which outputs the "
                "loss is computed from: fit(model, loss_outputs=lambda output: ...)"
            )
        self._hold_gradients(output_gradients)
        with self._before.put_back(runs_forward=False), torch.enable_grad(), self._autocast:
            copies = self._before.values  # `put_back` holds as many of the present values
            held_tensors = [*self._output_gradients.values(), *copies, *copies]
            held_bytes = sum(each.untyped_storage().nbytes() for each in held_tensors)
            held_bytes += _random_bytes(self._device)
            arrived = ArrivedGradients.of(self._output_gradients)
            self._program = self._others.for_gradients(self._call, arrived, held_bytes)
        self._rerun_forward(None)

    def restart_after_backward_error(self, error: Exception) -> None:
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
        if self._runs_once:
            error.add_note(f"The step cannot run again with another plan: {self._runs_once}.")
            raise error
        if self._draws_backward:
            error.add_note(
                "The step cannot run again with another plan: its backward pass draws random "
                "numbers."
            )
            raise error
        self._rerun_forward(error)

    def gradients(self, nodes: Sequence[fx.Node]) -> Mapping[fx.Node, torch.Tensor | None]:
        """The gradients of these leaves, from the step that runs again."""
        while True:
            try:
                return self._run_until_gradients(nodes)
            except Exception as error:
                if not self.survives(error):
                    raise
                failed = error
            self.restart_after_backward_error(failed)

    def end_backward(self) -> None:
        """End a backward pass, and free what is held to run the step again in it."""
        self._drop_restarted()
        self._program = self._first_program
        self._output_gradients = {}
        self._delivered_places.clear()

    def _run_until_gradients(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, torch.Tensor | None]:
        assert self._restarted is not None
        wanted = {node: self._places[node] for node in nodes}
        wanted_places = self._program.gradient_places.intersection(wanted.values())
        # run on until all of these are made; the first program has delivered some others already
        while not wanted_places <= self._computed_gradients.keys():
            gradients = self._restarted.run_piece(self._next_piece)
            self._next_piece += 1
            self._computed_gradients |= {
                at: each for at, each in gradients.items() if at not in self._delivered_places
            }
            del gradients
        self._delivered_places |= wanted_places
        return {node: self._computed_gradients.pop(place, None) for node, place in wanted.items()}

    def _rerun_forward(self, failed: Exception | None) -> None:
        """Run the forward pass again, with ever tighter programs until one succeeds.

        failed: the error for which another program is needed (None: `_program` is it already).
        """
        while True:
            self._drop_restarted()
            if failed is not None:
                shortage = Shortage(failed, "backward pass", self._delivered_bytes())
                with self._autocast:  # plans record the autocast state
                    self._program = self._others.find_instead_of(self._program, shortage)
            try:
                with self._before.put_back(runs_forward=True):
                    tensors = {self._places[node]: each for node, each in self._tensors.items()}
                    self._restarted = self._program.rerun(tensors, self._output_gradients)
                return
            except Exception as error:
                if not self.survives(error):
                    raise
                failed = error

    def _hold_gradients(self, output_gradients: Sequence[torch.Tensor | None]) -> None:
        pairs = zip(self._positions, output_gradients, strict=True)
        self._output_gradients = {position: each for position, each in pairs if each is not None}

    @property
    def can_restart(self) -> bool:
        """Whether the step's inputs are unchanged."""
        return all(tensor._version == version for tensor, version in self._versions)

    def _delivered_bytes(self) -> int:
        """Bytes of gradients already delivered, which are in memory while forward runs again."""
        if self._accumulates:
            return 0
        sizes = {self._places[node]: self._tensors[node].nbytes for node in self.leaves}
        return sum(sizes[place] for place in self._delivered_places)

    def note_delivered(self, nodes: Iterable[fx.Node]) -> None:
        """Note that the first program has delivered the gradients of these leaves."""
        self._delivered_places.update(self._places[node] for node in nodes)

    def _drop_restarted(self) -> None:
        if self._restarted is not None:
            self._restarted.close()
        self._restarted, self._next_piece = None, 0
        self._computed_gradients.clear()


def _random_bytes(device: torch.device) -> int:
    """Bytes of a generator's state on the device; a CUDA generator's is in host memory."""
    return int(get_state(device).nbytes) if device.type == "cpu" else 0


def drop_frames(error: Exception) -> None:
    """Clear the frames in an error's traceback, which hold tensors."""
    traceback.clear_frames(error.__traceback__)
