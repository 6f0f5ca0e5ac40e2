"""Whole training set-ups: which can be predicted, and the rest with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.published.errors import NotPredictedError

_REASONS = {
    r"float8|mxfp8|nvfp4": "8-bit and 4-bit products run in kernels that are not traced",
    r"8-bit": "the optimizer's state is 8-bit, of another library",
    r"offload": "activations are moved to the host",
    r"compil|chunked ce|optimizer in backward": "torch.compile: Inductor's buffers are its own",
    r"unpacked": "lengths of the batches are those of the data set and not given",
    r"model in the pr": "the model is not described",
}


def model_peak(row: Mapping[str, Any]) -> tuple[float, float]:
    """Predicted and measured peak. Raises NotPredictedError."""
    text = " ".join(str(row.get(key, "")) for key in ("technique", "model")).lower()
    for pattern, reason in _REASONS.items():
        if re.search(pattern, text):
            raise NotPredictedError(reason)
    raise NotPredictedError("this set-up is not described here")
