"""Hooks of submodules that need not be refused: all that they do is in a trace.

- `parallelize_module` distributes what goes into a submodule, and what comes out.
- torch.nn.utils.weight_norm and spectral_norm set a plain attribute ("weight") before each call to
  a tensor that is computed from parameters and buffers. A planned step leaves the attribute as it
  is; what reads it calls the module, which sets it anew.
- torch.ao.quantization's observers (`prepare_qat`) are called with what a submodule returns; their
  operators write buffers in place.
- A model of transformers that returns `hidden_states` registers hooks on its layers in its first
  call, which pass tensors on within one forward pass, and marks itself as having done so. After a
  trace both the hooks and the mark are removed: one without the other would collect nothing, or
  everything twice.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from graphs.capture.tensor_parallel import is_of_parallel_style

# `torch.nn.utils.weight_norm` is the function
_COMPUTING_WEIGHTS = tuple(
    getattr(importlib.import_module(f"torch.nn.utils.{module}"), name)
    for module, name in (("weight_norm", "WeightNorm"), ("spectral_norm", "SpectralNorm"))
)
_OBSERVING = "torch.ao.quantization.quantize"
_CAPTURING = "transformers.utils.output_capturing"
_MARK = "_output_capturing_hooks_installed"


def is_traced(hook: Callable[..., Any]) -> bool:
    """Whether all that the hook does is in the trace."""
    by_module = getattr(hook, "__module__", None) in (_CAPTURING, _OBSERVING)
    return by_module or is_of_parallel_style(hook) or isinstance(hook, _COMPUTING_WEIGHTS)


def computed_weights(module: nn.Module) -> set[str]:
    """The attributes that hooks of the module set to weights that they compute."""
    hooks: Iterable[Any] = module._forward_pre_hooks.values()
    return {hook.name for hook in hooks if isinstance(hook, _COMPUTING_WEIGHTS)}


@contextlib.contextmanager
def capturing_hooks_as_before(model: nn.Module) -> Iterator[None]:
    """Remove the hooks and marks of transformers that were added inside."""
    before = {module: set(module._forward_hooks) for module in model.modules()}
    marked = {module for module in before if _MARK in vars(module)}
    try:
        yield
    finally:
        for module, known in before.items():
            for key, hook in list(module._forward_hooks.items()):
                if key not in known and getattr(hook, "__module__", None) == _CAPTURING:
                    del module._forward_hooks[key]
            if module not in marked:
                vars(module).pop(_MARK, None)
