"""What stands in for `model.forward`: a program for each kind of call, the module's own otherwise.

`scheduler_runtime.apply` puts one there that has its plans, `scheduler_runtime.fit` one that makes
them when it is called, `scheduler_runtime.compiler.compile_model` one that compiles.
"""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from graphs.calls import Call, TraceError, argument_order, device_of
from graphs.costs import CostModel
from graphs.graph import Graph
from graphs.trace import CapturedStep, refuse_plans, trace_module
from scheduler_runtime.execute import has_checkpoints
from scheduler_runtime.planned.guards import Records
from scheduler_runtime.planned.program_cache import N_KEPT, ProgramCache, StepProgram, kind_of
from solver.runtime_hooks import PLAN_BY_SUBMODULES
from solver.schedule import Compute, Schedule

logger = logging.getLogger(__name__)

N_WORTH_A_WARNING = (8, 32, 128)


class ForwardReplacement(abc.ABC):
    """Called in the place of the module's forward; keeps one program for each kind of call.

    instance_forward: what another library had put in the place of the class's forward before.
    n_kept: programs at most.
    """

    n_kept = N_KEPT

    def __init__(self, model: nn.Module) -> None:
        self.instance_forward = model.__dict__.get("forward")
        self._model = model
        self._tracing = False
        self._programs = ProgramCache(n_kept=self.n_kept)
        self._records = Records()
        self._argument_order = argument_order(self._own_forward)
        functools.update_wrapper(self, self._own_forward, updated=())

    def why_not_traced(self, title: str) -> str:
        """Asked by `graphs.trace`, which would trace this instead of the module's own forward."""
        owner = "model" if title == "it" else "that submodule"
        return (
            f"{title} has a plan already, which would be traced instead; "
            f"scheduler_runtime.remove({owner}) first"
        )

    @property
    def _own_forward(self) -> Any:
        """The forward that the module had before."""
        if self.instance_forward is not None:
            return self.instance_forward
        return functools.partial(type(self._model).forward, self._model)

    @abc.abstractmethod
    def covers(self) -> bool:
        """Whether a forward pass with gradients is one that is planned (training or evaluation)."""

    @abc.abstractmethod
    def program_for(self, call: Call) -> StepProgram:
        """A program for a call that none of those which are there fits."""

    def situation(self) -> Any:
        """What the program depends on beside the call."""
        return None

    def call_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The call with its named arguments in the forward's order."""
        return Call.of(args, kwargs, order=self._argument_order)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if self._tracing or not torch.is_grad_enabled() or not self.covers() or _is_transformed():
            return self._own_forward(*args, **kwargs)
        call = self.call_of(args, kwargs)
        if not _gets_gradients(model, call):  # an adapter that is switched off for the moment
            return self._own_forward(*args, **kwargs)
        kind = self.kind(call)
        compiled = self._programs.find(kind, model, call)
        if compiled is None:
            compiled = self.program_for(call)
            self._programs.add(kind, compiled)
            if self._programs.n_added in N_WORTH_A_WARNING:
                logger.warning(
                    "%s has been planned for %d kinds of call; shapes, arguments or attributes "
                    "that change with every step are a new plan every step: pad the shapes, or "
                    "hand the value in as a tensor",
                    type(model).__name__,
                    self._programs.n_added,
                )
        return compiled.run(model, call)

    def kind(self, call: Call) -> Any:
        """Equal for calls that one program can be for."""
        return kind_of(self._model, call, self._records), self.situation()

    def __getstate__(self) -> dict[str, Any]:
        """Programs are not copied or pickled: they are made again at the next forward pass."""
        fresh = {"_programs": ProgramCache(n_kept=self.n_kept), "_records": Records()}
        return {**self.__dict__, **fresh}

    def traced(
        self,
        call: Call,
        *,
        choose: Callable[[Any], tuple[int, ...]],
        gradients: str,
        costs: CostModel | None,
    ) -> CapturedStep:
        """The module's own forward and backward pass for this call (`graphs.trace`).

        What another library has put around the stand-in since (accelerate's autocast) is running
        already, and may not bear to run in itself: the stand-in takes its place for the time.
        """
        model = self._model
        refuse_plans(model, also_its_own=False)
        around = model.__dict__.get("forward")
        self._tracing = True
        model.forward = self
        try:
            return trace_module(
                model,
                call,
                device=device_of(self._model),
                choose=choose,
                gradients=gradients,
                costs=costs,
            )
        except TraceError as error:
            if error.runs_in_eager:
                error.add_note(PLAN_BY_SUBMODULES)
            raise
        finally:
            self._tracing = False
            del model.forward
            if around is not None:
                model.forward = around


def _is_transformed() -> bool:
    """Whether forward-mode differentiation or a transform of torch.func (vmap, grad, jacrev) runs.

    They pass a planned step by: its program knows tensors alone. PyTorch has no public question
    for it that is asked of no tensor.
    """
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def _gets_gradients(model: nn.Module, call: Call) -> bool:
    """Whether there is anything that a backward pass would be for."""
    return any(p.requires_grad for p in model.parameters()) or any(
        tensor.requires_grad for tensor in call.tensors
    )


def refuse_second(model: nn.Module) -> None:
    """One plan for a module: raises ValueError where there is one."""
    if isinstance(model.__dict__.get("forward"), ForwardReplacement) or has_checkpoints(model):
        raise ValueError("a plan is applied to this module already; remove(model) it first")


def module_schedule(schedule: Schedule, part: Graph) -> Schedule:
    """The schedule without what the caller runs: the loss outside, the optimizer."""
    ops = tuple(
        op
        for op in schedule.ops
        if (op.node in part.node_by_name if isinstance(op, Compute) else op.tensor in part.producer)
    )
    return Schedule(ops=ops, graph_id=part.graph_id)
