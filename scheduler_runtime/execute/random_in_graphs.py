"""Random operators that run again inside of CUDA graphs.

A graph draws from each generator state that is registered with it: before a replay the state's seed
and offset are copied to the device, and each draw adds the offset, counted from the start of the
recording, that it had then. Recorded operators that run once draw from the device's own generator
and so get the numbers of eager mode.

To run one again, each recomputation has a generator state of its own, which begins at the offset
of the first run: that of the device's generator when the forward pass begins, and what the
operators before it draw. The latter is the same in every step, and is noted in the warm-up (PyTorch
refuses to read offsets while it records). `torch.Generator.graphsafe_set_state` puts the state into
the device's generator for the duration of the call. A replay sets each of these states by two small
kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scheduler_runtime.execute.program import Program
from scheduler_runtime.execute.random_state import keep_instead, recompute_random


class RandomInGraphs:
    """What the graphs of one recorded step draw.

    generators: to be registered with the graph of the forward pass, and of the backward pass: one
        for each recomputation of a random operator, in their order.
    """

    def __init__(self, device: torch.device, program: Program) -> None:
        self.own: Any = torch.cuda.default_generators[device.index]
        of_forward = _n_repeats(program.forward.module)
        of_backward = sum(_n_repeats(piece.module) for piece in program.backward)
        self.generators = tuple(
            [self.own.clone_state() for _ in range(n)] for n in (of_forward, of_backward)
        )
        self._offsets: list[int] = []  # of the first runs, from the start of the forward pass
        self._unused = iter([*self.generators[0], *self.generators[1]])
        self._repeats: list[tuple[Any, int]] = []

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Around a forward pass that is not recorded: the offsets of the first runs are noted."""
        self._offsets.clear()
        start = self.own.get_offset()

        def note() -> None:
            self._offsets.append(self.own.get_offset() - start)

        with _kept(note):
            yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forward pass that is recorded."""
        offsets = iter(self._offsets)
        with _kept(lambda: FirstRun(self, next(offsets))):
            yield

    def repeat(self, run: Callable[[], Any], offset: int) -> Any:
        """Record the recomputation of an operator that first drew at this offset."""
        generator = next(self._unused)
        self._repeats.append((generator, offset))
        current = self.own.graphsafe_get_state()
        self.own.graphsafe_set_state(generator)
        try:
            return run()
        finally:
            self.own.graphsafe_set_state(current)

    def begin(self) -> None:
        """Before the forward pass is replayed; the backward pass goes by the same start."""
        seed, start = self.own.initial_seed(), self.own.get_offset() if self._repeats else 0
        for generator, offset in self._repeats:
            generator.manual_seed(seed)
            generator.set_offset(start + offset)


def end_recording(device: torch.device) -> None:
    """After a recording that has failed: the generator's state, as torch 2.11 leaves it, belongs to
    the recording and would draw nothing more. One like it takes its place."""
    own: Any = torch.cuda.default_generators[device.index]
    own.graphsafe_set_state(own.clone_state())


class FirstRun:
    """A random operator's first run in a recording."""

    def __init__(self, random: RandomInGraphs, offset: int) -> None:
        self._random, self._offset = random, offset

    def again(self, run: Callable[[], Any]) -> Any:
        return self._random.repeat(run, self._offset)


@contextlib.contextmanager
def _kept(instead: Callable[[], FirstRun | None]) -> Iterator[None]:
    token = keep_instead.set(instead)
    try:
        yield
    finally:
        keep_instead.reset(token)


def _n_repeats(module: torch.fx.GraphModule) -> int:
    return sum(
        node.op == "call_function" and node.target is recompute_random
        for node in module.graph.nodes
    )
