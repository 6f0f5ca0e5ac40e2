"""Rewrites: other programs of the traced step, with the same results in less memory.

A *rewrite* is a pass over the traced program, or over the `Layout` that extraction made; REWRITES
lists them in the order in which they are applied. A *variant* is the tuple of the rewrites that a
graph was made with, in that order: () is the plain step. `GraphMeta.rewrites` says it, a schedule
file repeats it, and `apply` traces with it, so that the graph is the same again. So whether and how
a rewrite changes a step may depend on its operators and shapes alone, never on costs, the budget or
the device's memory.

What the user says is a *word* (WORDS): which results may change. `variants_of(word)` are the
variants to plan for it. Each is planned, the best plan is taken, and the least of their bounds is
the bound; times and peaks "without a plan" are those of the plain step.

To add a rewrite: its name in REWRITES, its function in `graphs.rewrites.passes`, and the variants
with it in `variants_of`. One that puts other operators into the traced program changes it before
extraction: its name is in PROGRAM_REWRITES as well.
"""

from graphs.rewrites.chunk_sizes import ALIGNED_ROWS, chunk_starts, is_worthwhile, rows_per_chunk
from graphs.rewrites.names import (
    CALLED_LOSSES,
    CODES,
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
    keeps_bits_here,
    losses_in_chunks,
    offered,
    program_with,
    rewritten,
)
