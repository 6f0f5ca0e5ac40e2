"""Find out which part of a fitted module the training calls; that part is planned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from scheduler_runtime.execute import restore_forward
from scheduler_runtime.fitting.unplanned import UncalledWatch
from scheduler_runtime.planned import PlannedForward
from solver.sizes_deadlines_progress import tell


class CalledPart(PlannedForward):
    """The forward of a module that the training may call, which makes that module the planned one.

    whole: the module that was given to `fit`: this module, or one that contains it.
    parts: the same kind of forward on submodules that hold everything that is trained. The training
        may call one of them instead of this module. The one that it calls first is planned; the
        submodules inside of that one get their own forwards back.
    watch: reports that none of them was called; shared by all, until one is called.
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
        self.watch: UncalledWatch | None = None
        self._whole: Callable[[], nn.Module | None] | None = weakref.ref(whole)
        self._parts = tuple(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "watch": None, "_whole": None}

    def begin(self) -> None:
        """The training calls this module, so this one is planned, and not its parts."""
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

    def _own_forward_of(self, other: nn.Module) -> Callable[..., Any]:
        if self.watch is not None:
            self.watch.note_run_for_copy()
        return super()._own_forward_of(other)

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
