"""The function of each rewrite, by its name, in the order in which they are applied."""

from __future__ import annotations

import functools
from collections.abc import Callable

from graphs.capture import Capture, Layout
from graphs.rewrites import (
    called_losses,
    chunked_loss,
    fewer_bits,
    head_and_loss,
    in_place,
)
from graphs.rewrites.names import FEWER_BITS, HEAD_AND_LOSS

PROGRAM_PASSES: dict[str, Callable[[Capture], bool]] = {
    **{
        name: functools.partial(head_and_loss.rewrite, n_chunks=n)
        for name, n in HEAD_AND_LOSS.items()
    },
    "chunked_loss": chunked_loss.rewrite,
    "chunked_loss_backward": chunked_loss.rewrite_backward,
    "cross_entropy_in_chunks": called_losses.rewrite,
    "cross_entropy_backward_in_chunks": called_losses.rewrite_backward,
    **{
        name: functools.partial(fewer_bits.rewrite, code=code, share=share)
        for name, (code, share) in FEWER_BITS.items()
    },
}
"""Rewrites that change a captured program in place, and return whether anything changed."""

LAYOUT_PASSES: dict[str, Callable[[Layout], Layout]] = {
    "in_place": in_place.rewrite,
    "loss_in_place": called_losses.rewrite_layout,
}
"""Rewrites that return a new layout and leave the given one unchanged."""
