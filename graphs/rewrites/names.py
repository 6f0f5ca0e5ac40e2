"""The names of rewrites, and which variants are planned for the user's word. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

Variant = tuple[str, ...]
"""Names of rewrites, in the order of REWRITES; () is the plain step."""

N_CHUNKS = (2, 4, 8, 16, 32, 64)

HEAD_AND_LOSS = {f"head_and_loss_in_{n}_chunks": n for n in N_CHUNKS}
"""Name of a rewrite -> its number of chunks of rows. These rewrites change last bits."""

CODES = ("bf16", "fp8", "int8")

SHARES = {"_16th": 1 / 16, "_4th": 1 / 4, "_half": 1 / 2, "": 1.0}
"""Suffix of the name of a rewrite in fewer bits -> the share of the bytes that it packs."""

FEWER_BITS: dict[str, tuple[str, float]] = {
    "packed_masks": ("bits", 1.0),
    **{f"waiting_in_{code}{part}": (code, SHARES[part]) for code in CODES for part in SHARES},
}
"""Name of a rewrite in fewer bits -> code of `graphs.rewrites.codes`, and the share of the bytes
that can be packed which it packs. All but the first change results."""

CALLED_LOSSES = ("cross_entropy_in_chunks", "cross_entropy_backward_in_chunks")
"""The rewrites of the program that only change calls of `F.cross_entropy`, so that a step of stock
modules can have them (and `loss_in_place`, which changes the layout)."""

STOCK: tuple[Variant, ...] = tuple((name, "loss_in_place") for name in reversed(CALLED_LOSSES))
"""The variants that a step of stock modules can have, besides the plain one."""

PROGRAM_REWRITES = (
    *(*HEAD_AND_LOSS, "chunked_loss", "chunked_loss_backward"),
    *(*CALLED_LOSSES, *FEWER_BITS),
)
"""The rewrites that change a Capture, before it becomes a layout. A variant has at most one in
chunks, and at most two in fewer bits."""

REWRITES: tuple[str, ...] = (*PROGRAM_REWRITES, "in_place", "loss_in_place")
"""All rewrites; the last two change the layout. `graphs.rewrites.passes` has their functions."""

WORDS = ("bitwise", "allclose", "none", "lossless", *CODES)
"""How far a plan may change results. "bitwise": not at all; "allclose": last bits may change;
"none": nothing is rewritten; "lossless": bitwise, and masks are saved for backward as bits; a code:
what is saved for backward may also be rounded to this code."""


def check_word(word: str) -> str:
    """Return the word; raise ValueError if it is not one of WORDS."""
    if word not in WORDS:
        raise ValueError(
            f"rewrites is {word!r}; expected 'bitwise' (results stay bitwise identical), "
            "'lossless' (also stores masks as bits), 'allclose' (last bits may change), 'bf16', "
            "'fp8', 'int8' (also round what is saved for backward) or 'none'"
        )
    return word


def results_of(rewrites: Iterable[str]) -> str:
    """How close a step with these rewrites comes to the plain step's results: "bitwise", "allclose"
    or "lossy" (what is saved for backward is rounded)."""
    rewrites = tuple(rewrites)
    if any(FEWER_BITS.get(name, ("", 0))[0] in CODES for name in rewrites):
        return "lossy"
    return "allclose" if any(name in HEAD_AND_LOSS for name in rewrites) else "bitwise"


def variants_of(word: str, *, sharded: bool = False) -> tuple[Variant, ...]:
    """The variants to plan for a word of WORDS.

    sharded: whether this is the step of one rank of FSDP2, which only stock modules run.
    """
    if check_word(word) == "none":
        return ((),)
    if sharded:
        return ((), *STOCK)
    in_place = ("in_place",)
    chunked = ["chunked_loss_backward", "chunked_loss"]
    if word == "allclose":
        chunked += HEAD_AND_LOSS
    variants = ((), in_place, *((name, *in_place) for name in chunked))
    if word in ("lossless", *CODES):
        packed: list[Variant] = [("packed_masks",)]
        if word in CODES:
            packed += (("packed_masks", f"waiting_in_{word}{part}") for part in SHARES)
        chunks = ((), *((name,) for name in chunked))
        variants += tuple((*first, *last, *in_place) for last in packed for first in chunks)
    return variants


def is_stock(rewrites: Iterable[str]) -> bool:
    """Whether a step of stock modules can have these rewrites; the plain step can."""
    return all(name in (*CALLED_LOSSES, "loss_in_place") for name in rewrites)


def rewrites_program(rewrites: Iterable[str]) -> bool:
    """Whether any of these rewrites changes the program, and not just the layout."""
    return any(name in PROGRAM_REWRITES for name in rewrites)
