"""Find out which outputs of a model the training still holds when its backward pass begins.

A training loop that assigns the output to a variable holds all of it to the end of the step. A loop
that only keeps the loss (the Trainer of Hugging Face) has dropped the logits by then. Only a real
step shows which it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.model_calls import nested
from graphs.trace import CapturedStep
from scheduler_runtime.execute import program_of_output


def names_of_outputs(step: CapturedStep) -> dict[int, str]:
    """Index of a flat output that forward computes -> its tensor in the graph."""
    outputs = enumerate(step.captured.outputs)
    computed = {at: step.layout.storage[item] for at, item in outputs if isinstance(item, fx.Node)}
    return {at: name for at, name in computed.items() if name in step.graph.producer}


def watch_outputs(output: Any, then: Callable[[tuple[int, ...]], None]) -> None:
    """Call `then` when gradients of a planned forward pass's output arrive.

    then: gets the indices of the flat outputs (those that are tensors) that the training does not
        hold any more.
    """
    flat = nested.with_repeats_marked(nested.leaves(output))
    returned = {
        index: _ReturnedTensor(weakref.ref(item), weakref.ref(item.untyped_storage()))
        for index, item in enumerate(flat)
        if isinstance(item, torch.Tensor)
    }
    function: Any = next(each.grad_fn for each in nested.tensors(output) if program_of_output(each))
    run = function.run  # not `function`: it holds its hook, so the hook must not hold it

    def on_backward(_gradients: Sequence[torch.Tensor | None]) -> None:
        then(tuple(index for index, each in returned.items() if each.is_dropped(run)))

    function.register_prehook(on_backward)


@dataclass(frozen=True)
class _ReturnedTensor:
    """A tensor that the model has returned, held weakly."""

    tensor: weakref.ref[torch.Tensor]
    storage: weakref.ref[torch.UntypedStorage]

    def is_dropped(self, run: Any) -> bool:
        """Whether only the planned step itself still holds the tensor's storage.

        run: the planned step's `Run`.
        """
        storage = self.storage()
        if storage is None:
            return True
        if self.tensor() is not None:
            return False
        n_held_here = 1  # the object `storage`
        uses: int = torch._C._storage_Use_Count(storage._cdata)
        return uses == n_held_here + len(run.tensors_on(storage))
