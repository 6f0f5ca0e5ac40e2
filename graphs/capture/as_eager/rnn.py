"""Traces `nn.GRU` and `nn.RNN` on the CPU so that they are bitwise identical to eager mode.

While PyTorch traces, it decomposes them in Python, and the in-place steps of a GRU cell become
steps with results of their own. Both change the last bits:

- CPU kernels process whole vector registers, and the remainder of a row element by element, with
  functions that differ in the last bit. Eager mode sums two gates in place, as slices of rows that
  are three gates long, so the remainder is at the end of each slice. A contiguous tensor is
  processed as one long row, so other elements would be the remainder, unless a gate's width is a
  multiple of 32.
- Dropout between layers draws its numbers in the memory order of its input.

So the kernels here follow the steps of ATen/native/RNN.cpp (torch 2.13) in the same order, and give
the gates the strides of such slices before their sigmoid. `nn.LSTM` is refused if eager mode runs
oneDNN's operator (use_mkldnn in that file), whose workspace is hidden: PyTorch's decomposition
computes other bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.traceback import annotate

from graphs.capture.own_operators import LIBRARY, define
from graphs.model_calls import TraceError, strided_like

Tensor = torch.Tensor
Linear = Callable[[Tensor], Tensor]
CallAnnotation = dict[str, Any]
"""Annotation of nodes that mark how long eager mode holds the input's gates: {"runs_within": number
of the call of a cell or layer}, or empty (see `Layout.held_within_call` in
`graphs.capture.extraction`)."""
Cell = Callable[[Tensor, Tensor, Linear, CallAnnotation], Tensor]
"""(input times its weight, hidden state, linear layer of the hidden state, annotation) -> new
hidden state."""

aten = torch.ops.aten
_calls = itertools.count()
_ONEDNN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_laid_out: Callable[[Tensor, Sequence[int]], Tensor] = define(
    "laid_out(Tensor self, SymInt[] strides) -> Tensor",
    CPU=lambda tensor, strides: strided_like(tensor, strides=strides).copy_(tensor),
    Meta=lambda tensor, strides: strided_like(tensor, strides=strides),
)
torch.library.register_autograd(
    "checkpoint_solver::laid_out", lambda _ctx, gradient: (gradient, None), lib=LIBRARY
)


def _gru_step(
    gates: Tensor, hidden: Tensor, from_hidden: Linear, annotation: CallAnnotation
) -> Tensor:
    """One step of a GRU; see `Cell`."""
    in_reset, in_update, in_new = gates.unsafe_chunk(3, 1)
    reset, update, new = from_hidden(hidden).unsafe_chunk(3, 1)
    # Eager mode sums in place: a sum has the strides of a slice of a row of three gates.
    with annotate({"in_place": True, **annotation}):
        reset = _laid_out(reset + in_reset, reset.stride()).sigmoid()
        update = _laid_out(update + in_update, update.stride()).sigmoid()
    # Eager mode overwrites this slice by the product, so autograd saves a copy of it, and does not
    # keep the whole row alive.
    new_copy = new.clone()
    new = in_new + new_copy * reset
    with annotate({"in_place": True}):
        new = new.tanh()
    change = (hidden - new) * update
    with annotate({"in_place": True, **annotation}):
        return change + new


def _simple_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    """The cell of an `nn.RNN`."""
    return lambda gates, hidden, from_hidden, _: activation(from_hidden(hidden) + gates)


def _linear_layers(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Linear, Linear]:
    """The linear layers of the input and of the hidden state."""
    of_input, of_hidden = zip(weights, biases, strict=True)
    return lambda x: F.linear(x, *of_input), lambda x: F.linear(x, *of_hidden)


def _recurrent_kernel(cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel of a recurrent network (such as `aten.gru.input`) with this cell."""

    def run(
        x: Tensor,
        hx: Tensor,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        x = x.transpose(0, 1) if batch_first else x
        hidden, parameters = iter(hx.unbind(0)), iter(params)
        last_states = []
        for layer in range(num_layers):
            outputs: list[Tensor] = []
            annotation: CallAnnotation = {}
            for backwards in (False, True)[: 1 + bidirectional]:
                weights = [next(parameters), next(parameters)]
                biases = [next(parameters), next(parameters)] if has_biases else [None, None]
                from_input, from_hidden = _linear_layers(weights, biases)
                # Eager mode holds the first direction's gates until it has computed these, so these
                # operators count as part of that direction's call.
                with annotate(annotation):
                    steps = from_input(x).unbind(0)
                state, states, annotation = next(hidden), [], {"runs_within": next(_calls)}
                for step in reversed(steps) if backwards else steps:
                    state = cell(step, state, from_hidden, annotation)
                    states.append(state)
                with annotate(annotation):
                    outputs.append(torch.stack(states[::-1] if backwards else states, 0))
                last_states.append(state)
            with annotate(annotation):
                x = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                x = torch.dropout(x, dropout, True)
        return x.transpose(0, 1) if batch_first else x, torch.stack(last_states, 0)

    return run


def _gru_cell(
    x: Tensor,
    hidden: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> Tensor:
    from_input, from_hidden = _linear_layers((weight_ih, weight_hh), (bias_ih, bias_hh))
    return _gru_step(from_input(x), hidden, from_hidden, {"runs_within": next(_calls)})


def _lstm(x: Tensor, hx: Sequence[Tensor], *arguments: Any) -> Any:
    has_projection = hx[0].shape[-1] != hx[1].shape[-1]
    if x.dtype in _ONEDNN_DTYPES and torch.backends.mkldnn.enabled and not has_projection:
        raise TraceError(
            "nn.LSTM runs as one opaque operator on the CPU, whose workspace exists only inside "
            "autograd; write the cells as a loop (nn.LSTMCell), which can be planned",
            runs_in_eager=True,
            short="nn.LSTM runs as one opaque operator on the CPU",
        )
    return torch._decomp.decompositions.lstm_impl(x, hx, *arguments)


def _refuse_packed(*_args: Any, **_kwargs: Any) -> Any:
    raise TraceError(
        "a recurrent layer is given a packed sequence, whose steps PyTorch traces differently from "
        "how eager mode runs them; pass the padded batch, or write the cells as a loop"
    )


KERNELS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.gru_cell.default: _gru_cell,
    aten.gru.input: _recurrent_kernel(_gru_step),
    aten.rnn_tanh.input: _recurrent_kernel(_simple_cell(torch.tanh)),
    aten.rnn_relu.input: _recurrent_kernel(_simple_cell(torch.relu)),
    aten.lstm.input: _lstm,
    aten.lstm.data: _refuse_packed,
    aten.gru.data: _refuse_packed,
    aten.rnn_tanh.data: _refuse_packed,
    aten.rnn_relu.data: _refuse_packed,
}
"""Operator -> its replacement while a step on the CPU is traced."""
