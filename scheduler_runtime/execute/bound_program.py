"""A program with the places, in the module and the call, that its tensors come from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from graphs.capture import (
    CheckError,
    OpaqueForward,
    RandomSources,
    is_random,
    leaves_of,
    overlapping,
)
from graphs.model_calls import Call, nested
from graphs.trace import CapturedStep
from graphs.training_step import accumulation
from scheduler_runtime.execute.autograd import run_step
from scheduler_runtime.execute.before_step import StateBeforeStep
from scheduler_runtime.execute.program import Program
from scheduler_runtime.execute.restart_step import (
    OtherPrograms,
    Place,
    RestartableStep,
    Shortage,
    can_run_again,
    drop_frames,
    step_device,
)
from scheduler_runtime.execute.run import Run
from scheduler_runtime.execute.spill_file import DiskError


class BoundProgram:
    """Runs a program with the tensors of a module and a call.

    others: provides other programs for steps that must run again (None: no step runs again).
    captured: the traced program, without rewrites.
    has_checks: whether the program checks values that it computes.
    shares_outputs: whether outputs that get gradients are views of the same memory.
    gradient_places: places of the leaves that the program makes gradients for.
    """

    def __init__(
        self, step: CapturedStep, program: Program, *, others: OtherPrograms | None = None
    ) -> None:
        self.program = program
        self.captured = step.original
        may_restart = others is not None and (
            others.may_survive_errors or can_run_again(step.captured)
        )
        self._others = others if may_restart else None
        self._written = tuple(step.captured.mutations)
        self._positions = tuple(
            at
            for at, item in enumerate(program.outputs)
            if isinstance(item, fx.Node) and item not in step.captured.sources
        )
        self._guards = step.captured.guards
        self._held = step.captured.held
        self._filled, self._left = step.captured.filled, step.captured.left
        buffers = step.captured.buffer_inputs
        self._replaced = [buffers[each.path] for each in self._left if each.path in buffers]
        chosen = (step.captured.outputs[at] for at in step.captured.gradient_outputs)
        storages = [step.layout.storage[node] for node in chosen]
        self.shares_outputs = len({*storages}) < len(storages)
        self._output_spec = step.captured.output_spec
        self.has_checks = step.captured.has_checks
        self._places: dict[fx.Node, Place] = {}
        for node, source in step.captured.sources.items():
            if source.kind in ("parameter", "buffer"):
                self._places[node] = tuple(source.name.split("."))
            elif source.kind == "input":
                self._places[node] = source.index
        self.gradient_places = frozenset(
            self._places[node] for piece in program.backward for node, _ in piece.gradients
        )
        calls = step.layout.calls
        backward = (calls[n.name] for n in step.graph.later_nodes if n.name in calls)
        self._draws_backward = any(map(is_random, backward))
        self._accumulates = accumulation(step.graph.meta.gradients).to_parameters
        targets = [each.target for each in calls.values()]
        self._opaque = [each.call.random for each in targets if isinstance(each, OpaqueForward)]

    def with_others(self, others: OtherPrograms | None) -> BoundProgram:
        """The same program for another module, whose steps run again with these other programs."""
        found = copy.copy(self)
        found._others = others if others is not None and can_run_again(self.captured) else None
        return found

    @property
    def gradient_outputs(self) -> tuple[int, ...]:
        """Positions, among the flat outputs, of those that a gradient is planned for."""
        planned = {self.program.computed_outputs[index] for index, _ in self.program.tangents}
        outputs = enumerate(self.program.outputs)
        return tuple(at for at, item in outputs if isinstance(item, fx.Node) and item in planned)

    @property
    def read_from(self) -> tuple[str, ...]:
        """The tensors whose values decide whether the program fits, for messages."""
        leaves = {leaf for guard in self._guards for leaf in guard.recipe.leaves}
        buffers = sorted(f"buffer {leaf.key!r}" for leaf in leaves if leaf.kind == "buffer")
        return (*buffers, *(["the batch"] if any(leaf.kind == "input" for leaf in leaves) else []))

    @property
    def is_chance(self) -> bool:
        """Whether random numbers decide whether the program fits."""
        return any(guard.recipe.is_chance for guard in self._guards)

    @property
    def sets_plain_attributes(self) -> bool:
        """Whether the program sets attributes of the module, all to plain values, not tensors."""
        return bool(self._filled) and all(each.is_plain for each in self._filled)

    @property
    def sets_unread(self) -> frozenset[tuple[str, str]]:
        """Module path and name of the attributes that it sets without reading them before."""
        filled = ((each.module, each.attribute) for each in self._filled if each.is_unread)
        return frozenset((*filled, *(each.place for each in self._left if each.is_unread)))

    @property
    def sets_after_reading(self) -> tuple[str, ...]:
        """The plain attributes that it sets after reading them, for messages."""
        read = [each for each in self._filled if each.is_plain and not each.is_unread]
        return tuple(f"{each.module}.{each.attribute}".lstrip(".") for each in read)

    def fits(self, model: nn.Module, call: Call) -> bool:
        """Whether forward would read the same values in this call as when it was traced, and no
        tensor that it changes in place shares memory with another one by now."""
        if not all(held.holds(model) for held in self._held):
            return False
        if self._written and any(overlapping(self._tensors(model, call), self._written)):
            return False
        if not self._guards:
            return True
        leaves = leaves_of(model, call)
        return all(guard.holds(leaves) for guard in self._guards)

    def run(self, model: nn.Module, call: Call) -> Any:
        """Run the forward pass; returns the module's output for this call.

        If memory runs out or the disk fails, another program from `others` runs the call.

        Raises CheckError if a check of a value fails, and DiskError. Buffers and random states are
        then as before the call.
        """
        tensors = self._tensors(model, call)
        for filled in self._filled:
            filled.set_on(model)
        for left in self._left:
            left.free_on(model)
        for node in self._replaced:  # what an earlier step has left, with its graph
            tensors[node] = tensors[node].detach()
        others, restartable, before = self._others, None, None
        try:
            before = self._state_before(tensors)
            if others is not None:
                assert before is not None
                restartable = RestartableStep(
                    others,
                    call,
                    self,
                    tensors,
                    places=self._places,
                    before=before,
                    written=self._written,
                    positions=self._positions,
                    draws_backward=self._draws_backward,
                    runs_once=self.program.runs_once,
                    accumulates=self._accumulates,
                )
            outputs = run_step(self.program, tensors, restartable=restartable, before=before)
            return self._output(model, outputs, tensors)
        except CheckError:
            assert before is not None
            before.restore_random()
            raise
        except Exception as error:
            if others is None or not others.survives(error):
                _undo_and_raise(error, before)
                raise
            failed = error
        if restartable is not None:
            restartable.restore_after_error(failed)
        try:
            other = others.find_instead_of(self, Shortage(failed, "forward pass"))
        except DiskError as error:
            _undo_and_raise(error, before)
            raise
        assert isinstance(other, BoundProgram)
        return other.run(model, call)

    def _tensors(self, model: nn.Module, call: Call) -> dict[fx.Node, torch.Tensor]:
        """The tensors that the program reads, by their placeholders."""
        return {
            node: call.tensors[place] if isinstance(place, int) else _tensor_at(model, place)
            for node, place in self._places.items()
        }

    def _state_before(self, tensors: Mapping[fx.Node, torch.Tensor]) -> StateBeforeStep | None:
        """The state before the step, if it may have to be restored (None: it never is)."""
        program, device = self.program, step_device(tensors.values())
        restores_all = program.spills or self._others is not None
        # for another backward pass; a recorded step has one, and its generator cannot be read
        may_repeat = not (program.runs_once or program.unrepeatable or _is_recorded(device))
        restores_random = restores_all or self.has_checks or (may_repeat and program.draws)
        if not (restores_random or (may_repeat and self._written)):
            return None
        written = [tensors[node] for node in self._written]
        random = [RandomSources(device, ()), *self._opaque] if restores_random else []
        return StateBeforeStep(
            written,
            random,
            on_host=program.spills,
            copies=restores_all,
            counts_states=restores_all or self.has_checks,
        )

    def rerun(
        self, tensors: Mapping[Place, torch.Tensor], output_gradients: Mapping[int, torch.Tensor]
    ) -> RestartedRun:
        """Run the forward pass again, up to where the gradients of the outputs arrive.

        output_gradients: position among the flat outputs -> its gradient.
        """
        run = Run(
            self.program, {node: tensors[at] for node, at in self._places.items()}, None, None
        )
        try:
            run.forward()
            gradients = [output_gradients.get(position) for position in self._positions]
            planned = dict(self.program.tangents)
            run.start_backward([planned.get(index) for index in range(len(gradients))], gradients)
        except BaseException:
            run.close()
            raise
        return RestartedRun(run, self._places)

    def _output(
        self,
        model: nn.Module,
        outputs: tuple[Any, ...],
        tensors: Mapping[fx.Node, torch.Tensor],
    ) -> Any:
        """Put the output of forward together, and set the attributes in which it leaves tensors.

        outputs: the tensors that the program computes.
        """
        computed = iter(outputs)
        flat = list(self.program.outputs)  # plain constants stay as they are
        for index, item in enumerate(flat):
            if isinstance(item, fx.Node):  # an input that is returned, or a computed tensor
                flat[index] = tensors[item] if item in tensors else next(computed)
        returned = flat[: self._output_spec.num_leaves]  # the rest are results of checks
        found = nested.unflatten(nested.with_repeats_restored(returned), self._output_spec)
        if not self._left:
            return found
        output, values = found
        for left, value in zip(self._left, values, strict=True):
            left.set_on(model, value)
        return output


class RestartedRun:
    """A step that runs again, after its forward pass: runs the backward pass piece by piece."""

    def __init__(self, run: Run, places: Mapping[fx.Node, Place]) -> None:
        self._run, self._places = run, places

    def run_piece(self, position: int) -> dict[Place, torch.Tensor | None]:
        """Run one piece of the backward pass; returns the gradients that it completes."""
        return {self._places[node]: each for node, each in self._run.run_piece(position).items()}

    def close(self) -> None:
        """Free what is saved for backward."""
        self._run.close()


def _is_recorded(device: torch.device) -> bool:
    """Whether a CUDA graph records what runs now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _undo_and_raise(error: Exception, before: StateBeforeStep | None) -> None:
    """After an error of the disk, undo the step as far as possible, and raise an error that says
    what could be undone. Does nothing for other errors."""
    if before is not None and isinstance(error, DiskError):
        drop_frames(error)
        raise before.undo_after(error) from error.__cause__


def _tensor_at(model: nn.Module, path: tuple[str, ...]) -> torch.Tensor:
    """The parameter or buffer at this path; `named_parameters` would walk the whole module."""
    module: Any = model
    for name in path[:-1]:
        module = module._modules[name]
    tensors = module._parameters if path[-1] in module._parameters else module._buffers
    tensor: torch.Tensor = tensors[path[-1]]
    return tensor
