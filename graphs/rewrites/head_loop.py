"""A node that computes the head's matrix product, its cross-entropy and their gradients in chunks
of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphs.costs import RowLoop

aten = torch.ops.aten

EACH, MEAN, SUM = 0, 1, 2
"""Reductions of a loss, numbered as in `nll_loss`."""

Step = Callable[[torch.Tensor], torch.Tensor]

PRODUCTS_PER_SUM = 4
"""How many 16-bit products of the weight's gradient are summed in 16 bits before their sum is added
to the float32 one. Adding each product on its own would read and write the float32 sum each time:
with 16 chunks, that takes 11 % of the step of a Llama with 4 layers, instead of 3 %. The error of
four roundings in a growing sum is 1.2 times that of one, and the plain step has one, too."""


@dataclass(frozen=True, repr=False)
class HeadLoop(RowLoop):
    """The target of such a node: (rows, target, weight[, bias]) -> (loss, divisor, gradients...).

    rows is N x D, target N, weight D x V, bias V. The loss is a scalar. The gradients are those of
    the sum over all rows: they still have to be divided by `divisor` (1 element) and multiplied by
    the gradient of the loss. The weight's gradient is summed in float32 at least, the loss and the
    bias's gradient in float64.

    rows_per_product: rows of one chunk. `rows_per_chunk` is a multiple of it, after which partial
        sums are added to the totals.
    title: names of the operators that it replaces, for the node's `op`.
    reduction: MEAN or SUM.
    ignored: the target of rows that do not count.
    dtype: dtype of the loss.
    makes: the gradients to return, of "rows", "weight", "weight.t" (V x D) and "bias" (1 x V).
    before: casts and scalings between the product and log-softmax.
    after: those between the gradient of log-softmax's input and the gradient of the product.
    """

    __name__ = "head_loop"
    rows_per_product: int
    title: str
    reduction: int
    ignored: int
    dtype: torch.dtype
    makes: tuple[str, ...]
    before: tuple[Step, ...] = field(compare=False)
    after: tuple[Step, ...] = field(compare=False)

    def __call__(
        self, rows: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run all chunks."""
        sum_dtype = torch.promote_types(rows.dtype, torch.float32)
        n_rows = rows.shape[0]
        loss = rows.new_zeros((), dtype=torch.float64)
        d_rows = rows.new_empty(rows.shape if "rows" in self.makes else 0)
        sums = {
            name: _Sum(torch.float64 if name == "bias" else sum_dtype)
            for name in self.makes
            if name != "rows"
        }
        for start in range(0, n_rows, self.rows_per_product):
            end = min(start + self.rows_per_product, n_rows)
            chunk = rows[start:end]
            d_product = self._d_product(chunk, target[start:end], weight, bias, loss)
            if "rows" in self.makes:
                torch.mm(d_product, weight.t(), out=d_rows[start:end])
            if "weight" in sums:
                sums["weight"].add_product(chunk.t(), d_product)
            if "weight.t" in sums:
                sums["weight.t"].add_product(d_product.t(), chunk)
            if "bias" in sums:
                sums["bias"].add(d_product.sum(0, keepdim=True, dtype=sum_dtype))
            del d_product  # free it before the next one is computed
            if end == n_rows or end % self.rows_per_chunk == 0:
                for each in sums.values():
                    each.finish()
        divisor = rows.new_ones(1, dtype=sum_dtype)
        if self.reduction == MEAN:
            n_counted = (target != self.ignored).sum()
            loss = loss / n_counted
            # if no row counts, the gradients are 0, so any divisor will do
            divisor = n_counted.clamp(min=1).to(sum_dtype).view(1)
        gradients: Any = (d_rows if name == "rows" else sums[name].total for name in self.makes)
        return loss.to(self.dtype), divisor, *gradients

    def _d_product(
        self,
        rows: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        bias: tuple[torch.Tensor, ...],
        loss: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of a chunk's product for a gradient of 1 of the summed loss. Adds the
        chunk's part to `loss`."""
        log_probs = torch.addmm(bias[0], rows, weight) if bias else torch.mm(rows, weight)
        for step in self.before:
            log_probs = step(log_probs)
        aten._log_softmax.out(log_probs, 1, False, out=log_probs)
        losses, _ = aten.nll_loss_forward.default(log_probs, target, None, EACH, self.ignored)
        loss.add_(losses.sum(dtype=loss.dtype))
        # reduced as a sum, so that a mean can divide by the count of all chunks at the end
        one = log_probs.new_ones(())
        gradient: torch.Tensor = aten.nll_loss_backward.default(
            one, log_probs, target, None, SUM, self.ignored, one
        )
        aten._log_softmax_backward_data.out(gradient, log_probs, 1, gradient.dtype, out=gradient)
        del log_probs
        for step in self.after:
            gradient = step(gradient)
        return gradient

    def __repr__(self) -> str:
        return f"head_loop({self.title}; {self.rows_per_product} rows)"


class _Sum:
    """A sum in float32 at least. 16-bit products are first summed in a 16-bit partial sum."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.total: torch.Tensor | None = None
        self._partial: torch.Tensor | None = None

    def add(self, tensor: torch.Tensor) -> None:
        if self.total is None:
            self.total = tensor.to(self.dtype)
        else:
            self.total.add_(tensor)

    def add_product(self, one: torch.Tensor, other: torch.Tensor) -> None:
        into = self.total if one.dtype == self.dtype else self._partial
        if into is not None:
            into.addmm_(one, other)
        elif one.dtype == self.dtype:
            self.total = torch.mm(one, other)
        else:
            self._partial = torch.mm(one, other)

    def finish(self) -> None:
        """Add the partial sum to the total."""
        if self._partial is not None:
            self.add(self._partial)
            self._partial = None
