"""Compile, measure, correct what was planned for, compile again: until the step fits."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphs.calls import TraceError
from graphs.capture import SideEffectError
from scheduler_runtime.compiler.backends import backend_of
from scheduler_runtime.compiler.partitioner import BudgetPartitioner, NothingFitsError, Partition
from scheduler_runtime.compiler.rehearsal import Rehearsal
from solver.common import BudgetError, format_size

CLOSE = 0.02
"""A peak this share below the budget is close enough to stop at."""


class GraphBreakError(TraceError):
    """torch.compile cannot make one graph of the module; says where it would break and why."""


@dataclass(frozen=True)
class Attempt:
    """One compilation. planned_bytes: what its partition was planned for (None: as PyTorch does).

    measured_bytes: peak of the step (None: the device's memory did not suffice).
    """

    planned_bytes: int | None
    partition: Partition
    measured_bytes: int | None


class CompileLoop:
    """Compile, measure, correct; `attempts` are what was tried."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        forward: Callable[..., Any],
        *,
        backend: str,
        partitioner: Callable[..., BudgetPartitioner],
        available_bytes: int,
        max_attempts: int,
    ) -> None:
        self.attempts: list[Attempt] = []
        self._rehearsal = rehearsal
        self._forward = forward
        self._backend = backend
        self._partitioner = partitioner
        self._available_bytes = available_bytes
        self._max_attempts = max_attempts
        self._best: tuple[Attempt, Callable[..., Any]] | None = None
        self._fits_bytes = 0  # the largest planned budget whose measured peak fitted
        self._bursts_bytes = 2**60  # the smallest whose peak did not

    def run(self) -> tuple[Attempt, Callable[..., Any]]:
        planned_bytes: int | None = None
        least_tried = False
        while len(self.attempts) < self._max_attempts:
            try:
                attempt, function = self._attempt(planned_bytes)
            except NothingFitsError as error:
                if self._best is not None:
                    break
                if error.reached_bytes is None or least_tried:
                    raise BudgetError(self._nothing_fits()) from error
                planned_bytes, least_tried = error.reached_bytes, True
                continue
            self.attempts.append(attempt)
            if self._is_final(attempt, function):
                break
            following = self._next_bytes(attempt)
            if following is None:
                break
            planned_bytes = following
        if self._best is None:
            raise BudgetError(self._nothing_fits())
        return self._best

    def _attempt(self, planned_bytes: int | None) -> tuple[Attempt, Callable[..., Any]]:
        partitioner = self._partitioner(budget_bytes=planned_bytes)
        function = _compiled(self._forward, backend_of(self._backend, partitioner))
        try:
            measured_bytes: int | None = self._rehearsal.peak_bytes(function)
        except torch._dynamo.exc.Unsupported as error:
            raise GraphBreakError(
                f"torch.compile cannot make one graph of {type(self._rehearsal.model).__name__}: "
                f"{_first_lines(error)}"
            ) from error
        except torch._dynamo.exc.BackendCompilerFailed as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, NothingFitsError | TraceError | ValueError):
                raise inner from error
            raise
        except SideEffectError as error:
            raise TraceError(
                f"{type(self._rehearsal.model).__name__} cannot be compiled within a budget: "
                f"{error}"
            ) from error
        except torch.OutOfMemoryError:
            if not partitioner.partitions:
                raise  # before there was anything to plan
            measured_bytes = None
        if len(partitioner.partitions) != 1:
            raise GraphBreakError(
                f"{type(self._rehearsal.model).__name__} was compiled into "
                f"{len(partitioner.partitions)} graphs with a backward pass; a budget is kept for "
                "one"
            )
        partitioner.seal()
        return Attempt(planned_bytes, partitioner.partitions[0], measured_bytes), function

    def _is_final(self, attempt: Attempt, function: Callable[..., Any]) -> bool:
        """Note what the attempt shows; whether there is nothing more to win."""
        if any(_is_same(attempt, earlier) for earlier in self.attempts[:-1]):
            return self._best is not None
        planned_bytes = attempt.partition.predicted_bytes
        if attempt.measured_bytes is None or attempt.measured_bytes > self._available_bytes:
            self._bursts_bytes = min(self._bursts_bytes, planned_bytes)
            return False
        self._fits_bytes = max(self._fits_bytes, planned_bytes)
        if self._best is None or attempt.partition.overhead < self._best[0].partition.overhead:
            self._best = attempt, function
        room_bytes = self._available_bytes - attempt.measured_bytes
        return not attempt.partition.n_recomputed or room_bytes <= CLOSE * self._available_bytes

    def _next_bytes(self, attempt: Attempt) -> int | None:
        """What to plan for next: the budget, corrected by how far the prediction was off."""
        predicted_bytes = attempt.partition.predicted_bytes
        if attempt.measured_bytes is None:
            offset_bytes = self._rehearsal.outside_bytes
            planned_bytes = min(
                self._available_bytes - offset_bytes, predicted_bytes - predicted_bytes // 10
            )
        else:
            planned_bytes = self._available_bytes - (attempt.measured_bytes - predicted_bytes)
        if not self._fits_bytes < planned_bytes < self._bursts_bytes:
            planned_bytes = (max(self._fits_bytes, 0) + self._bursts_bytes) // 2
            if not self._fits_bytes:  # only too much so far
                planned_bytes = int(0.9 * self._bursts_bytes)
        if self._bursts_bytes - self._fits_bytes <= CLOSE * self._available_bytes / 2:
            return None if self._fits_bytes else planned_bytes
        return planned_bytes

    def _nothing_fits(self) -> str:
        measured = [a.measured_bytes for a in self.attempts if a.measured_bytes is not None]
        least = f"the least peak measured is {min(measured)} bytes" if measured else "none ran"
        tried = "; ".join(
            f"predicted {format_size(a.partition.predicted_bytes)}, "
            f"measured {shown_bytes(a.measured_bytes)}"
            for a in self.attempts
        )
        return (
            f"no compiled step was found within {self._available_bytes} bytes in "
            f"{len(self.attempts)} attempts: {least} ({tried})"
        )


def _is_same(one: Attempt, other: Attempt) -> bool:
    plans = (one.partition.solution.schedule, other.partition.solution.schedule)
    return plans[0] == plans[1]


def _compiled(forward: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of the forward by itself: entries of other attempts do not count against it."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    own_code = types.FunctionType(
        step.__code__.replace(), step.__globals__, "step", None, step.__closure__
    )
    return torch.compile(own_code, backend=backend, fullgraph=True, dynamic=False)


def _first_lines(error: Exception, n_lines: int = 6) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:n_lines])


def shown_bytes(n_bytes: int | None) -> str:
    return "out of memory" if n_bytes is None else format_size(n_bytes)
