"""Hooks of submodules that need not be refused: a trace records all that they do.

- Hooks of `parallelize_module` distribute the inputs and outputs of a submodule.
- Hooks of torch.nn.utils.weight_norm and spectral_norm compute a tensor from parameters and buffers
  before each call and set a plain attribute ("weight") to it. A planned step does not set the
  attribute; only a call of the module reads it, and that call sets it first.
- Hooks of torch.ao.quantization (`prepare_qat`) call observers with the output of a submodule; the
  observers' operators write buffers in place.
- A model of transformers that returns `hidden_states` registers hooks on its layers in its first
  call, which pass tensors on within one forward pass, and marks itself as having done so. After a
  trace both the hooks and the mark are removed: with only the mark left, the model would collect
  nothing; with only the hooks left, everything twice.
- A forward hook that is a method of one of the model's modules (BYOL and DINO keep the output of a
  layer like that) is traced as forward is, and what it leaves in attributes is refused alike.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from graphs.capture.tensor_parallel import is_of_parallel_style

# Through importlib, since the name `torch.nn.utils.weight_norm` is that of a function too.
_COMPUTING_WEIGHTS = tuple(
    getattr(importlib.import_module(f"torch.nn.utils.{module}"), name)
    for module, name in (("weight_norm", "WeightNorm"), ("spectral_norm", "SpectralNorm"))
)
_OBSERVING = "torch.ao.quantization.quantize"
_CAPTURING = "transformers.utils.output_capturing"
_MARK = "_output_capturing_hooks_installed"


def is_traced(hook: Callable[..., Any]) -> bool:
    """Whether a trace records all that the hook does."""
    is_of_known_module = getattr(hook, "__module__", None) in (_CAPTURING, _OBSERVING)
    return is_of_known_module or is_of_parallel_style(hook) or isinstance(hook, _COMPUTING_WEIGHTS)


def is_own(hook: Callable[..., Any], model: nn.Module) -> bool:
    """Whether the hook is a method of one of the model's modules."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    return owner is not None and any(owner is module for module in model.modules())


def computed_weights(module: nn.Module) -> set[str]:
    """Names of the attributes that the module's hooks set to weights that they compute."""
    hooks: Iterable[Any] = module._forward_pre_hooks.values()
    return {hook.name for hook in hooks if isinstance(hook, _COMPUTING_WEIGHTS)}


@contextlib.contextmanager
def capturing_hooks_removed(model: nn.Module) -> Iterator[None]:
    """On exit, remove the hooks and marks that transformers has added inside."""
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
