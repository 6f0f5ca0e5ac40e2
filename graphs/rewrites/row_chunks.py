"""One node that runs several row-wise operators, for one chunk of rows after the other.

What lies between the operators exists for one chunk at a time. A row-wise operator gives a row the
same bits whatever other rows it is given with it; `graphs.rewrites.probe` tries that on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from graphs.costs import RowLoop

ALIGNED_ROWS = 64
"""Chunks have a multiple of so many rows: alignment and vector tails are those of the whole."""

LEAST_LAST_ROWS = 16
"""Of the last chunk: kernels that reduce a few rows share each of them among threads (PyTorch on
the CPU a single row, on CUDA fewer than 16), and add up in another order then."""

LEAST_ELEMENTS = 2**20
"""Of a chunk of wide rows: a smaller one would take longer to launch than to compute."""

LEAST_CHUNKS, MOST_CHUNKS = 4, 64

LEAST_ROWS = 512
"""Of a chunk that is multiplied by a matrix: with fewer, reading the matrix for each chunk takes
longer than the product."""


def is_worthwhile(n_rows: int, width: int) -> bool:
    """Whether there would be LEAST_CHUNKS; fewer save little. Rows of one number are no rows."""
    return width > 1 and n_rows >= LEAST_CHUNKS * rows_per_chunk(n_rows, width)


def rows_per_chunk(n_rows: int, width: int) -> int:
    """Rows of each chunk but the last. It depends on the shape alone, never on a cost."""
    least = max(LEAST_ELEMENTS / width, n_rows / MOST_CHUNKS)
    return ALIGNED_ROWS * max(1, -int(-least // ALIGNED_ROWS))


def rows_in(n_chunks: int, n_rows: int) -> int | None:
    """Rows of each of so many chunks but the last; None where those are too few."""
    n = ALIGNED_ROWS * -(-n_rows // (n_chunks * ALIGNED_ROWS))
    return n if n >= LEAST_ROWS and -(-n_rows // n) == n_chunks else None


def chunk_starts(n_rows: int, chunk_rows: int) -> list[int]:
    """The first row of each chunk. A last one that would be too short begins earlier, aligned."""
    latest = (n_rows - LEAST_LAST_ROWS) // LEAST_LAST_ROWS * LEAST_LAST_ROWS
    return [min(start, max(0, latest)) for start in range(0, n_rows, chunk_rows)]


@dataclass(frozen=True)
class Out:
    """An output of the node: a row of this shape and dtype for each row."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, repr=False)
class RowChunks(RowLoop):
    """The target of such a node: called like an operator; dimension 0 of `row_inputs` is the rows.

    title: the operators in it, for the node's `op`.
    outs: a single one is returned as a tensor, several as a tuple.
    overwritable: positions of inputs that a single output may be written into.
    has_exponentials: whether there are some in it, which must not depend on where a chunk ends.
    body: (outputs of one chunk..., its inputs...) -> None; writes the outputs.
    source: what the body computes, constants included: nodes that differ in a temperature or an
        ignored target are different.
    """

    title: str
    outs: tuple[Out, ...]
    overwritable: tuple[int, ...]
    source: str
    body: Callable[..., None] = field(compare=False)
    has_exponentials: bool = False

    def __post_init__(self) -> None:
        # fx's generated code calls it by this name
        object.__setattr__(self, "__name__", "row_chunks")

    def __call__(self, *args: Any, out: torch.Tensor | None = None) -> Any:
        """Run all chunks. out: what a single output is written into (None: new memory)."""
        first = args[self.row_inputs[0]]
        n_rows = first.shape[0]
        outs = (
            [out]
            if out is not None
            else [first.new_empty((n_rows, *each.shape), dtype=each.dtype) for each in self.outs]
        )
        for start, end in pairwise([*chunk_starts(n_rows, self.rows_per_chunk), n_rows]):
            n = end - start
            rows = (
                arg.narrow(0, start, n) if at in self.row_inputs else arg
                for at, arg in enumerate(args)
            )
            self.body(*(each.narrow(0, start, n) for each in outs), *rows)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def __str__(self) -> str:
        return f"row_chunks({self.title}; {self.rows_per_chunk} rows)"

    __repr__ = __str__
