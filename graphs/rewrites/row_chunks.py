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
from graphs.rewrites.chunk_sizes import chunk_starts


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

    __name__ = "row_chunks"
    title: str
    outs: tuple[Out, ...]
    overwritable: tuple[int, ...]
    source: str
    body: Callable[..., None] = field(compare=False)
    has_exponentials: bool = False

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

    def __repr__(self) -> str:
        return f"row_chunks({self.title}; {self.rows_per_chunk} rows)"
