"""The chain problem: blocks in a row, each handing one tensor to the next, and its judge.

Block i = 1 .. L makes x_i from x_{i-1}; block L + 1 is the loss, which makes the gradient of x_L.
The backward of block i makes the gradient of x_{i-1} from the gradient of x_i, x_{i-1}, and what
the block's forward saved. This is the model of

    O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova: Optimal checkpointing for
    heterogeneous chains: how to train deep neural networks with limited memory. Inria research
    report RR-9302, 2019 (section 3).

`simulate_chain` is the judge: it runs operations on paper and says what they cost and hold. It
knows how no solver accounts for anything; what is on the device is kept as sets, and summed anew
for each operation. The rules:

1. At first x_0 is on the device and nothing else. It counts: budgets of chains include x_0.
2. A forward needs x_{i-1}, by itself or among what block i - 1 saved. It counts together with
   what it makes and its workspace while it runs. It is illegal when what it makes is there already.
   Where x_i is there by itself when block i saves everything, it counts twice while that runs.
3. Backwards run once each, from block L + 1 to block 1. One makes a gradient as large as x_{i-1}
   while everything that it reads is there; then it lets go of the gradient of x_i, what block i
   saved and x_{i-1} by itself. A first gradient, of the loss, takes no bytes.
4. Parameters and their gradients are no part of this: they take the same bytes throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index


@dataclass(frozen=True)
class Chain:
    """L blocks and a loss. Sequences become tuples; raises ValueError naming the entry at fault.

    Entry i - 1 of `forward_s`, `forward_workspace_bytes`, `backward_s` and
    `backward_workspace_bytes` is that of block i; entry i of `input_bytes` is that of x_i, and
    entry i of `saved_bytes` that of block i.
    """

    forward_s: tuple[float, ...]
    """L entries: seconds of each block's forward, no matter what it keeps."""

    backward_s: tuple[float, ...]
    """L + 1 entries: seconds of each block's backward. The last is the loss, forward and
    backward."""

    input_bytes: tuple[int, ...]
    """L + 1 entries: x_0 .. x_L, each also the size of its gradient."""

    saved_bytes: tuple[int, ...]
    """L + 1 entries: all that block i keeps for its backward beside x_{i-1}, its output x_i
    included. Entry 0 is unused."""

    forward_workspace_bytes: tuple[int, ...]
    """L entries: held only while the forward runs."""

    backward_workspace_bytes: tuple[int, ...]
    """L + 1 entries: held only while the backward runs; the last is the loss."""

    def __post_init__(self) -> None:
        n_blocks = len(self.forward_s)
        if not n_blocks:
            raise ValueError("forward_s is empty; a chain has at least one block")
        for name, n_entries in (
            ("forward_s", n_blocks),
            ("backward_s", n_blocks + 1),
            ("input_bytes", n_blocks + 1),
            ("saved_bytes", n_blocks + 1),
            ("forward_workspace_bytes", n_blocks),
            ("backward_workspace_bytes", n_blocks + 1),
        ):
            values = tuple(getattr(self, name))
            if len(values) != n_entries:
                raise ValueError(
                    f"{name} has {len(values)} entries; "
                    f"with {n_blocks} in forward_s it must have {n_entries}"
                )
            read = _seconds if name.endswith("_s") else _bytes
            checked = tuple(read(value, f"{name}[{i}]") for i, value in enumerate(values))
            object.__setattr__(self, name, checked)  # the one moment when a frozen object may
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
    """Run this block forward; its output is there afterwards, its input by itself no longer."""

    block: int


@dataclass(frozen=True, slots=True)
class ForwardKeepingInput:
    """Run this block forward; its input stays as a checkpoint, and its output is there too."""

    block: int


