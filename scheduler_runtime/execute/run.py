"""One run of a program, and what it holds between the forward and the backward pass.

A backward pass frees what the plan has saved, also with `retain_graph=True`. For another one, the
forward piece runs again from the same inputs and generator states, so that each takes no more
memory than the plan says, and gives bitwise identical gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from graphs.model_calls import distributed_as, local_part
from scheduler_runtime.execute.arriving_gradients import in_planned_strides, rounds_otherwise
from scheduler_runtime.execute.before_step import StateBeforeStep
from scheduler_runtime.execute.copies import Copies
from scheduler_runtime.execute.kernel_settings import KernelSettings
from scheduler_runtime.execute.piece import Piece
from scheduler_runtime.execute.program import Program
from scheduler_runtime.execute.restart_step import RestartableStep, drop_frames, step_device
from scheduler_runtime.execute.spill_file import DiskError


class Run:
    """One run of a program: its values between forward and backward, and their version counters.

    tensors: placeholder of the traced graph -> parameter, buffer or batch tensor.
    restartable: runs the step again with another program if unplanned gradients arrive or an error
        can be survived (None: the step raises an error).
    before: the state before the step, restored if the disk fails and for another backward pass
        (None: the step neither draws random numbers nor writes buffers, or runs one backward pass).
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[fx.Node, torch.Tensor],
        restartable: RestartableStep | None,
        before: StateBeforeStep | None,
    ) -> None:
        self.program = program
        self.restartable = restartable
        self._before = before
        self._leaves = {
            node: tensor
            for node, tensor in tensors.items()
            if before is not None and tensor.requires_grad and tensor.is_leaf
        }
        self._is_restarted = False  # whether another program runs the step now
        self._inputs: dict[fx.Node, Any] = {
            program.sources[node]: local_part(tensor).detach() for node, tensor in tensors.items()
        }
        self._inputs.update(program.constants)
        written = {program.sources[node] for node in program.written}
        self._input_versions = {
            value: tensor._version
            for value, tensor in self._inputs.items()
            if value not in written and not tensor.is_inference()
        }
        self.state: dict[fx.Node, Any] = {}
        self._device = step_device(tensors.values())
        self._copies: Copies | None = None
        self._finalizer: Any = None  # closes the copies
        self.token = torch.empty(0, device=self._device, requires_grad=True)
        self.token_gradient = torch.empty(0, device=self._device)
        self._has_backward_begun = False
        self._is_graph_kept = False  # by the backward pass that began last
        self._settings = KernelSettings()  # of the forward pass, which comes next
        self._expected_versions: dict[fx.Node, int] = {}

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run the forward piece; returns the flat outputs that it computes."""
        state, program = self.state, self.program
        state.update(self._inputs)
        if program.copies is not None:
            assert program.pools is not None
            assert program.copy_layout is not None
            self._copies = program.pools.open(program.copy_layout, self._device)
            state[program.copies] = self._copies
            # also a step whose backward pass never runs returns its host memory
            if self._finalizer is not None:
                self._finalizer.detach()
            self._finalizer = weakref.finalize(self, self._copies.close)
            self._finalizer.atexit = False
        # the program contains autocast's casts, and autograd only sees the chain
        with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
            self._run(program.forward)
        outputs = tuple(state[value] for value in program.computed_outputs)
        # Remember the versions of tensors that the backward pass reads and that code outside can
        # change. Compared by storage: a view shares its base's storage and version.
        reachable = {
            state[value].untyped_storage()._cdata for value in program.reachable if value in state
        }
        self._expected_versions = {
            value: tensor._version
            for value in program.read_backward
            if isinstance(tensor := state.get(value), torch.Tensor)
            and tensor.untyped_storage()._cdata in reachable
        }
        for value in program.forward.handed_out:
            state.pop(value, None)
        if self._before is not None:
            self._before.forward_ended()
        return outputs

    def tensors_on(self, storage: torch.UntypedStorage) -> list[torch.Tensor]:
        """The tensors on this storage that the run holds, each once; a view also holds its base."""
        values = [value for value in self.state.values() if isinstance(value, torch.Tensor)]
        bases = [value._base for value in values if value._base is not None]
        held = {id(value): value for value in (*values, *bases)}
        return [
            value for value in held.values() if value.untyped_storage()._cdata == storage._cdata
        ]

    def start_backward(
        self,
        tangents: Sequence[fx.Node | None],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Take the gradients of the outputs. Raises RuntimeError if the plan expects other ones.

        tangents: for each output, the value that takes its gradient (None: none is planned).
        gradients: for each output, the gradient that arrives (None: none does).
        """
        is_another = self._has_backward_begun
        if is_another:
            self._prepare_another()
        if torch.is_autocast_enabled(self._device.type):
            raise RuntimeError(
                "backward runs under autocast, where eager mode computes other gradients than the "
                "planned ones: call loss.backward() after the `with torch.autocast` block, which "
                "should contain only the forward pass and the loss"
            )
        expected = [value is not None for value in tangents]
        are_unplanned = expected != [each is not None for each in gradients]
        # gradients with other strides are copied below if the step cannot restart
        if self.restartable is not None and self.restartable.can_restart:
            are_unplanned |= any(
                value is not None
                and gradient is not None
                and rounds_otherwise(gradient, self.program.tangent_strides[value])
                for value, gradient in zip(tangents, gradients, strict=True)
            )
        if self.program.recomputes or (self.restartable is not None and are_unplanned):
            self._settings.refuse_others()
        self._has_backward_begun = True
        self._is_graph_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if self._before is not None:
            self._before.backward_begins(self._leaves)
        if self.restartable is not None and are_unplanned:
            self._release()
            self._is_restarted = True
            with self._undone_after_disk_error():
                self.restartable.restart_for_gradients(gradients)
            return
        if self.restartable is not None:
            self.restartable.begin_backward(gradients)
        if is_another:
            with self._undone_after_disk_error():
                self._run_forward_again()
            if self._is_restarted:
                return
        for value, gradient in zip(tangents, gradients, strict=True):
            if value is None:
                if gradient is not None:
                    raise RuntimeError(
                        "an output receives a gradient that the plan does not expect: only the "
                        "planned loss may be differentiated; add the other terms to it inside the "
                        "model, plan with loss=function(output, batch), or say which outputs the "
                        "loss is computed from: fit(model, loss_outputs=lambda output: ...)"
                    )
                continue
            if gradient is None:
                raise RuntimeError(
                    "an output receives no gradient, and the plan expects one for it; plan again "
                    "with the loss that is used, or say which outputs it is computed from: "
                    "fit(model, loss_outputs=lambda output: ...)"
                )
            strides = self.program.tangent_strides[value]
            self.state[value] = in_planned_strides(gradient, strides)

    def _prepare_another(self) -> None:
        """Drop the backward pass before. Raises RuntimeError if there cannot be another one."""
        if not self._is_graph_kept:
            raise RuntimeError(
                "backward ran a second time through a planned step, whose saved tensors are freed. "
                "Sum the losses and call backward once, or give retain_graph=True to all calls but "
                "the last: each but the first then runs the forward pass again"
            )
        changed = next(
            (v for v, at in self._input_versions.items() if self._inputs[v]._version != at), None
        )
        if changed is not None:
            raise RuntimeError(
                f"{self.program.titles[changed]} was changed in place before another backward pass "
                "through a planned step, which runs the forward pass again: call backward first"
            )
        if why := self._why_not_again():
            raise RuntimeError(
                "backward ran a second time through a planned step, whose forward pass cannot run "
                f"again: {why}. Sum the losses and call backward once, or use the plain model "
                "(checkpoint_solver.remove(model))"
            )
        self._release()
        self._is_restarted = False
        if self.restartable is not None:
            self.restartable.end_backward()

    def _why_not_again(self) -> str:
        """Why the forward pass cannot run again; "": it can."""
        program, before = self.program, self._before
        if program.runs_once or (before is not None and before.has_copies):
            return program.runs_once
        is_kept = before is not None and (before.has_random or not program.draws)
        if (program.draws or program.written) and not is_kept:
            return program.unrepeatable or "the state before it was not kept (a recorded step)"
        return program.unrepeatable

    def _run_forward_again(self) -> None:
        """Run the forward piece again for another backward pass, from the same inputs and state.

        If that fails and another program can run the step, that one runs it."""
        before = self._before
        self._settings.refuse_others()
        try:
            with nullcontext() if before is None else before.put_back(runs_forward=True):
                self.forward()
            return
        except Exception as error:
            if not self._survives(error):
                raise
            failed = error
        self._restart_after(failed)

    def backward(
        self, position: int, leaves: tuple[fx.Node, ...]
    ) -> Mapping[fx.Node, torch.Tensor | None]:
        """Run the piece at this position; returns the gradients of its leaves, now complete."""
        gradients: Mapping[fx.Node, torch.Tensor | None]
        with self._undone_after_disk_error():
            if self._is_restarted:
                assert self.restartable is not None
                gradients = self.restartable.gradients(leaves)
            else:
                gradients = self._run_piece_or_restart(position, leaves)
        if self._before is not None:
            self._before.note_delivered(
                node for node, each in gradients.items() if each is not None
            )
        if position == len(self.program.backward) - 1:
            self._end_backward()
        return gradients

    def _run_piece_or_restart(
        self, position: int, leaves: tuple[fx.Node, ...]
    ) -> Mapping[fx.Node, torch.Tensor | None]:
        try:
            gradients = self.run_piece(position)
            if self.restartable is not None:
                self.restartable.note_delivered(gradients)
            return gradients
        except Exception as error:
            if not self._survives(error):
                raise
            failed = error
        self._restart_after(failed)
        assert self.restartable is not None
        return self.restartable.gradients(leaves)

    def _survives(self, error: Exception) -> bool:
        """Whether the step can run again with another program after this error."""
        return self.restartable is not None and self.restartable.survives(error)

    def _restart_after(self, error: Exception) -> None:
        """Run the forward pass again, with another program."""
        assert self.restartable is not None
        self._settings.refuse_others()
        self._release()
        self._is_restarted = True
        self.restartable.restart_after_backward_error(error)

    def run_piece(self, position: int) -> dict[fx.Node, torch.Tensor | None]:
        """Run one piece of the backward pass; returns the gradients that it completes."""
        piece = self.program.backward[position]
        for value in piece.inputs:
            version = self._expected_versions.get(value)
            if version is not None and self.state[value]._version != version:
                raise RuntimeError(
                    f"{self._title(value)} was changed in place after the forward pass whose "
                    f"backward pass reads it (version {self.state[value]._version}, expected "
                    f"{version}): call backward before whatever changes it (an optimizer step, "
                    "another forward pass, an in-place operator)"
                )
        with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
            self._run(piece)
        if self._copies is not None and self._cannot_undo(piece):
            self._copies.finish_first_writes()
        specs = self.program.gradient_specs
        gradients: dict[fx.Node, torch.Tensor | None] = {
            node: distributed_as(specs[node], self.state[value])
            if node in specs
            else self.state[value]
            for node, value in piece.gradients
        }
        for value in piece.handed_out:
            self.state.pop(value, None)
        return gradients

    def _cannot_undo(self, piece: Piece) -> bool:
        """Whether the piece gives gradients that cannot be undone if the disk fails later."""
        nodes = [node for node, _ in piece.gradients]
        return bool(nodes) if self._before is None else self._before.cannot_undo(nodes)

    def _title(self, value: fx.Node) -> str:
        """A name, for messages, of the tensor that the caller has changed; `value` may be a view
        of it."""
        titles = self.program.titles
        storage = self.state[value].untyped_storage()._cdata
        for source in (value, *titles):
            tensor = self.state.get(source)
            if tensor is None or source not in titles:
                continue
            if tensor.untyped_storage()._cdata == storage:
                return titles[source]
        return f"{value.name}, an output of the model,"

    def _end_backward(self) -> None:
        if not self._is_graph_kept:
            self.close()
            return
        self._release()
        if self.restartable is not None:
            self.restartable.end_backward()

    def close(self) -> None:
        """Free everything: nothing more will run."""
        self._release()
        if self.restartable is not None:
            self.restartable.end_backward()
        self.restartable = self._before = None
        self._leaves, self._inputs = {}, {}
        self._is_graph_kept = False

    @contextmanager
    def _undone_after_disk_error(self) -> Iterator[None]:
        """In this context, a DiskError restores what can be restored of the state before the
        forward pass."""
        try:
            yield
        except DiskError as error:
            if self._before is None:
                raise
            drop_frames(error)
            detailed = self._before.undo_after(error)
            self.close()
            raise detailed from error.__cause__

    def _release(self) -> None:
        self.state.clear()
        if self._copies is not None:
            self._copies.close()

    def _run(self, piece: Piece) -> None:
        try:
            piece.run(self.state)
        except BaseException:
            if self._copies is not None:
                self._copies.close()
            raise
