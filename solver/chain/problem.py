"""The chain problem: blocks in a row, each handing one tensor to the next, and its simulator.

Block i = 1 .. L makes x_i from x_{i-1}; block L + 1 is the loss, which makes the gradient of x_L.
The backward of block i makes the gradient of x_{i-1} from the gradient of x_i, x_{i-1}, and what
the block's forward saved. This is the model of

    O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova: Optimal checkpointing for
    heterogeneous chains: how to train deep neural networks with limited memory. Inria research
    report RR-9302, 2019 (section 3).

`simulate_chain` computes the time and peak of operations, whichever solver they come from. It keeps
what is on the device as sets, and sums their bytes for each operation. The rules:

1. At first x_0 is on the device and nothing else. It counts: budgets of chains include x_0.
2. A forward needs x_{i-1}, live by itself or among what block i - 1 saved. Its input, what it makes
   and its workspace count while it runs. It is illegal if what it makes is live already. If x_i is
   live by itself when block i saves everything, it counts twice while that forward runs.
3. Each backward runs once, from block L + 1 to block 1. It makes a gradient as large as x_{i-1}
   while everything that it reads is live. Then it frees the gradient of x_i, what block i saved,
   and x_{i-1} if live by itself. The first gradient, of the loss, takes no bytes.
4. Parameters and their gradients are left out: they take the same bytes throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import index


@dataclass(frozen=True)
class Chain:
    """L blocks and a loss. Sequences become tuples. Raises ValueError that names the invalid entry.

    forward_s: L entries, the seconds of each block's forward, no matter what it keeps.
    backward_s: L + 1 entries, the seconds of each block's backward; the last is the loss, forward
        and backward.
    input_bytes: L + 1 entries, x_0 .. x_L, each also the size of its gradient.
    saved_bytes: L + 1 entries; entry i is all that block i keeps for its backward besides x_{i-1},
        including its output x_i. Entry 0 is unused.
    forward_workspace_bytes: L entries, held only while each block's forward runs.
    backward_workspace_bytes: L + 1 entries, held only while the backward runs; the last is the
        loss.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    forward_workspace_bytes: tuple[int, ...]
    backward_workspace_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        n_blocks = len(self.forward_s)
        if not n_blocks:
            raise ValueError("forward_s is empty; a chain has at least one block")
        for name in (field.name for field in fields(self)):
            n_entries = n_blocks + (not name.startswith("forward_"))
            values = tuple(getattr(self, name))
            if len(values) != n_entries:
                raise ValueError(
                    f"{name} has {len(values)} entries; "
                    f"with {n_blocks} in forward_s it must have {n_entries}"
                )
            read = _seconds if name.endswith("_s") else _bytes
            checked = tuple(read(value, f"{name}[{i}]") for i, value in enumerate(values))
            object.__setattr__(self, name, checked)  # still under construction
        for i in range(1, n_blocks + 1):
            if self.saved_bytes[i] < self.input_bytes[i]:
                raise ValueError(
                    f"saved_bytes[{i}] is {self.saved_bytes[i]}, less than input_bytes[{i}] = "
                    f"{self.input_bytes[i]}; what block {i} saves includes its output"
                )

    @property
    def n_blocks(self) -> int:
        """L; the loss is block L + 1."""
        return len(self.forward_s)


def _seconds(value: object, where: str) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, str | bool) or not 0 <= seconds < math.inf:
        raise ValueError(f"{where} is {value!r:.60}; it must be a finite number, 0 s or more")
    return seconds


def _bytes(value: object, where: str) -> int:
    try:
        size_bytes = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{where} is {value!r:.60}; it must be an int, in bytes") from None
    if isinstance(value, bool) or size_bytes < 0:
        raise ValueError(f"{where} is {value!r:.60}; it must be an int, 0 bytes or more")
    return size_bytes


@dataclass(frozen=True, slots=True)
class ForwardKeepingOutput:
    """Run this block forward. Its output is live afterwards; its input by itself is freed."""

    block: int


@dataclass(frozen=True, slots=True)
class ForwardKeepingInput:
    """Run this block forward. Its output is live afterwards; its input stays as a checkpoint."""

    block: int


@dataclass(frozen=True, slots=True)
class ForwardKeepingAll:
    """Run this block forward and save everything that its backward needs. Its input stays."""

    block: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run this block's backward (block L + 1: the loss) and free what only it needed.

    That is the gradient of the block's output, what the block saved, and its input if live by
    itself.
    """

    block: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Free this block's output, live by itself (block 0: the chain's input).

    No solver emits it, since such schedules are not persistent; the brute force in the tests does.
    """

    block: int


ChainOp = ForwardKeepingOutput | ForwardKeepingInput | ForwardKeepingAll | Backward | Drop


@dataclass(frozen=True)
class ChainSolution:
    """Operations, with their time and peak in the simulator.

    cost_s: seconds of all forwards, including those that save, and of all backwards.
    peak_bytes: the most on the device at once, x_0 included.
    """

    cost_s: float
    peak_bytes: int
    ops: tuple[ChainOp, ...]


