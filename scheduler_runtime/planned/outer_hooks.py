"""Hooks of saved tensors that are active around the call of a planned module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def refuse_saved_tensors_hooks() -> None:
    """Raise RuntimeError under the user's saved-tensor hooks, which a program does not call.

    PyTorch's own hooks (checkpoints, `save_on_cpu`) do not change values, so they may be skipped.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch."):
        raise RuntimeError(
            "a planned module is called inside of torch.autograd.graph.saved_tensors_hooks, whose "
            "hooks it would not call: the plan decides what is saved for backward. Call it outside "
            "of that block, or use the plain model (checkpoint_solver.remove(model))"
        )


@contextlib.contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """PyTorch's own hooks of saved tensors are set aside: a checkpoint around the planned module
    would count what planning saves, and miss it when it runs again."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        hooks.append(top)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
