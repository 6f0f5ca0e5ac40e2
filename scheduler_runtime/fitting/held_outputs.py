"""Which outputs of a model the training still holds when its backward pass begins.

A loop that gives the output a name holds all of it to the end of the step; one that keeps the loss
alone (the Trainer of Hugging Face) has dropped the logits by then. Only the step itself shows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graphs.model_calls import nested
from graphs.trace import CapturedStep
from scheduler_runtime.execute import maker_of


def names_of_outputs(step: CapturedStep) -> dict[int, str]:
    """Index of a flat output that forward makes -> its tensor in the graph."""
    outputs = enumerate(step.captured.outputs)
    made = {at: step.layout.storage[item] for at, item in outputs if isinstance(item, fx.Node)}
    return {at: name for at, name in made.items() if name in step.graph.producer}


def watch_outputs(output: Any, then: Callable[[tuple[int, ...]], None]) -> None:
    """Call `then` where the gradients of this output of a planned forward pass arrive, with the
    indices of the flat outputs that are tensors and gone."""
    flat = nested.leaves(output)
    held = {
        index: weakref.ref(item.untyped_storage())
        for index, item in enumerate(flat)
        if isinstance(item, torch.Tensor)
    }
    function: Any = next(each.grad_fn for each in nested.tensors(output) if maker_of(each))

    def begins(_gradients: Sequence[torch.Tensor | None]) -> None:
        then(tuple(index for index, storage in held.items() if storage() is None))

    function.register_prehook(begins)