class IllegalChainError(ValueError):
    """The operations break a rule.

    position: index of the op (None: the end of the operations).
    """

    def __init__(self, position: int | None, reason: str) -> None:
        self.position = position
        self.reason = reason
        where = "at the end" if position is None else f"op {position}"
        super().__init__(f"illegal chain operations, {where}: {reason}")


def ops_keeping_everything(chain: Chain) -> tuple[ChainOp, ...]:
    """No checkpointing: every block runs forward once and saves everything."""
    blocks = range(1, chain.n_blocks + 1)
    return (
        *map(ForwardKeepingAll, blocks),
        Backward(chain.n_blocks + 1),
        *map(Backward, reversed(blocks)),
    )


def simulate_chain(chain: Chain, ops: Iterable[ChainOp]) -> tuple[float, int]:
    """Returns (cost_s, peak_bytes) of the operations. Raises IllegalChainError.

    Takes time proportional to the number of operations times the number of entries on the device.
    """
    device = _Device(chain)
    for op in ops:
        device.run(op)
        device.position += 1
    if device.next_backward > 0:
        raise IllegalChainError(None, f"the backward of block {device.next_backward} has not run")
    return math.fsum(device.times_s), device.peak_bytes


class _Device:
    """What is on the device while the operations run.

    outputs: blocks whose output is live by itself (0: the chain's input).
    saved: blocks that saved everything.
    next_backward: the block whose backward is next; the gradient of its output is live.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.position = 0  # index of the op that runs
        self.outputs = {0}
        self.saved: set[int] = set()
        self.next_backward = chain.n_blocks + 1
        self.times_s: list[float] = []
        self.peak_bytes = chain.input_bytes[0]

    def run(self, op: ChainOp) -> None:
        if not isinstance(op, ChainOp):
            raise self._illegal(f"{op!r:.60} is not a chain operation")
        first = 0 if isinstance(op, Drop) else 1
        last = self.chain.n_blocks + isinstance(op, Backward)
        if not first <= op.block <= last:
            raise self._illegal(
                f"{op} names no block; of a chain of {self.chain.n_blocks} it can name "
                f"{first} .. {last}"
            )
        if isinstance(op, Backward):
            self._backward(op.block)
        elif not isinstance(op, Drop):
            self._forward(op, op.block)
        elif op.block not in self.outputs:
            raise self._illegal(f"the output of block {op.block} is not there by itself")
        else:
            self.outputs.remove(op.block)

    def _illegal(self, reason: str) -> IllegalChainError:
        return IllegalChainError(self.position, reason)

    def _forward(self, op: ChainOp, block: int) -> None:
        chain = self.chain
        self._must_have_output(block - 1, f"the forward of block {block}")
        if block in self.saved:
            raise self._illegal(f"all that block {block} saves is there already")
        if isinstance(op, ForwardKeepingAll):
            self._update_peak(chain.saved_bytes[block] + chain.forward_workspace_bytes[block - 1])
            self.saved.add(block)
            self.outputs.discard(block)
        else:
            if block in self.outputs:
                raise self._illegal(f"the output of block {block} is there already")
            self._update_peak(chain.input_bytes[block] + chain.forward_workspace_bytes[block - 1])
            self.outputs.add(block)
        if isinstance(op, ForwardKeepingOutput):
            self.outputs.discard(block - 1)
        self.times_s.append(chain.forward_s[block - 1])

    def _backward(self, block: int) -> None:
        chain = self.chain
        if block != self.next_backward:
            due = f"that of block {self.next_backward}" if self.next_backward else "none"
            raise self._illegal(f"the backward of block {block} is not due; {due} is")
        if block <= chain.n_blocks and block not in self.saved:
            raise self._illegal(f"what block {block} saves is not there for its backward")
        self._must_have_output(block - 1, f"the backward of block {block}")
        self._update_peak(chain.input_bytes[block - 1] + chain.backward_workspace_bytes[block - 1])
        self.times_s.append(chain.backward_s[block - 1])
        self.saved.discard(block)
        self.outputs.discard(block - 1)
        self.next_backward = block - 1

    def _must_have_output(self, block: int, reader: str) -> None:
        if block not in self.outputs and block not in self.saved:
            raise self._illegal(f"{reader} reads x_{block}, which is not there")

    def _update_peak(self, made_bytes: int) -> None:
        """Update the peak: what an op makes counts together with everything that is live."""
        held_bytes = sum(self.chain.input_bytes[i] for i in self.outputs)
        held_bytes += sum(self.chain.saved_bytes[i] for i in self.saved)
        if self.next_backward <= self.chain.n_blocks:
            held_bytes += self.chain.input_bytes[self.next_backward]
        self.peak_bytes = max(self.peak_bytes, held_bytes + made_bytes)
