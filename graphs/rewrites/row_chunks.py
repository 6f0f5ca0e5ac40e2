"""A node that runs several row-wise operators, one chunk of rows after the other.

The operators' intermediate results exist for only one chunk at a time. Results are bitwise
identical if the operators compute each row independently of the other rows that they are called
with; `graphs.rewrites.probe` checks this on the device.
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
    """An output of the node.

    shape: of one row.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, repr=False)
class RowChunks(RowLoop):
    """The target of such a node, called like an operator.

    title: names of the operators that it runs, for the node's `op`.
    outs: its outputs; a single one is returned as a tensor, several as a tuple.
    overwritable: positions of inputs that its output may be written into, if it has only one.
    source: code of the body with its constants, so that nodes that differ in a temperature or an
        ignored target are not equal.
    body: (outputs of one chunk..., inputs of one chunk...) -> None; writes the outputs.
    has_exponentials: whether it computes exponentials. For bitwise identical results, these must
        not depend on where a chunk ends.
    """

    __name__ = "row_chunks"
    title: str
    outs: tuple[Out, ...]
    overwritable: tuple[int, ...]
    source: str
    body: Callable[..., None] = field(compare=False)
    has_exponentials: bool = False

    def __call__(self, *args: Any, out: torch.Tensor | None = None) -> Any:
        """Run all chunks.

        out: the tensor to write the output into, if there is only one (None: allocate it).
        """
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
