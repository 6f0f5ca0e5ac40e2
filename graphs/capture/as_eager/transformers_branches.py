"""Where a library runs other operators under a tracer than in eager mode, and what to do about it.

transformers asks whether a tensor is fake before it looks at its values: are several sequences
packed into one row, is the padding mask all ones. Under a tracer it does not look, builds the
T x T mask in any case and leaves the fused causal attention: another program, more memory, other
bits than eager mode. Where the values are known while tracing
(`graphs.capture.as_eager.known_values`), it may look.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from graphs.capture.as_eager.known_values import is_unknown


@contextlib.contextmanager
def eager_branches() -> Iterator[None]:
    """Let libraries that are loaded take the branches that they take in eager mode."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(library, "is_fake_tensor", None)
    if original is None:
        yield
        return
    library.is_fake_tensor = is_unknown
    try:
        yield
    finally:
        library.is_fake_tensor = original
