"""Shared by the trainers' callbacks: `fit` when a training begins, `remove` when it ends."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from scheduler_runtime.applying import remove
from scheduler_runtime.fitting import Fitted, FittedForward, Optimizers, fit, plans_of
from solver.sizes_deadlines_progress import check_names


class FittedModel:
    """Fits the model of one training at a time, and keeps its plans. options: those of `fit`."""

    def __init__(self, options: dict[str, Any]) -> None:
        if "optimizer" in options:
            raise ValueError("optimizer= is the Trainer's own: leave it out")
        check_names("fit", options, inspect.signature(fit).parameters)
        self._options = {"unplanned": "error", **options}
        self._model: nn.Module | None = None
        self._plans: tuple[Fitted, ...] = ()

    @property
    def plans(self) -> tuple[Fitted, ...]:
        """The plans made so far in this training, or those of the last one."""
        return self._plans if self._model is None else plans_of(self._model)

    def begin(self, model: nn.Module, optimizer: Optimizers) -> None:
        if isinstance(model.__dict__.get("forward"), FittedForward):
            remove(model)  # left by a training that ended with an error
        fit(model, optimizer=optimizer, **self._options)
        self._model = model

    def expect_backward(self, expected: bool) -> None:
        """Whether backward passes follow the next forward passes."""
        forward = None if self._model is None else self._model.__dict__.get("forward")
        if isinstance(forward, FittedForward):
            forward.expect_backward(expected)

    def end(self) -> None:
        if self._model is not None:
            self._plans = self.plans
            remove(self._model)
            self._model = None
