"""Recurrent layers on the CPU as eager mode runs them, to the bit.

While PyTorch traces, `nn.GRU` and `nn.RNN` are taken apart in Python, and the in-place steps of a
GRU's cell become steps with results of their own. Both give other last bits than eager mode:

- CPU kernels take whole registers of numbers, and what is left at the end of a row one by one, by
  functions that differ in the last bit. Eager mode adds up two gates in place, in parts of rows
  that are three gates long. In a tensor of its own a gate's rows follow each other without ends, so
  that other numbers would be the last ones, unless a gate is a multiple of 32 wide.
- Dropout between layers draws its numbers in the order in which its input lies in memory.

Here the steps of ATen/native/RNN.cpp are followed in the same order (torch 2.13), and gates are
laid out as parts of longer rows before their sigmoid. `nn.LSTM` is refused elsewhere: on the CPU it
is one operator whose workspace is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from graphs.calls import TraceError

Tensor = torch.Tensor
Cell = Callable[[Tensor, Tensor, "_Parameters"], Tensor]
"""Of (input already multiplied with its weight, hidden, parameters)."""

aten = torch.ops.aten
_library = torch.library.Library("checkpoint_solver", "FRAGMENT")


def _with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


_library.define("laid_out(Tensor self, SymInt[] strides) -> Tensor")
_library.impl("laid_out", lambda t, strides: _with_strides(t, strides).copy_(t), "CPU")
_library.impl("laid_out", _with_strides, "Meta")
torch.library.register_autograd(
    "checkpoint_solver::laid_out", lambda _ctx, gradient: (gradient, None), lib=_library
)


class _Parameters:
    """Weights and biases of one direction of one layer."""

    def __init__(self, tensors: Sequence[Tensor], *, has_biases: bool) -> None:
        self._weight_ih, self._weight_hh = tensors[:2]
        self._bias_ih = tensors[2] if has_biases else None
        self._bias_hh = tensors[3] if has_biases else None

    def of_input(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight_ih, self._bias_ih)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weight_hh, self._bias_hh)


def _gru(x: Tensor, hidden: Tensor, parameters: _Parameters) -> Tensor:
    in_reset, in_update, in_new = x.unsafe_chunk(3, 1)
    reset, update, new = parameters.of_hidden(hidden).unsafe_chunk(3, 1)
    laid_out: Callable[[Tensor, Sequence[int]], Tensor] = torch.ops.checkpoint_solver.laid_out
    reset = laid_out(reset + in_reset, reset.stride()).sigmoid()
    update = laid_out(update + in_update, update.stride()).sigmoid()
    new = (in_new + new * reset).tanh()
    return (hidden - new) * update + new


def _tanh(x: Tensor, hidden: Tensor, parameters: _Parameters) -> Tensor:
    return (parameters.of_hidden(hidden) + x).tanh()


def _relu(x: Tensor, hidden: Tensor, parameters: _Parameters) -> Tensor:
    return (parameters.of_hidden(hidden) + x).relu()


def _direction(
    x: Tensor, hidden: Tensor, parameters: _Parameters, cell: Cell, *, backwards: bool
) -> tuple[Tensor, Tensor]:
    """All steps of one direction of one layer: outputs by step, and the last hidden state."""
    steps = parameters.of_input(x).unbind(0)
    outputs = []
    for step in reversed(steps) if backwards else steps:
        hidden = cell(step, hidden, parameters)
        outputs.append(hidden)
    return torch.stack(outputs[::-1] if backwards else outputs, 0), hidden


def _layers(cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
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
        hidden = iter(hx.unbind(0))
        size = 4 if has_biases else 2
        groups = iter(
            _Parameters(params[start : start + size], has_biases=has_biases)
            for start in range(0, len(params), size)
        )
        last = []
        for layer in range(num_layers):
            outputs = []
            for backwards in (False, True)[: 1 + bidirectional]:
                output, state = _direction(x, next(hidden), next(groups), cell, backwards=backwards)
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                x = torch.dropout(x, dropout, True)
        return x.transpose(0, 1) if batch_first else x, torch.stack(last, 0)

    return run


def _gru_cell(
    x: Tensor,
    hidden: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> Tensor:
    biases = () if bias_ih is None or bias_hh is None else (bias_ih, bias_hh)
    parameters = _Parameters((weight_ih, weight_hh, *biases), has_biases=bool(biases))
    return _gru(parameters.of_input(x), hidden, parameters)


def _refuse_packed(*_args: Any, **_kwargs: Any) -> Any:
    raise TraceError(
        "a recurrent layer is given a packed sequence, whose steps PyTorch traces in another way "
        "than eager mode runs them; hand it the padded batch, or write the cells as a loop"
    )


KERNELS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.gru_cell.default: _gru_cell,
    aten.gru.input: _layers(_gru),
    aten.rnn_tanh.input: _layers(_tanh),
    aten.rnn_relu.input: _layers(_relu),
    aten.gru.data: _refuse_packed,
    aten.rnn_tanh.data: _refuse_packed,
    aten.rnn_relu.data: _refuse_packed,
}
"""What to run in the place of these operators while a step on the CPU is traced."""
