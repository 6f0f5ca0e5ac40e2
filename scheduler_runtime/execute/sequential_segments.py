"""Run consecutive children of an nn.Sequential in shared stock checkpoints, which may be nested.

The module keeps its children, hooks and state dict; its forward is replaced on the instance. An
nn.Sequential's own forward is a loop over its children, so to run a part of the loop inside of
`torch.utils.checkpoint.checkpoint(use_reentrant=False)` is the same computation. Modules with hooks
on their children are refused: these hooks would run again with each recomputation.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from graphs.capture import HOOKS
from scheduler_runtime.execute.as_in_forward import AsInForward
from scheduler_runtime.execute.torch_checkpoint import ExportedForward, checkpointed
from solver.module_checkpointing import CheckpointRegion


def runs_in_a_loop(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether the module's forward is nn.Sequential's own, and no child has hooks on its call."""
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    if type(module).forward is not nn.Sequential.forward:
        return False
    return not any(getattr(child, name) for child in module for name in HOOKS)


class SegmentedForward(ExportedForward):
    """Runs the children of an nn.Sequential, with a checkpoint for each segment.

    segments: regions of consecutive children to checkpoint.
    rewound: names, relative to the module, of parameters and buffers that a step changes.
    n_runs: how often each child has run outside of no_grad, recomputations included.
    """

    def __init__(
        self,
        module: nn.Sequential,
        *,
        segments: Sequence[CheckpointRegion],
        rewound: Sequence[str] = (),
    ) -> None:
        super().__init__(module)
        self.segments = segments
        self.rewound = rewound
        self.n_runs = [0] * len(module)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or len(args) != 1 or kwargs:
            return self.own_forward(*args, **kwargs)
        return self._run(0, len(self.n_runs) - 1, self.segments, args[0])

    def _run(self, first: int, last: int, segments: Sequence[CheckpointRegion], value: Any) -> Any:
        """Run the children first to last on a value, those of segments in checkpoints."""
        children: Any = list(self._model._modules.values())  # read now: a child may be wrapped
        starts = {self._span(segment)[0]: segment for segment in segments}
        position = first
        while position <= last:
            segment = starts.get(position)
            if segment is None:
                self.n_runs[position] += 1
                value = children[position](value)
                position += 1
                continue
            start, end = self._span(segment)
            run = functools.partial(self._run, start, end, segment.inner)
            # the compiler functionalises buffers itself
            options: Any = (
                {}
                if torch.compiler.is_compiling()
                else {"context_fn": functools.partial(self._contexts, segment)}
            )
            value = checkpointed(run, (value,), {}, **options)
            position = end + 1
        return value

    def _span(self, segment: CheckpointRegion) -> tuple[int, int]:
        """The positions of a segment's first and last child."""
        names = list(self._model._modules)
        first, last = segment.modules[0], segment.modules[-1]
        return names.index(first.rpartition(".")[2]), names.index(last.rpartition(".")[2])

    def _contexts(self, segment: CheckpointRegion) -> tuple[Any, Any]:
        children = {path.rpartition(".")[2] for path in segment.modules}
        inside = [name for name in self.rewound if name.partition(".")[0] in children]
        parts = [self._model.get_submodule(name) for name in children]
        nothing = contextlib.nullcontext()
        again = AsInForward(nothing, self._model, (), rewound=inside, parts=parts)
        return again.in_forward, again
