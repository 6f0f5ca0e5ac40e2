"""A plan by submodules, and how it is applied: with stock checkpoints of the chosen submodules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from scheduler_runtime.by_submodule.coarse_graph import SCOPE
from scheduler_runtime.execute import (
    CheckpointedForward,
    ExportedForward,
    SegmentedForward,
    names_inside,
    runs_in_a_loop,
)
from solver.module_checkpointing import CheckpointRegion
from solver.schedule import Solution
from solver.sizes_deadlines_progress import counted


@dataclass(frozen=True, repr=False)
class SubmoduleSolution(Solution):
    """A Solution for a coarse graph of submodules.

    scope: what the figures are for.
    blocks: paths of the submodules that were planned.
    checkpointed: those blocks that are recomputed.
    segments: the checkpoints, each of neighbouring children of the nn.Sequential at `container`,
        whose children are the blocks; () if each checkpoint is of one submodule.
    container: path of that nn.Sequential.
    left_alone: sentences on what was not planned.
    changed_state: names of the parameters and buffers that the forward pass of a step changes.
        Recomputations read the values that it has read, and must not change them again.
    """

    scope: str = SCOPE
    blocks: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()
    segments: tuple[CheckpointRegion, ...] = ()
    container: str = ""
    left_alone: tuple[str, ...] = ()
    changed_state: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, solution: Solution, **changes: Any) -> SubmoduleSolution:
        """The fields of `solution`, with these changes."""
        kept = {f.name: getattr(solution, f.name) for f in dataclasses.fields(Solution)}
        return cls(**{**kept, **changes})

    @property
    def parts(self) -> tuple[str, ...]:
        """Lines that say which submodules are checkpointed; nested ones are indented."""
        if self.schedule is None:
            return ()
        together = _lines(self.segments) if self.segments else self.checkpointed
        kept = ", ".join(path for path in self.blocks if path not in self.checkpointed)
        return (*(f"checkpointed: {line}" for line in together), f"kept: {kept or 'none'}")

    def __str__(self) -> str:
        lines = [repr(self), f"{self.scope}: {counted(len(self.blocks), 'submodule')}"]
        return "\n".join([*lines, *(f"  {part}" for part in self.parts), *self.left_alone])


def _lines(regions: Sequence[CheckpointRegion]) -> Iterator[str]:
    for region in regions:
        n_blocks = len(region.modules)
        yield region.path if n_blocks == 1 else f"{region.path} ({n_blocks} together)"
        yield from (f"  {line}" for line in _lines(region.inner))


def put_checkpoints(model: nn.Module, solution: SubmoduleSolution) -> nn.Module:
    """Checkpoint the planned submodules of the model; `scheduler_runtime.remove` undoes it.

    Raises ValueError for a plan without a schedule, and for another model than planned.
    """
    if solution.schedule is None:
        raise ValueError(f"the plan has no schedule to apply: its status is {solution.status}")
    modules = dict(model.named_modules())
    for path in solution.blocks:
        if path not in modules:
            raise ValueError(f"the plan is for a model with a submodule {path!r}; this has none")
    if not solution.checkpointed:
        model.forward = ExportedForward(model)
        return model
    if solution.segments:
        container = modules.get(solution.container)
        n_blocks = len(solution.blocks)
        if container is None or not runs_in_a_loop(container) or len(container) != n_blocks:
            where = f"at {solution.container!r}" if solution.container else "as the model"
            raise ValueError(
                f"the plan is for an nn.Sequential {where} with {n_blocks} children and no hooks; "
                f"this is a {type(container).__name__}"
            )
        names = names_inside(solution.changed_state, solution.container)
        container.forward = SegmentedForward(  # type: ignore[method-assign]
            container, segments=solution.segments, rewound=names
        )
        return model
    for path in solution.checkpointed:
        names = names_inside(solution.changed_state, path)
        modules[path].forward = CheckpointedForward(modules[path], rewound=names)
    return model
