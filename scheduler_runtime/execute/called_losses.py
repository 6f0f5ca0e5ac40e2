"""Run calls of `F.cross_entropy` in row chunks, while the model's own code runs the rest.

PyTorch's function holds up to three tensors of the logits' size at once: log-softmax, its gradient
and the gradient of the logits. The function here runs the same operators, but the gradient of
log-softmax exists for one chunk of rows at a time. The gradient of the logits is written over
log-softmax, or into new memory. Memory that other code can hold is not written, so the function may
replace any call. It allocates what the traced variant says (`graphs.rewrites.called_losses`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphs.capture import CalledLoss, LossCalls
from graphs.rewrites import ALIGNED_ROWS, chunk_starts, is_worthwhile, rows_per_chunk
from scheduler_runtime.execute.torch_checkpoint import ExportedForward

aten: Any = torch.ops.aten

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_IGNORED = -100
"""Target of ignored rows in a column of log-probabilities, whose only class is 0."""


@dataclass(frozen=True)
class ChunkedCall:
    """A call of `F.cross_entropy` to run in row chunks; `GraphMeta.called_losses` describes the
    fields."""

    call: int
    keeps: bool
    n_classes: int
    dtype: str
    computed_in: str
    module: str = ""

    def may_replace(self, loss: CalledLoss) -> bool:
        """Whether this loss is of the planned kind, with any number of rows, and may be replaced.

        What is saved for backward is overwritten, so only one backward pass may read it: there must
        be no saved-tensor hooks (a checkpoint, `save_on_cpu`) and no transform of `torch.func`."""
        logits = loss.logits
        return (
            type(logits) is torch.Tensor
            and torch.is_grad_enabled()
            and logits.requires_grad
            and logits.is_contiguous()
            and logits.dtype == getattr(torch, self.dtype)
            and logits.shape[1] == self.n_classes
            and is_worthwhile(*logits.shape)
            and loss.target.shape == logits.shape[:1]
            and loss.reduction in _REDUCTIONS
            and torch._C._functorch.peek_interpreter_stack() is None
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            # the dtype that the loss is computed in: float32 under autocast
            and F.cross_entropy(logits.detach()[:1, :1], loss.target[:1] * 0).dtype
            == getattr(torch, self.computed_in)
        )


class ForwardWithChunkedLoss(ExportedForward):
    """Runs the model's own forward, with these calls of `F.cross_entropy` in row chunks.

    calls: as in `GraphMeta.called_losses`.
    """

    def __init__(self, module: nn.Module, calls: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(module)
        self.calls = {each.call: each for each in (ChunkedCall(**call) for call in calls)}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        # under torch.compile, Inductor fuses the loss by itself
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.own_forward(*args, **kwargs)
        device = next(self._model.parameters()).device
        for each in self.calls.values():  # here, before the step holds memory
            check_bits(each, device, torch.get_num_threads())
        with LossCalls(self._loss):
            return self.own_forward(*args, **kwargs)

    def described(self) -> list[dict[str, Any]]:
        """The calls in row chunks, as JSON objects."""
        return [asdict(each) for each in self.calls.values()]

    def _loss(
        self, number: int, loss: CalledLoss, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        call = self.calls.get(number)
        if call is None or not call.may_replace(loss):
            return compute()
        check_bits(call, loss.logits.device, torch.get_num_threads())
        return in_chunks(loss, call, chunk_rows=rows_per_chunk(*loss.logits.shape))


def in_chunks(loss: CalledLoss, call: ChunkedCall, *, chunk_rows: int) -> torch.Tensor:
    """The loss in row chunks, bitwise identical to `F.cross_entropy`; differentiable once."""
    options = _LossOptions(
        _REDUCTIONS[loss.reduction],
        loss.ignore_index,
        call.keeps,
        loss.logits.dtype,
        getattr(torch, call.computed_in),
        chunk_rows,
    )
    value: torch.Tensor = _InChunks.apply(loss.logits, loss.target, options)
    return value


@dataclass(frozen=True)
class _LossOptions:
    """How to compute a loss. reduction: PyTorch's number for it. Else as in `ChunkedCall`."""

    reduction: int
    ignored: int
    saves_log_softmax: bool
    dtype: torch.dtype
    computed_in: torch.dtype
    chunk_rows: int

    def chunks(self, n_rows: int) -> Iterator[slice]:
        for start, end in pairwise([*chunk_starts(n_rows, self.chunk_rows), n_rows]):
            yield slice(start, end)

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-softmax of all rows; logits are cast one chunk at a time."""
        if self.dtype == self.computed_in:
            return _log_softmax(logits)
        log_p = torch.empty_like(logits, dtype=self.computed_in)
        for rows in self.chunks(len(logits)):
            aten._log_softmax.out(logits[rows].to(self.computed_in), 1, False, out=log_p[rows])
        return log_p

    def log_softmax_of_chunk(self, logits: torch.Tensor) -> torch.Tensor:
        if self.dtype == self.computed_in:
            return _log_softmax(logits)
        log_p = logits.to(self.computed_in)
        aten._log_softmax.out(log_p, 1, False, out=log_p)
        return log_p


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    log_p: torch.Tensor = aten._log_softmax.default(logits, 1, False)
    return log_p


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: _LossOptions
    ) -> torch.Tensor:
        ctx.options = options
        if options.saves_log_softmax:
            saved = options.log_softmax(logits)
            given = saved, target, None, options.reduction, options.ignored
        else:
            saved = logits
            given = *_target_log_probs(logits, target, options), None, options.reduction, _IGNORED
        loss: torch.Tensor
        loss, n_counted = aten.nll_loss_forward(*given)
        ctx.save_for_backward(saved, target, n_counted)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # once_differentiable raises no error if the gradient is a constant
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was given, and an exported plan computes F.cross_entropy in row "
                "chunks, whose gradient cannot be differentiated; remove() the export, solve again "
                'with rewrites="none" and export that'
            )
        options: _LossOptions = ctx.options
        saved, target, n_counted = ctx.saved_tensors
        saved = saved.detach()
        # log-softmax can be overwritten: no other code holds it
        overwrites_saved = options.saves_log_softmax and saved.dtype == options.dtype
        logits_gradient = (
            saved if overwrites_saved else torch.empty_like(saved, dtype=options.dtype)
        )
        for rows in options.chunks(len(saved)):
            loss_gradient = gradient if options.reduction else gradient[rows]
            _write_gradient(
                saved[rows],
                (loss_gradient, target[rows], n_counted),
                logits_gradient[rows],
                options,
            )
        return logits_gradient, None, None


def _write_gradient(
    saved: torch.Tensor,
    loss: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    logits_gradient: torch.Tensor,
    options: _LossOptions,
) -> None:
    """Compute the gradient of a chunk of logits into `logits_gradient`.

    All other memory is freed on return.

    saved: the chunk's rows of log-softmax or of the logits.
    loss: the gradient of the loss, the targets, and how many of them count.
    """
    gradient, target, n_counted = loss
    log_p = saved if options.saves_log_softmax else options.log_softmax_of_chunk(saved)
    log_p_gradient = aten.nll_loss_backward(
        gradient, log_p, target, None, options.reduction, options.ignored, n_counted
    )
    is_cast = options.dtype != options.computed_in
    out = log_p_gradient if is_cast else logits_gradient
    aten._log_softmax_backward_data.out(log_p_gradient, log_p, 1, options.computed_in, out=out)
    if is_cast:
        logits_gradient.copy_(out)


def _target_log_probs(
    logits: torch.Tensor, target: torch.Tensor, options: _LossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """A column with the log-probability of each row's target, and the targets in that column:
    class 0, or _IGNORED for rows that do not count."""
    is_ignored = target == options.ignored
    index = target.masked_fill(is_ignored, 0).unsqueeze(1)
    log_probs = logits.new_empty(len(logits), 1, dtype=options.computed_in)
    for rows in options.chunks(len(logits)):
        aten.gather.out(
            options.log_softmax_of_chunk(logits[rows]), 1, index[rows], out=log_probs[rows]
        )
    return log_probs, torch.where(is_ignored, _IGNORED, 0)


N_ROWS = 3 * ALIGNED_ROWS + 1
"""Rows that `check_bits` compares: the last chunk has a single row."""


@functools.cache
def check_bits(call: ChunkedCall, device: torch.device, n_threads: int) -> None:
    """Compare loss and gradient of a few rows with PyTorch's function, once for each device.

    n_threads: number of CPU threads, which the bits may depend on, too.

    Raises RuntimeError if they are not bitwise identical.
    """
    if device.type == "meta":
        return
    generator = torch.Generator(device).manual_seed(0)
    dtype, computed_in = getattr(torch, call.dtype), getattr(torch, call.computed_in)
    shape = (N_ROWS, call.n_classes)
    numbers = torch.empty(shape, device=device).uniform_(-9, 9, generator=generator).to(dtype)
    target = torch.randint(call.n_classes, (N_ROWS,), device=device, generator=generator)
    target[::7] = _IGNORED

    def by_torch(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.to(computed_in), target, ignore_index=_IGNORED)

    def by_chunks(logits: torch.Tensor) -> torch.Tensor:
        loss = CalledLoss(logits, target, "mean", _IGNORED)
        return in_chunks(loss, call, chunk_rows=ALIGNED_ROWS)

    def results(compute: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaf = numbers.clone().requires_grad_()
        loss = compute(leaf.view_as(leaf))
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    with torch.autocast(device.type, enabled=False):
        pairs = zip(results(by_torch), results(by_chunks), strict=True)
        if all(torch.equal(whole, chunked) for whole, chunked in pairs):
            return
    raise RuntimeError(
        f"the exported plan computes F.cross_entropy of {call.n_classes} classes in row chunks, "
        f"which is not bitwise identical to PyTorch's on {device}; remove() the export, solve "
        'again with rewrites="none" and export that'
    )
