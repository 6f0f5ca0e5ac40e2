"""How rows are divided into chunks, which depends only on shapes. Imports no torch."""

from __future__ import annotations

ALIGNED_ROWS = 64
"""Chunks have a multiple of this many rows, so that memory alignment and the remainders of vector
loops are as in the whole tensor."""

LEAST_LAST_ROWS = 16
"""The fewest rows of the last chunk. Kernels that reduce only a few rows divide each among threads
(PyTorch does so for a single row on the CPU, for fewer than 16 on CUDA), and then sum in another
order."""

LEAST_ELEMENTS = 2**20
"""The fewest elements of a chunk; a smaller one would take longer to launch than to compute."""

LEAST_CHUNKS, MOST_CHUNKS = 4, 64

LEAST_ROWS = 512
"""The fewest rows of a chunk that is multiplied by a matrix; with fewer, reading the matrix for
each chunk takes longer than the product."""


def is_worthwhile(n_rows: int, width: int) -> bool:
    """Whether there would be at least LEAST_CHUNKS chunks; fewer save little memory. Rows of a
    single element are never worthwhile."""
    return width > 1 and n_rows >= LEAST_CHUNKS * rows_per_chunk(n_rows, width)


def rows_per_chunk(n_rows: int, width: int) -> int:
    """Rows of each chunk but the last; depends only on the shape, never on costs."""
    least = max(LEAST_ELEMENTS / width, n_rows / MOST_CHUNKS)
    return ALIGNED_ROWS * max(1, -int(-least // ALIGNED_ROWS))


def rows_for_n_chunks(n_chunks: int, n_rows: int) -> int | None:
    """Rows of each chunk but the last if there are `n_chunks`; None if those are too few rows, or
    `n_chunks` cannot be reached."""
    n = ALIGNED_ROWS * -(-n_rows // (n_chunks * ALIGNED_ROWS))
    return n if n >= LEAST_ROWS and -(-n_rows // n) == n_chunks else None


def chunk_starts(n_rows: int, chunk_rows: int) -> list[int]:
    """The first row of each chunk. If the last chunk would be too short, it starts earlier, at a
    multiple of LEAST_LAST_ROWS."""
    latest = (n_rows - LEAST_LAST_ROWS) // LEAST_LAST_ROWS * LEAST_LAST_ROWS
    return [min(start, max(0, latest)) for start in range(0, n_rows, chunk_rows)]
