"""Makes the transformers library take the branches of a training step while it is traced.

- The library reads values only of tensors that are not fake: are several sequences packed into one
  row, is the padding mask all ones. Under a tracer it skips these checks, always builds the T x T
  mask and does not use fused causal attention: another program, more memory, different bits. Here
  it may read values that are known while tracing (`graphs.capture.as_eager.known_values`).
- A causal model returns the cache of keys and values for generation by default
  (`config.use_cache`), even in training, where nobody reads it. The cache is an object that hides
  its tensors, and it would hold them to the end of the step. With gradient checkpointing, the
  library itself switches the cache off in training mode; so do plans. `use_cache=True` as an
  argument of the call is respected. The configs of encoders have the same default, but encoders
  fill no cache.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from torch import nn

from graphs.capture.as_eager.known_values import is_unknown
from graphs.model_calls import TraceError


@contextlib.contextmanager
def eager_branches() -> Iterator[None]:
    """While inside, let transformers (if imported) treat fake tensors with known values as real."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    with contextlib.ExitStack() as stack:
        if hasattr(library, "is_fake_tensor"):
            stack.enter_context(mock.patch.object(library, "is_fake_tensor", is_unknown))
        yield


def caching_configs(model: nn.Module) -> dict[str, Any]:
    """The transformers configs that make modules in training mode return a cache, each by the path
    of the outermost module that has it."""
    library: Any = sys.modules.get("transformers.configuration_utils")
    if library is None:
        return {}
    configs: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if module.training and isinstance(config, library.PreTrainedConfig):
            configs.setdefault(id(config), (path, config))
    return {path: config for path, config in configs.values() if getattr(config, "use_cache", None)}


@contextlib.contextmanager
def refuse_caches(configs: Iterable[Any]) -> Iterator[None]:
    """While inside (`no_cache` may be around), these configs ask for a cache; a model that makes
    one raises TraceError."""
    library: Any = sys.modules.get("transformers.cache_utils")

    def refuse(_cache: Any, *_args: Any, **_kwargs: Any) -> None:
        raise TraceError("the model fills a cache")

    with contextlib.ExitStack() as stack:
        if library is not None:
            stack.enter_context(mock.patch.object(library.Cache, "__init__", refuse))
        for config in configs:
            stack.enter_context(mock.patch.object(config, "use_cache", True))
        yield


@contextlib.contextmanager
def no_cache(model: nn.Module) -> Iterator[None]:
    """While inside, switch off the cache of transformers models in training mode."""
    with contextlib.ExitStack() as stack:
        for config in caching_configs(model).values():
            stack.enter_context(mock.patch.object(config, "use_cache", False))
        yield
