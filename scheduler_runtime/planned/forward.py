"""The forward that replaces `model.forward` under a plan: one program for each kind of call.

It has three subclasses, in `scheduler_runtime.applying` (the plans are given),
`scheduler_runtime.fitting` (planned at the first call) and
`scheduler_runtime.compiler.compile_model` (torch.compile).
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from graphs.capture import (
    Capture,
    CheckError,
    FailsOnBatchError,
    KeptCapture,
    Planned,
    refuse_plans,
)
from graphs.costs import CostModel
from graphs.model_calls import Call, LayoutForShapes, argument_order, device_of, input_forms
from graphs.trace import CapturedStep, refuse_meta_batch, rehearsed, trace_module
from scheduler_runtime.execute import (
    BoundProgram,
    Pools,
    ReplacedForward,
    StepProgram,
    has_checkpoints,
    restore_forward,
)
from scheduler_runtime.planned.guards import kind_of, with_read_elsewhere
from scheduler_runtime.planned.program_cache import ProgramCache
from scheduler_runtime.planned.same_plan_on_ranks import Ranks
from scheduler_runtime.planned.saved_tensor_hooks import (
    refuse_saved_tensors_hooks,
    without_saved_tensors_hooks,
)
from scheduler_runtime.planned.unread_attributes import UnreadAttributes
from solver.sizes_deadlines_progress import telling

logger = logging.getLogger(__name__)

N_WORTH_A_WARNING = (8, 32, 128)
"""Numbers of planned kinds of call at which a warning says how to need fewer."""


class PlannedForward(ReplacedForward):
    """Runs one program for each kind of call; calls that are not planned run the module's own
    forward.

    made_by: the function by which users give a model this forward.
    n_kept: the most programs that are kept.
    saves_for_autograd: whether its programs leave it to autograd what is saved for backward, so
        that PyTorch's own hooks of saved tensors (a checkpoint, `save_on_cpu`) have an effect.
    disk_directory: where plans that copy to a disk make their files.
    """

    made_by = "apply"
    n_kept = 32
    saves_for_autograd = False

    def __init__(self, model: nn.Module, *, disk_directory: str | Path | None = None) -> None:
        super().__init__(model)
        self._pools = Pools(None if disk_directory is None else Path(disk_directory))
        self._programs = ProgramCache(n_kept=self.n_kept)
        self._argument_order = argument_order(self.own_forward)
        self._has_ranks = False
        self._unread = UnreadAttributes()

    def why_not_traced(self, title: str) -> str:
        owner = "model" if title == "it" else "that submodule"
        return (
            f"{title} has a plan already, which would be traced instead; "
            f"checkpoint_solver.remove({owner}) first"
        )

    @abc.abstractmethod
    def covers(self) -> bool:
        """Whether forward passes with gradients are planned in the module's present mode (train or
        eval)."""

    @abc.abstractmethod
    def program_for(self, call: Call) -> StepProgram:
        """Make a program for a call that none of the kept programs fits."""

    def begin(self) -> None:
        """Called before each planned forward pass."""

    def unplanned(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass without a plan."""
        return self.own_forward(*args, **kwargs)

    def values_on_device(self) -> contextlib.AbstractContextManager[None]:
        """A context in which all parameters have their values on the device."""
        return contextlib.nullcontext()

    def restore(self) -> None:
        """Give the module its own forward back."""
        restore_forward(self._model)

    def situation(self) -> Any:
        """What a program depends on besides the module and the call; compared with `==`."""
        return None

    def call_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The call, with named arguments in the order of the forward's signature."""
        return Call.of(args, kwargs, order=self._argument_order)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if not torch.is_grad_enabled() or not self.covers() or _is_transformed():
            return self.unplanned(*args, **kwargs)
        call = self.call_of(args, kwargs)
        if not any(p.requires_grad for p in model.parameters()) and not any(
            tensor.requires_grad for tensor in call.tensors
        ):  # nothing to differentiate: the adapters are switched off, say
            return self.unplanned(*args, **kwargs)
        refuse_saved_tensors_hooks()
        self.begin()
        kind = self.kind(call)
        program = self._programs.find(kind, model, call)
        if program is None or self._has_ranks:  # to look for ranks in every step takes time
            ranks = Ranks.of(model)
            self._has_ranks = ranks is not None
            if ranks is not None:  # if their batches differ, an error on all of them
                has_plan = program is not None
                ranks.agree({"the batch": input_forms(call.tensors), "a plan for it": has_plan})
        if program is None:
            refuse_meta_batch(model, call)
            self._unread.compare(self._programs.call_kinds(), kind[0], model)
            with without_saved_tensors_hooks():
                program = self._make_program_or_raise_own_error(call, args, kwargs)
            kind_after = self.kind_for(program, call)
            sets_attributes = isinstance(program, BoundProgram) and program.sets_plain_attributes
            self._programs.add(
                kind_after,
                program,
                other_kind=kind if sets_attributes and kind != kind_after else None,
            )
            if self._programs.n_added in N_WORTH_A_WARNING:
                logger.warning(
                    "%s has been planned for %d kinds of call; %s",
                    type(model).__name__,
                    self._programs.n_added,
                    self._programs.remedy(),
                )
        try:
            with (
                contextlib.nullcontext()
                if self.saves_for_autograd
                else without_saved_tensors_hooks()
            ):
                return program.run(model, call)
        except CheckError as error:
            failed = error
        try:
            # a check of a value failed: without a plan, forward raises its own error about it
            self.unplanned(*args, **kwargs)
            raise failed
        finally:
            del failed  # a cycle: the error refers to this frame

    def _make_program_or_raise_own_error(
        self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepProgram:
        """Make a new program. If the module's own forward fails on this batch, its own error is
        raised, so that a training loop that skips such batches works with a plan, too."""
        try:
            with self.values_on_device():
                return self._make_agreed_program(call)
        except FailsOnBatchError as error:
            found = error
        own = self._own_error(found, args, kwargs)
        own.add_note(
            f"raised by the forward of {type(self._model).__name__} itself, while "
            "checkpoint_solver planned its step for this batch"
        )
        try:
            raise own
        finally:
            del found, own  # a cycle: the errors refer to this frame

    def _own_error(
        self, found: FailsOnBatchError, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> BaseException:
        """The error that forward raises on this batch without a plan.

        Forward runs once more, since planning has undone what it had changed before it failed
        (statistics of batch norm, generator states): these are then as without a plan.
        """
        traced = found.__cause__
        assert traced is not None
        if Ranks.of(self._model) is not None:
            return traced  # ranks that do not fail would not join its collectives
        handled = sys.exception()  # an error that the caller handles now
        try:
            self.unplanned(*args, **kwargs)
        except torch.OutOfMemoryError:  # without a plan, the step may not fit
            return traced
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            for note in getattr(traced, "__notes__", ()):
                error.add_note(note)
            _drop_frames(found, but=handled)
            return error
        return traced

    def _make_agreed_program(self, call: Call) -> StepProgram:
        """Make a new program; for a distributed module the same one on all ranks, or an error on
        all of them."""
        ranks = Ranks.of(self._model)
        if ranks is None:
            return self.program_for(call)
        with ranks.sending_errors():
            program = self.program_for(call)
        plan = program.program.plan_id if isinstance(program, BoundProgram) else None
        ranks.agree({"the batch": input_forms(call.tensors), "the plan": plan})
        return program

    def kind(self, call: Call) -> Any:
        """What a program for this call depends on: equal for calls that can share a program."""
        return kind_of(self._model, call), self.situation()

    def kind_for(self, program: StepProgram, call: Call) -> Any:
        """The kind of this call and of all others that the program is for.

        Attributes that the program sets before it reads them, or never reads, may have any value.
        """
        of_call, situation = self.kind(call)  # again: tracing may have set attributes
        if not isinstance(program, BoundProgram):
            return self._with_read_elsewhere(of_call), situation
        unread = program.sets_unread | self._unread.unread_by(program.captured)
        ignoring = kind_of(self._model, call, ignored=unread)
        if ignoring != of_call:  # some of them hold what other attributes hold, too
            ignored = {
                each for each in unread if kind_of(self._model, call, ignored=(each,)) == of_call
            }
            ignoring = kind_of(self._model, call, ignored=ignored)
        return self._with_read_elsewhere(ignoring), situation

    def _with_read_elsewhere(self, of_call: Any) -> Any:
        return with_read_elsewhere(of_call, self._model, self.own_forward)

    def constants(self) -> Iterator[torch.Tensor]:
        for _, program in self._programs.programs:
            if isinstance(program, BoundProgram):
                yield from program.program.constants.values()

    def __getstate__(self) -> dict[str, Any]:
        """Programs and host memory are not copied or pickled; the next call makes new ones."""
        return {
            **self.__dict__,
            "_programs": ProgramCache(n_kept=self.n_kept),
            "_pools": Pools(self._pools.directory),
            "_unread": UnreadAttributes(),
        }

    def trace_own_forward(
        self,
        call: Call,
        *,
        choose: Callable[[Any], tuple[int, ...]],
        gradients: str,
        costs: CostModel | None,
        rewrites: Iterable[str],
        opaque: Planned = (),
        kept: Iterable[KeptCapture] = (),
        known: Capture | None = None,
        gradient_layouts: Mapping[int, LayoutForShapes] | None = None,
    ) -> CapturedStep:
        """Trace the module's own forward and backward pass for this call (`graphs.trace`).

        kept: programs that were traced before; if one is for this call, nothing is traced.
        known: the traced program of this call, if there is one.
        The other arguments are those of `trace_module`.
        """
        model = self._model
        with self._without_this_plan():
            found = (each.captured_for(model, call) for each in kept)
            known = known or next((each for each in found if each is not None), None)
            with (
                telling(f"tracing {type(model).__name__}...", in_lines=True)
                if known is None
                else contextlib.nullcontext()
            ):
                trace = functools.partial(
                    trace_module,
                    model,
                    call,
                    device=device_of(model),
                    choose=choose,
                    gradients=gradients,
                    costs=costs,
                    rewrites=rewrites,
                    opaque=opaque,
                    known=known,
                    gradient_layouts=gradient_layouts,
                )
                step = trace() if known is not None else self._unread.trace(model, trace)
        for held in step.captured.filled:
            held.set_on(model)
        for left in step.captured.left:
            left.free_on(model)
        return step

    def rehearsed(self, step: CapturedStep, call: Call) -> CapturedStep:
        """The traced step with what eager mode holds longer, for the baseline
        (`graphs.capture.rehearse`)."""
        with self._without_this_plan():
            return rehearsed(self._model, call, step, device=device_of(self._model))

    @contextlib.contextmanager
    def _without_this_plan(self) -> Iterator[None]:
        """In this context, the module has its own forward, to be traced.

        Another library may have wrapped the planned forward since (accelerate's autocast). Its
        wrapper is running already and must not be entered twice, so it is removed, too.
        """
        model = self._model
        refuse_plans(model, also_its_own=False)
        wrapper = model.__dict__.get("forward")
        # not a bound method of this object: tracing searches the forward for tensors, and this
        # object holds those of all programs
        model.forward = self.own_forward
        try:
            yield
        finally:
            del model.forward
            if wrapper is not None:
                model.forward = wrapper


def _drop_frames(error: BaseException, *, but: BaseException | None) -> None:
    """Clear the frames of an error and of the errors that led to it, which hold traced tensors.

    but: an error whose frames, and those of the errors before it, are left alone.
    """
    seen = {id(but)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += [each.__cause__, each.__context__]


def _is_transformed() -> bool:
    """Whether forward-mode differentiation or a transform of torch.func (vmap, grad, jacrev) runs.

    A program sees plain tensors only and would miss them. PyTorch has no public way to ask
    without a tensor.
    """
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def refuse_second(model: nn.Module) -> None:
    """Raise ValueError if the module has a plan already."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, PlannedForward):
        raise ValueError(
            f"this module already has a plan, from {forward.made_by}; call remove(model) first"
        )
    if has_checkpoints(model):
        raise ValueError("this module already has a plan; call remove(model) first")
