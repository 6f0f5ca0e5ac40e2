"""Makes transformers take the branches of a training step while it is traced.

- It checks whether a tensor is fake before it reads values: are several sequences packed into one
  row, is the padding mask all ones. Under a tracer it skips the check, always builds the T x T mask
  and does not use fused causal attention: another program, more memory, different bits. Where the
  values are known while tracing (`graphs.capture.as_eager.known_values`), it may read them.
- A causal model returns the cache of keys and values for generation by default
  (`config.use_cache`), also in training, where nobody reads it. It is an object that hides its
  tensors, and it would hold them to the end of the step. For its own gradient checkpointing
  transformers switches the cache off in training mode; so do plans. `use_cache=True` as an argument
  of the call is left as it is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn

from graphs.capture.as_eager.known_values import is_unknown


@contextlib.contextmanager
def eager_branches() -> Iterator[None]:
    """Let libraries that are loaded take their branches of eager mode, while inside."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    with contextlib.ExitStack() as stack:
        if hasattr(library, "is_fake_tensor"):
            stack.enter_context(mock.patch.object(library, "is_fake_tensor", is_unknown))
        yield


def caching_configs(model: nn.Module) -> list[Any]:
    """The configurations by which modules in training mode would return a cache."""
    library: Any = sys.modules.get("transformers.configuration_utils")
    if library is None:
        return []
    configs = {
        id(module.config): module.config
        for module in model.modules()
        if module.training and isinstance(getattr(module, "config", None), library.PreTrainedConfig)
    }
    return [config for config in configs.values() if getattr(config, "use_cache", None)]


@contextlib.contextmanager
def no_cache(model: nn.Module) -> Iterator[None]:
    """Switch the cache off while inside."""
    with contextlib.ExitStack() as stack:
        for config in caching_configs(model):
            stack.enter_context(mock.patch.object(config, "use_cache", False))
        yield
