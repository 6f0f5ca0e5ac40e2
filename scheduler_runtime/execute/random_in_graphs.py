"""Give recomputed random operators the same numbers inside of CUDA graphs.

A graph draws from the generator states that are registered with it. Before a replay, each state's
seed and offset are copied to the device, and every draw adds its own offset, counted from the start
of the recording. Recorded operators that run once draw from the device's own generator, so they get
the numbers of eager mode.

Each recomputation has its own generator state, set to the offset of the operator's first run: the
offset of the device's generator at the start of the forward pass, plus what the operators before
have drawn. The latter is the same in every step, and is recorded in the warm-up (PyTorch refuses to
read offsets while it records). `torch.Generator.graphsafe_set_state` puts the state into the
device's generator during the call. A replay sets each of these states with two small kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scheduler_runtime.execute.program import Program
from scheduler_runtime.execute.random_state import keep_instead, recompute_random


class RandomInGraphs:
    """The generator states of one recorded step.

    generators: two lists, to be registered with the forward and the backward graph: one state for
        each recomputation of a random operator, in order.
    """

    def __init__(self, device: torch.device, program: Program) -> None:
        self.device_generator: Any = torch.cuda.default_generators[device.index]
        of_forward = _n_recomputations(program.forward.module)
        of_backward = sum(_n_recomputations(piece.module) for piece in program.backward)
        self.generators = tuple(
            [self.device_generator.clone_state() for _ in range(n)]
            for n in (of_forward, of_backward)
        )
        self._offsets: list[int] = []  # of the first runs, from the start of the forward pass
        self._unused_states = iter([*self.generators[0], *self.generators[1]])
        self._recomputations: list[tuple[Any, int]] = []

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Around a forward pass of the warm-up: record the offsets of the first runs."""
        self._offsets.clear()
        start = self.device_generator.get_offset()

        def note() -> None:
            self._offsets.append(self.device_generator.get_offset() - start)

        with _called_at_first_runs(note):
            yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around the recorded forward pass: first runs keep their offset instead of a state."""
        offsets = iter(self._offsets)
        with _called_at_first_runs(lambda: FirstRun(self, next(offsets))):
            yield

    def record_recomputation(self, run: Callable[[], Any], offset: int) -> Any:
        """Record the recomputation of an operator that first drew at this offset."""
        generator = next(self._unused_states)
        self._recomputations.append((generator, offset))
        current = self.device_generator.graphsafe_get_state()
        self.device_generator.graphsafe_set_state(generator)
        try:
            return run()
        finally:
            self.device_generator.graphsafe_set_state(current)

    def begin(self) -> None:
        """Set all generator states, before a replay of the forward pass. The backward pass uses
        them, too."""
        seed, start = (
            self.device_generator.initial_seed(),
            self.device_generator.get_offset() if self._recomputations else 0,
        )
        for generator, offset in self._recomputations:
            generator.manual_seed(seed)
            generator.set_offset(start + offset)


def end_recording(device: torch.device) -> None:
    """Replace the generator's state by a copy, after a failed recording: torch 2.11 leaves a state
    that belongs to the recording and cannot draw any more."""
    own: Any = torch.cuda.default_generators[device.index]
    own.graphsafe_set_state(own.clone_state())


class FirstRun:
    """The first run of a random operator in a recording; implements `RandomRun`."""

    def __init__(self, random: RandomInGraphs, offset: int) -> None:
        self._random, self._offset = random, offset

    def rerun(self, run: Callable[[], Any]) -> Any:
        return self._random.record_recomputation(run, self._offset)


@contextlib.contextmanager
def _called_at_first_runs(instead: Callable[[], FirstRun | None]) -> Iterator[None]:
    token = keep_instead.set(instead)
    try:
        yield
    finally:
        keep_instead.reset(token)


def _n_recomputations(module: torch.fx.GraphModule) -> int:
    return sum(
        node.op == "call_function" and node.target is recompute_random
        for node in module.graph.nodes
    )
