"""Makes transformers take the branches of eager mode while it is traced.

transformers checks whether a tensor is fake before it reads values: are several sequences packed
into one row, is the padding mask all ones. Under a tracer it skips the check, always builds the
T x T mask and does not use fused causal attention: another program, more memory, different bits.
Where the values are known while tracing (`graphs.capture.as_eager.known_values`), it may read them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from graphs.capture.as_eager.known_values import is_unknown


@contextlib.contextmanager
def eager_branches() -> Iterator[None]:
    """Let libraries that are loaded take their branches of eager mode, while inside."""
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
