"""How rows are divided into chunks: by shapes alone. Imports no torch."""

from __future__ import annotations

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