@dataclass(frozen=True, slots=True)
class ForwardKeepingAll:
    """Run this block forward and save all that its backward needs; its input stays."""

    block: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run this block's backward (of block L + 1: the loss) and let go of all that it alone needed:
    its output's gradient, what the block saved, its input by itself."""

    block: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of this block's output where it is there by itself (of block 0: the chain's input)."""

    block: int


ChainOp = ForwardKeepingOutput | ForwardKeepingInput | ForwardKeepingAll | Backward | Drop


@dataclass(frozen=True)
class ChainSolution:
    """Operations, with what the judge says of them.

    cost_s: seconds of all forwards, those that save included, and of all backwards.
    peak_bytes: the most on the device at once, x_0 included.
    """

    cost_s: float
    peak_bytes: int
    ops: tuple[ChainOp, ...]


class IllegalChainError(ValueError):
    """The operations break a rule; `position` is the index of the op (None: at the end)."""

    def __init__(self, position: int | None, reason: str) -> None:
        self.position = position
        self.reason = reason
        where = "at the end" if position is None else f"op {position}"
        super().__init__(f"illegal chain operations, {where}: {reason}")


def keeping_everything(chain: Chain) -> tuple[ChainOp, ...]:
    """No checkpointing: every block runs forward once and saves everything."""
    blocks = range(1, chain.n_blocks + 1)
    return (
        *map(ForwardKeepingAll, blocks),
        Backward(chain.n_blocks + 1),
        *map(Backward, reversed(blocks)),
    )


def simulate_chain(chain: Chain, ops: Iterable[ChainOp]) -> tuple[float, int]:
    """Run the operations on paper: (cost_s, peak_bytes). Raises IllegalChainError.

    Cost: linear in the number of operations, times what is on the device.
    """
    device = _Device(chain)
    for position, op in enumerate(ops):
        try:
            device.run(op)
        except _BrokenRuleError as broken:
            raise IllegalChainError(position, str(broken)) from None
    if device.next_backward > 0:
        raise IllegalChainError(None, f"the backward of block {device.next_backward} has not run")
    return math.fsum(device.times_s), device.peak_bytes


class _BrokenRuleError(Exception):
    """A rule is broken (the op's position is added by the caller)."""


class _Device:
    """What is on the device.

    outputs: blocks whose output is there by itself (0: the chain's input). saved: blocks that
    saved everything. next_backward: the block whose backward is next; its output's gradient is
    there.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.outputs = {0}
        self.saved: set[int] = set()
        self.next_backward = chain.n_blocks + 1
        self.times_s: list[float] = []
        self.peak_bytes = chain.input_bytes[0]

    def run(self, op: ChainOp) -> None:
        if not isinstance(op, ChainOp):
            raise _BrokenRuleError(f"{op!r:.60} is no chain operation")
        first = 0 if isinstance(op, Drop) else 1
        last = self.chain.n_blocks + isinstance(op, Backward)
        if not first <= op.block <= last:
            raise _BrokenRuleError(
                f"{op} names no block; of a chain of {self.chain.n_blocks} it can name "
                f"{first} .. {last}"
            )
        if isinstance(op, Backward):
            self._backward(op.block)
        elif isinstance(op, Drop):
            self._drop(op.block)
        else:
            self._forward(op, op.block)

    def _forward(self, op: ChainOp, block: int) -> None:
        chain = self.chain
        keeps_all = isinstance(op, ForwardKeepingAll)
        self._must_have_output(block - 1, f"the forward of block {block}")
        if block in self.saved:
            raise _BrokenRuleError(f"all that block {block} saves is there already")
        if block in self.outputs and not keeps_all:
            raise _BrokenRuleError(f"the output of block {block} is there already")
        made = chain.saved_bytes if keeps_all else chain.input_bytes
        self._count(made[block] + chain.forward_workspace_bytes[block - 1])
        self.times_s.append(chain.forward_s[block - 1])
        if keeps_all:
            self.saved.add(block)
            self.outputs.discard(block)
        else:
            self.outputs.add(block)
        if isinstance(op, ForwardKeepingOutput):
            self.outputs.discard(block - 1)

    def _backward(self, block: int) -> None:
        chain = self.chain
        if block != self.next_backward:
            due = f"that of block {self.next_backward}" if self.next_backward else "none"
            raise _BrokenRuleError(f"the backward of block {block} is not due; {due} is")
        if block <= chain.n_blocks and block not in self.saved:
            raise _BrokenRuleError(f"what block {block} saves is not there for its backward")
        self._must_have_output(block - 1, f"the backward of block {block}")
        self._count(chain.input_bytes[block - 1] + chain.backward_workspace_bytes[block - 1])
        self.times_s.append(chain.backward_s[block - 1])
        self.saved.discard(block)
        self.outputs.discard(block - 1)
        self.next_backward = block - 1

    def _drop(self, block: int) -> None:
        if block not in self.outputs:
            raise _BrokenRuleError(f"the output of block {block} is not there by itself")
        self.outputs.remove(block)

    def _must_have_output(self, block: int, reader: str) -> None:
        if block not in self.outputs and block not in self.saved:
            raise _BrokenRuleError(f"{reader} reads x_{block}, which is not there")

    def _count(self, made_bytes: int) -> None:
        """While something runs, what it makes is there together with everything else."""
        held_bytes = _total(self.chain.input_bytes, self.outputs)
        held_bytes += _total(self.chain.saved_bytes, self.saved)
        if self.next_backward <= self.chain.n_blocks:
            held_bytes += self.chain.input_bytes[self.next_backward]
        self.peak_bytes = max(self.peak_bytes, held_bytes + made_bytes)


def _total(sizes: Sequence[int], chosen: Iterable[int]) -> int:
    return sum(sizes[i] for i in chosen)
