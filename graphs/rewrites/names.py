"""The names of rewrites, and which of them are planned for the user's word. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

Variant = tuple[str, ...]
"""Names of rewrites, in the order of REWRITES; () is the plain step."""

N_CHUNKS = (2, 4, 8, 16, 32, 64)

HEAD_AND_LOSS = {f"head_and_loss_in_{n}_chunks": n for n in N_CHUNKS}
"""Name of a rewrite -> chunks of rows. They change last bits."""

CODES = ("bf16", "fp8", "int8")

SHARES = {"_16th": 1 / 16, "_4th": 1 / 4, "_half": 1 / 2, "": 1.0}
"""What follows the name of a rewrite in fewer bits -> the share of the bytes that wait packed."""

FEWER_BITS: dict[str, tuple[str, float]] = {
    "packed_masks": ("bits", 1.0),
    **{f"waiting_in_{code}{part}": (code, SHARES[part]) for code in CODES for part in SHARES},
}
"""Name of a rewrite -> code of `graphs.rewrites.codes`, and share of the bytes that may wait in it.
All but the first change results."""

CALLED_LOSSES = ("cross_entropy_in_chunks", "cross_entropy_backward_in_chunks")
"""Of those that change a program these, and `loss_in_place`, are of calls of `F.cross_entropy`: a
step of stock modules can have them."""

STOCK: tuple[Variant, ...] = tuple((name, "loss_in_place") for name in reversed(CALLED_LOSSES))
"""The variants that a step of stock modules can have, beside the plain one."""

PROGRAM_REWRITES = (
    *(*HEAD_AND_LOSS, "chunked_loss", "chunked_loss_backward"),
    *(*CALLED_LOSSES, *FEWER_BITS),
)
"""They change a Capture, before it becomes a layout; a variant has one in chunks at most, and one
or two in fewer bits."""

REWRITES: tuple[str, ...] = (*PROGRAM_REWRITES, "in_place", "loss_in_place")
"""The others change the layout. `graphs.rewrites.passes` has the function of each."""

WORDS = ("bitwise", "allclose", "none", "lossless", *CODES)
"""What a plan may do to the results: keep every bit; change last bits as well; "none": nothing is
rewritten; "lossless": keep every bit, and let masks wait in bits; a code: also round what waits for
the backward pass to it."""


def check_word(word: str) -> str:
    """The word itself; raises ValueError for any other than WORDS."""
    if word not in WORDS:
        raise ValueError(
            f"rewrites is {word!r}; expected 'bitwise' (results stay bitwise identical), "
            "'lossless' (also stores masks as bits), 'allclose' (last bits may change), 'bf16', "
            "'fp8', 'int8' (also round what is saved for backward) or 'none'"
        )
    return word


def results_of(rewrites: Iterable[str]) -> str:
    """What a step with these rewrites keeps of the plain one's results: "bitwise", "allclose", or
    "lossy": what waited for the backward pass has been rounded."""
    rewrites = tuple(rewrites)
    if any(FEWER_BITS.get(name, ("", 0))[0] in CODES for name in rewrites):
        return "lossy"
    return "allclose" if any(name in HEAD_AND_LOSS for name in rewrites) else "bitwise"


def variants_of(word: str, *, sharded: bool = False) -> tuple[Variant, ...]:
    """The variants to plan for a word of WORDS.

    sharded: the step of one rank of FSDP2, which stock modules run.
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
    """Whether one of them changes the program, rather than the layout alone."""
    return any(name in PROGRAM_REWRITES for name in rewrites)
