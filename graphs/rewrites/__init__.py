"""Rewrites: changes to the program of a traced step, so that it gives the same results with less
memory.

A *rewrite* is a pass over the traced program, or over the `Layout` that extraction makes of it.
REWRITES lists them in the order in which they are applied. A *variant* is the tuple of the rewrites
that a graph was made with, in that order; () is the plain step. `GraphMeta.rewrites` and schedule
files record it, and `apply` applies the same rewrites to its own trace, which must give the same
graph. So whether and how a rewrite changes a step may depend only on operators and shapes, never on
costs, the budget or the device's memory.

The user chooses a *word* (WORDS), which says how far results may change. `variants_of(word)` gives
the variants to plan for it. Each is planned and the best plan is taken; the proven bound is the
least of their bounds. Times and peaks "without a plan" are those of the plain step.

To add a rewrite, put its name into REWRITES, its function into `graphs.rewrites.passes`, and the
variants that use it into `variants_of`. If it changes the traced program's operators, before
extraction, its name belongs into PROGRAM_REWRITES as well.
"""

from graphs.rewrites.chunk_sizes import ALIGNED_ROWS, chunk_starts, is_worthwhile, rows_per_chunk
from graphs.rewrites.names import (
    FEWER_BITS,
    HEAD_AND_LOSS,
    PROGRAM_REWRITES,
    REWRITES,
    STOCK,
    WORDS,
    Variant,
    check_word,
    is_stock,
    results_of,
    rewrites_program,
    variants_of,
)
from graphs.rewrites.registry import (
    StockVariants,
    Variants,
    allowed_variants,
    keeps_bits_here,
    losses_in_chunks,
    program_with,
    rewritten,
    with_writes_in_place,
)
