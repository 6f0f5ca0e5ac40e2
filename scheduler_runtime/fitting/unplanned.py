"""Report a training that never calls the module that was given to `fit`.

Hooks on the parameters notice the first backward pass that reaches them. The hooks are removed at
the first planned call, so that programs never run with them, and after the first gradient.
"""

from __future__ import annotations

import functools
import keyword
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class UncalledWatch:
    """Reports once, at the end of the first backward pass that reaches the module, unless ended.

    If the module has run without gradients, the first backward pass may be that of a loss on
    detached outputs (GradCache), so the report waits for the second.

    tell: called with the message.
    """

    def __init__(self, model: nn.Module, tell: Callable[[str], None]) -> None:
        self._model = weakref.ref(model)  # the hooks hold this object, and must not hold the model
        self._tell = tell
        self._has_run_for_copy = False
        self._n_awaited = 1  # backward passes
        self._last_backward = -1
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in model.parameters()
            if parameter.requires_grad and parameter.is_leaf
        ]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def note_unplanned_pass(self) -> None:
        """Called when the module runs without a plan: without gradients, or in evaluation mode."""
        if self._last_backward == -1:
            self._n_awaited = 1 if torch.is_grad_enabled() else 2

    def note_run_for_copy(self) -> None:
        """Called when the forward runs for a module with other parameters, without a plan."""
        self._has_run_for_copy = True

    def _on_gradient(self, _parameter: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if self._hooks and backward != self._last_backward:
            self._last_backward = backward
            self._n_awaited -= 1
            if not self._n_awaited:
                self.end()
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._report)  # at its end, all gradients have arrived

    def _report(self) -> None:
        model = self._model()
        if model is not None:
            self._tell(why_unplanned(model, has_run_for_copy=self._has_run_for_copy))


def why_unplanned(model: nn.Module, *, has_run_for_copy: bool = False) -> str:
    """A message: why a module whose parameters have gradients has no plan, and what to do.

    has_run_for_copy: whether its forward has run for a module with other parameters.
    """
    if has_run_for_copy:
        return (
            f"fit: gradients reached {type(model).__name__} through copies with computed "
            "parameters (the fast weights of higher and learn2learn), which run without a plan. "
            "The budget does not hold. A plan needs parameters that are leaves: in first-order "
            "meta-learning, copy.deepcopy(model) makes copies that are planned"
        )
    reached = [name for name, p in model.named_parameters() if p.grad is not None]
    path = _common_path([name.split(".")[:-1] for name in reached])
    part = model.get_submodule(".".join(path))
    name = type(model).__name__
    text = (
        f"fit: gradients reached {name}, and nothing is planned: its forward has not run in "
        "training mode. The budget does not hold. "
    )
    if not (model.training and part.training):
        title = ".".join(path) if model.training else name
        return text + (
            f"{title} is in evaluation mode, in which no plan runs: call train() on it before the "
            "training (from_pretrained of transformers returns models in evaluation mode)"
        )
    if path:
        return text + (
            f"The gradients are those of {'.'.join(path)}. If the training calls it directly, give "
            f"that part: fit({_expression('model', path)}, ...), "
            f"FitCallback(part=lambda module: {_expression('module', path)})"
        )
    names = dict.fromkeys(each.split(".")[0] for each in reached if "." in each)
    return text + (
        f"The gradients are those of {', '.join(names) or 'its own parameters'}. If the training "
        f"calls these, or methods of {name}, call them in the forward of a small module that "
        f"holds the {name}, and give fit that module; or give fit one of the parts"
    )


def _common_path(paths: Sequence[Sequence[str]]) -> Sequence[str]:
    """The path of the innermost module that contains all of these."""

    def common(one: Sequence[str], other: Sequence[str]) -> Sequence[str]:
        same = [a == b for a, b in zip(one, other, strict=False)]
        return one[: (*same, False).index(False)]

    return functools.reduce(common, paths) if paths else ()


def _expression(module: str, path: Sequence[str]) -> str:
    """The Python expression for the submodule at a path: "model.blocks[0]"."""
    for each in path:
        if each.isidentifier() and not keyword.iskeyword(each):
            module += f".{each}"
        else:
            module += f"[{each}]" if each.isdecimal() else f"[{each!r}]"
    return module
