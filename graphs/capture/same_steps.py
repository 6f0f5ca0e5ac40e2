"""Checks whether the call that fills attributes computes the same as later calls.

Code such as `if self.mask is None: self.mask = ...` may also take another branch in the first call.
So the operators of a first and a second call on the batch, parameters and buffers are recorded and
compared. This includes the backward pass, since an attribute may affect gradients alone (a
`torch.no_grad` block, a number that a custom `autograd.Function` keeps for its backward pass).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture.as_eager import Leaf, Recipe, evaluate
from graphs.capture.same_program import gradients
from graphs.capture.shell import Shell
from graphs.model_calls import storage_key

Step = tuple[Any, pytree.TreeSpec, tuple[Any, ...]]


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of a call on fake tensors, except those that compute from
    constants and buffers alone.

    steps: (operator, structure, flat arguments) for each of them. The first flat argument is
        whether gradients are enabled. A tensor is described by the step that returned it, by its
        position among the shell's own tensors, or by its recipe if it is known. The last step
        describes the gradients.
    """

    def __init__(self, shell: Shell) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shell = shell
        given_tensors = (*shell.parameters(), *shell.buffers(), *shell.batch)
        # id -> (tensor, name); the tensor is kept alive, so that its id is not used again.
        self._named_tensors: dict[int, tuple[Any, Any]] = {}
        # In the backward pass a saved tensor is another object on the same storage.
        self._storages: dict[int, Any] = {}
        for index, tensor in enumerate(given_tensors):
            self._remember(tensor, ("own", index))
        self.steps: list[Step] = []

    def run(self) -> None:
        """Call the module and compute the gradients of all its outputs.

        To be called under the shell's fake tensor mode.
        """
        leaves = [t for t in (*self.shell.parameters(), *self.shell.batch) if t.requires_grad]
        with self, torch.enable_grad():
            output = self.shell.call(self.shell.batch)
            tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
            found, spec = pytree.tree_flatten(gradients(tensors, leaves))
            self.steps.append(("gradients", spec, tuple(map(self._describe, found))))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        flat, spec = pytree.tree_flatten((torch.is_grad_enabled(), args, kwargs or {}))
        arguments = tuple(map(self._describe, flat))
        result = func(*args, **(kwargs or {}))
        tensors = [item for item in pytree.tree_leaves(result) if isinstance(item, torch.Tensor)]
        if func._schema.is_mutable or not all(self._known_recipe(item) for item in tensors):
            for index, item in enumerate(tensors):
                self._remember(item, (len(self.steps), index))
            self.steps.append((func, spec, arguments))
        return result

    def _remember(self, tensor: torch.Tensor, name: Any) -> None:
        self._named_tensors[id(tensor)] = tensor, name
        self._storages.setdefault(storage_key(tensor), name)

    def _known_recipe(self, tensor: torch.Tensor) -> Recipe | None:
        value = self.shell.mode.value_of(tensor)
        if not isinstance(value, Recipe) or any(leaf.kind != "buffer" for leaf in value.leaves):
            return None
        return value

    def _describe(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        known = self._named_tensors.get(id(item))
        if known is not None:
            return known[1]
        known_value = self._known_recipe(item)
        return known_value or self._storages.get(storage_key(item))


def are_same_steps(one: StepRecorder, other: StepRecorder) -> bool:
    """Whether both calls compute the same from their parameters, buffers and batch."""
    leaves = one.shell.mode.leaves
    return len(one.steps) == len(other.steps) and all(
        a[:2] == b[:2] and all(_are_equal(*pair, leaves) for pair in zip(a[2], b[2], strict=True))
        for a, b in zip(one.steps, other.steps, strict=True)
    )


def _are_equal(one: Any, other: Any, leaves: Mapping[Leaf, torch.Tensor]) -> bool:
    if isinstance(one, Recipe) and isinstance(other, Recipe):
        a, b = (evaluate(each, leaves) for each in (one, other))
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(*(t.detach().cpu().reshape(-1).view(torch.uint8) for t in (a, b)))
    return type(one) is type(other) and bool(one == other or one != one)
