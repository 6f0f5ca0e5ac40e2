"""Compile, measure, correct the planned budget and compile again, until the step fits."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphs.capture import SideEffectError
from graphs.model_calls import TraceError
from scheduler_runtime.compiler.backends import backend_of
from scheduler_runtime.compiler.partitioner import BudgetPartitioner, NothingFitsError, Partition
from scheduler_runtime.compiler.rehearsal import Rehearsal
from solver.sizes_deadlines_progress import BudgetError, counted, format_size, telling

CLOSE = 0.02
"""The search ends once a measured peak is below the budget by at most this share."""


class GraphBreakError(TraceError):
    """torch.compile cannot make one graph of the module; says where it would break and why."""


@dataclass(frozen=True)
class Target:
    """How to compile, and within which budget.

    backend: a name in `BACKENDS`.
    budget_bytes: budget of the device for the whole step.
    available_bytes: the budget without the reserve.
    max_attempts: the most compilations.
    partitioner: makes a partitioner for a given `budget_bytes`.
    """

    backend: str
    budget_bytes: int
    available_bytes: int
    max_attempts: int
    partitioner: Callable[..., BudgetPartitioner]


@dataclass(frozen=True)
class Attempt:
    """One compilation.

    planned_bytes: the budget that its partition was planned for (None: PyTorch's partition).
    partition: what was decided.
    measured_bytes: measured peak of the step (None: out of memory).
    """

    planned_bytes: int | None
    partition: Partition
    measured_bytes: int | None


class CompileLoop:
    """Compiles and measures, with corrected budgets, until the step fits.

    attempts: what was tried, in order.
    """

    def __init__(self, rehearsal: Rehearsal, forward: Callable[..., Any], target: Target) -> None:
        self.attempts: list[Attempt] = []
        self._rehearsal = rehearsal
        self._forward = forward
        self._target = target
        self._title = type(rehearsal.model).__name__
        self._best: tuple[Attempt, Callable[..., Any]] | None = None
        self._fits_bytes = 0  # the largest predicted peak whose measured peak has fitted
        self._exceeds_bytes = 2**60  # the smallest predicted peak whose measured peak has not

    def run(self) -> tuple[Attempt, Callable[..., Any]]:
        """The fastest attempt that fits, and its compiled function. Raises BudgetError."""
        planned_bytes: int | None = None
        nothing: NothingFitsError | None = None  # with the smallest peak that its search has found
        while len(self.attempts) < self._target.max_attempts:
            try:
                with telling(self._progress_text(planned_bytes)):
                    attempt, function = self._attempt(planned_bytes, nothing)
            except NothingFitsError as error:
                if self._best is not None:
                    break
                if error.obstacle is None or nothing is not None:
                    raise self._nothing_fits(error) from error
                nothing, planned_bytes = error, error.obstacle.reached_bytes
                continue
            self.attempts.append(attempt)
            if self._is_final(attempt, function):
                break
            if (planned_bytes := self._next_bytes(attempt)) is None:
                break
            if nothing is not None and nothing.excludes(planned_bytes):
                break
        if self._best is None:
            raise self._nothing_fits(nothing) from nothing
        return self._best

    def _progress_text(self, planned_bytes: int | None) -> str:
        """A message about the next attempt, which may take minutes."""
        last = self.attempts[-1] if self.attempts else None
        text = f"compiling {self._title}, attempt {len(self.attempts) + 1} of at most "
        text += f"{self._target.max_attempts}, "
        if planned_bytes is None:
            text += "PyTorch's partition; each attempt is a full compilation and one measured step"
        else:
            text += f"planned for {format_size(planned_bytes)}"
        if last is not None:
            text += f"; the last one measured {format_peak(last.measured_bytes)}, "
            text += f"{format_size(self._target.available_bytes)} are available"
        return text

    def _attempt(
        self, planned_bytes: int | None, nothing: NothingFitsError | None
    ) -> tuple[Attempt, Callable[..., Any]]:
        """Compile for this budget (None: with PyTorch's partition) and measure the step.

        nothing: of an earlier search. What it found, this one may not find within its time limit.
        """
        starts = () if nothing is None else nothing.found
        for _ in range(2):  # the first call may set what later ones read (transformers' configs)
            partitioner = self._target.partitioner(budget_bytes=planned_bytes, starts=starts)
            function = _compile(self._forward, backend_of(self._target.backend, partitioner))
            measured_bytes = self._measure(function, partitioner)
            if (n_graphs := len(partitioner.partitions)) == 1:
                partitioner.seal()
                return Attempt(planned_bytes, partitioner.partitions[0], measured_bytes), function
        raise GraphBreakError(
            f"torch.compile made {n_graphs} graphs with a backward pass of {self._title}; a budget "
            "can be kept for one only. It makes another one if a call changes what forward reads; "
            'TORCH_LOGS="recompiles" shows it'
        )

    def _measure(self, function: Callable[..., Any], partitioner: BudgetPartitioner) -> int | None:
        """Compile and measure the step (None: out of memory)."""
        try:
            return self._rehearsal.peak_bytes(function)
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise GraphBreakError(
                f"torch.compile cannot make one graph of {self._title}: {' '.join(lines[:6])}"
                f"{_advice(str(error))}"
            ) from error
        except torch._dynamo.exc.BackendCompilerFailed as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, NothingFitsError | TraceError | ValueError):
                raise inner from error
            raise
        except SideEffectError as error:
            raise TraceError(
                f"{self._title} cannot be compiled within a budget: {error}"
            ) from error
        except torch.OutOfMemoryError:
            if not partitioner.partitions:
                raise  # nothing was partitioned yet, so no plan can help
            return None

    def _is_final(self, attempt: Attempt, function: Callable[..., Any]) -> bool:
        """Record the attempt; returns whether no better one can be expected."""
        schedule = attempt.partition.solution.schedule
        if any(each.partition.solution.schedule == schedule for each in self.attempts[:-1]):
            return self._best is not None
        available_bytes = self._target.available_bytes
        predicted_bytes = attempt.partition.predicted_bytes
        if attempt.measured_bytes is None or attempt.measured_bytes > available_bytes:
            self._exceeds_bytes = min(self._exceeds_bytes, predicted_bytes)
            return False
        self._fits_bytes = max(self._fits_bytes, predicted_bytes)
        if self._best is None or attempt.partition.overhead < self._best[0].partition.overhead:
            self._best = attempt, function
        room_bytes = available_bytes - attempt.measured_bytes
        return not attempt.partition.n_recomputed or room_bytes <= CLOSE * available_bytes

    def _next_bytes(self, attempt: Attempt) -> int | None:
        """The next budget to plan for: the available bytes, corrected by the error of the last
        prediction, or a bisection between what has fitted and what has not. None: stop."""
        available_bytes = self._target.available_bytes
        predicted_bytes = attempt.partition.predicted_bytes
        if attempt.measured_bytes is None:
            planned_bytes = min(
                available_bytes - self._rehearsal.outside_bytes,
                predicted_bytes - predicted_bytes // 10,
            )
        else:
            planned_bytes = available_bytes - (attempt.measured_bytes - predicted_bytes)
        fits_bytes, exceeds_bytes = self._fits_bytes, self._exceeds_bytes
        if fits_bytes and exceeds_bytes - fits_bytes <= CLOSE * available_bytes / 2:
            return None
        if fits_bytes < planned_bytes < exceeds_bytes:
            # the same plan once more would measure the same
            return None if planned_bytes == attempt.planned_bytes else planned_bytes
        return (fits_bytes + exceeds_bytes) // 2 if fits_bytes else int(0.9 * exceeds_bytes)

    def _nothing_fits(self, last: NothingFitsError | None) -> BudgetError:
        """The error to raise. last: that of the last search, if it found no plan."""
        measured = [a.measured_bytes for a in self.attempts if a.measured_bytes is not None]
        least = f"the smallest measured peak is {min(measured)} bytes" if measured else "none ran"
        tried = "; ".join(
            f"predicted {format_size(a.partition.predicted_bytes)}, "
            f"measured {format_peak(a.measured_bytes)}"
            for a in self.attempts
        )
        text = (
            f"no compiled step was found within {self._target.available_bytes} bytes in "
            f"{counted(len(self.attempts), 'attempt')}: {least} ({tried})"
        )
        if last is not None and last.is_cut_short:
            text += "; the time limit ended the search; a larger time_limit_s may find less"
        return BudgetError(text)


def _compile(forward: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of a new code object, so that its cache has no entries of other attempts."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    fresh_code = types.FunctionType(
        step.__code__.replace(), step.__globals__, "step", None, step.__closure__
    )
    return torch.compile(fresh_code, backend=backend, fullgraph=True, dynamic=False)


def _advice(words: str) -> str:
    """What to do about a graph break with this message, if torch's own hints do not lead far."""
    if "torch.autograd.grad" not in words and "requires_grad_()" not in words:
        return ""
    return (
        " -- If forward takes gradients (forces, a gradient penalty), take them with "
        "torch.func.grad or torch.func.vjp, which become part of the graph; or use solve and "
        "apply, or fit, which plan torch.autograd.grad in forward as it is"
    )


def format_peak(n_bytes: int | None) -> str:
    return "out of memory" if n_bytes is None else format_size(n_bytes)
