"""Which part of the module that `fit` was given the training calls: that is planned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from scheduler_runtime.execute import restore_forward
from scheduler_runtime.fitting.unplanned import Watch
from scheduler_runtime.planned import PlannedForward
from solver.sizes_deadlines_progress import tell


class CalledPart(PlannedForward):
    """On a module that the training may call.

    whole: the module that `fit` was given, which this one is or is a part of.
    parts: such forwards on parts of this module that hold all that is trained. The training may
        call one of them in place of the module; what it calls first is planned, and its own parts
        run as they are.
    watch: shared by all of them, until one is called.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        whole: nn.Module,
        parts: Sequence[CalledPart],
        disk_directory: str = "",
    ) -> None:
        super().__init__(model, disk_directory=disk_directory or None)
        self.watch: Watch | None = None
        self._whole: Callable[[], nn.Module | None] | None = weakref.ref(whole)
        self._parts = tuple(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "watch": None, "_whole": None}

    def begin(self) -> None:
        """This module is the one to plan: the training calls it."""
        if self.watch is not None:
            self.watch.end()
            self.watch = None
            whole = self._whole_model()
            if whole is not self._model:
                path = next(path for path, m in whole.named_modules() if m is self._model)
                tell(
                    f"{type(whole).__name__}: the training calls its part {path} "
                    f"({type(self._model).__name__}) directly, so that is planned"
                )
        self._restore_parts()

    def restore(self) -> None:
        if self.watch is not None:
            self.watch.end()
        self._restore_parts()
        super().restore()

    def _restore_parts(self) -> None:
        for part in self._parts:
            restore_forward(part._model)
        self._parts = ()

    def _whole_model(self) -> nn.Module:
        return (self._whole and self._whole()) or self._model
