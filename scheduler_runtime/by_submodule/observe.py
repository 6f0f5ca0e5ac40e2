"""A step observed in eager mode: which submodules run in sequence, and what each takes.

Nothing is traced: real steps run, with hooks on modules and tensors. A step is cut into parts, in
turn what runs outside of the chosen submodules and one of these. For each part: how long its
forward and its backward take, what it saves for backward, and its peak memory above that. All that
the steps change (buffers, gradients, random state) is restored.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from graphs.costs import CudaPeaks, begin_part, cpu_peak_bytes_by_part
from graphs.model_calls import device_of, nested
from scheduler_runtime.by_submodule.eager_step import state_restored
from scheduler_runtime.measuring import no_garbage
from solver.module_checkpointing import SequentialSteps

N_TIMED_STEPS = 3


@dataclass
class ObservedPart:
    """One submodule of the sequence, or what runs between two of them.

    path: of the submodule; "" outside of them.
    made, saved, read: storages by number: allocated here, saved here for backward, given to it.
    forward_s, backward_s: seconds.
    forward_peak_bytes, backward_peak_bytes: above what is there when it starts.
    overwritten: an argument of it is written in place after it was read.
    """

    path: str
    made: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    overwritten: bool = False


@dataclass(frozen=True)
class Observed:
    """A step in parts.

    parts: outside, submodule, outside, submodule, ..., outside.
    storage_bytes: by number.
    container: the path of the nn.Sequential that runs the submodules in a loop.
    steps: its steps, each one child or several that must be recomputed together (None: no loop).
    """

    parts: tuple[ObservedPart, ...]
    storage_bytes: tuple[int, ...]
    container: str = ""
    steps: SequentialSteps | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the submodules, in the order in which they run."""
        return tuple(part.path for part in self.parts if part.path)

    def bytes_of(self, storages: Iterable[int]) -> int:
        return sum(self.storage_bytes[i] for i in storages)

    def workspace_bytes(self, k: int) -> int:
        """Of part k's forward, beside what it makes."""
        return max(0, self.parts[k].forward_peak_bytes - self.bytes_of(self.parts[k].made))


@dataclass
class _Call:
    """parent: number of the call inside of which it runs; -1: none."""

    path: str
    parent: int
    saved_bytes: int = 0


def find_rows(model: nn.Module, step: Callable[[], torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    """Submodules to plan, as paths in the order in which they run: the best row, then all rows.

    A row is what the same module calls one after another, once each. The best saves the most for
    backward beside its largest member, for that is what checkpoints can win; several rows, none of
    which runs inside of another's submodule, win the most together. One entry where that is the
    best row, none where there is none.
    """
    calls = _calls_in(model, step)
    n_calls = Counter(call.path for call in calls)
    inner: dict[int, list[int]] = defaultdict(list)
    rows: dict[int, list[int]] = defaultdict(list)  # by the call inside of which they run
    for index, call in enumerate(calls):
        inner[call.parent].append(index)
        if n_calls[call.path] == 1:
            rows[call.parent].append(index)

    def gain_bytes(row: Sequence[int]) -> int:
        sizes = [calls[index].saved_bytes for index in row]
        return sum(sizes) - max(sizes)

    def best_rows(inside: int) -> tuple[int, list[int]]:
        """The most that rows inside of a call win together, and their calls."""
        parts = [best_rows(index) for index in inner[inside]]
        row = rows.get(inside, [])
        alone = (gain_bytes(row) if row else 0), row
        finer = sum(gain for gain, _ in parts), [index for _, part in parts for index in part]
        return max(alone, finer, key=lambda each: each[0])

    best = max(rows.values(), key=gain_bytes, default=[])
    found = [best, best_rows(-1)[1]] if best and gain_bytes(best) else []
    paths = (tuple(calls[index].path for index in each) for each in found)
    return tuple(dict.fromkeys(paths))


def _calls_in(model: nn.Module, step: Callable[[], torch.Tensor]) -> list[_Call]:
    """The calls of submodules in a step, in order, with the bytes that are saved inside of each."""
    paths = {module: path for path, module in model.named_modules() if path}
    calls: list[_Call] = []
    running = [-1]
    # storages by address; held, so that none gets another's address
    seen = {storage._cdata: storage for storage in _state_storages(model)}

    def enter(module: nn.Module, _args: Any) -> None:
        running.append(len(calls))
        calls.append(_Call(paths[module], running[-2]))

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        running.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage
            for index in running[1:]:
                calls[index].saved_bytes += storage.nbytes()
        return tensor.detach()  # itself it would hold the operator that saves it: a cycle

    with state_restored(model), contextlib.ExitStack() as stack:
        for module in paths:
            stack.enter_context(module.register_forward_pre_hook(enter))
            stack.enter_context(module.register_forward_hook(leave, always_call=True))
        stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        step()
    return calls


def observe(
    model: nn.Module,
    step: Callable[[], torch.Tensor],
    blocks: Sequence[str],
    *,
    resident: Sequence[torch.Tensor] = (),
    release: Callable[[], object] = lambda: None,
) -> Observed:
    """Run real steps and observe these submodules.

    step: forward pass and loss.
    blocks: submodules called once each, one after another.
    resident: what is there before the step beside parameters and buffers (the batch).
    release: lets go of what `step` holds until the step ends.
    """
    watch = _Watch(model, blocks, resident)

    def run() -> None:
        loss = step()
        watch.mark(f"backward {len(watch.parts) - 1}")
        loss.backward()
        release()

    with state_restored(model), watch.hooked(saving=True):
        run()
    device = device_of(model)
    with state_restored(model), watch.hooked(saving=False):
        if device.type == "cuda":
            watch.cuda_peaks = CudaPeaks(device)
            run()
            peaks, watch.cuda_peaks = watch.cuda_peaks.ended(), None
        else:
            with no_garbage(device):
                peaks = cpu_peak_bytes_by_part(run)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(N_TIMED_STEPS):
        with state_restored(model), watch.hooked(saving=False):
            run()
        for name, seconds in watch.seconds().items():
            times[name].append(seconds)
    for index, part in enumerate(watch.parts):
        forward, backward = f"forward {index}", f"backward {index}"
        part.forward_peak_bytes = peaks.get(forward, 0)
        part.backward_peak_bytes = peaks.get(backward, 0)
        part.forward_s = statistics.median(times[forward])
        part.backward_s = statistics.median(times.get(backward, [0.0]))
    return Observed(tuple(watch.parts), tuple(watch.storage_bytes))


def _state_storages(model: nn.Module) -> Iterator[Any]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.untyped_storage()


class _Watch:
    """Marks where parts begin, and in a first step what they allocate, read and save."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], resident: Sequence[torch.Tensor] = ()
    ) -> None:
        self._modules = [model.get_submodule(path) for path in blocks]
        self._numbers: dict[int, tuple[int, Any]] = {}  # holds storages: none gets another's place
        self.storage_bytes: list[int] = []
        self.parts = [ObservedPart("")]
        for path in blocks:
            self.parts += [ObservedPart(path), ObservedPart("")]
        self._resident = {storage._cdata for storage in _state_storages(model)}
        self._resident |= {tensor.untyped_storage()._cdata for tensor in resident}
        self._arguments: list[tuple[ObservedPart, torch.Tensor, int]] = []
        self._marks: list[tuple[str, float]] = []
        self._direct: list[weakref.ref[torch.Tensor]] = []  # outputs of the last submodule
        self._now = 0  # index of the part that runs
        self._cards = {p.device for p in model.parameters() if p.is_cuda}
        self.cuda_peaks: CudaPeaks | None = None

    @contextlib.contextmanager
    def hooked(self, *, saving: bool) -> Iterator[None]:
        self._now = 0
        self._marks = []
        try:
            with contextlib.ExitStack() as stack:
                for position, module in enumerate(self._modules):
                    before, after = self._hooks(2 * position + 1, saving=saving)
                    stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(after))
                if saving:
                    stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
                self.mark("forward 0")
                yield
                self.mark("end")
        finally:
            for part, tensor, version in self._arguments:
                part.overwritten |= tensor._version != version
            self._arguments.clear()
            self._numbers.clear()

    def _hooks(self, index: int, *, saving: bool) -> tuple[Any, Any]:
        outside, part, following = self.parts[index - 1 : index + 2]

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in nested.tensors((args, kwargs)):
                if saving:
                    self._add(part.read, tensor, maker=outside)
                    self._arguments.append((part, tensor.detach(), tensor._version))
                # a gradient of what comes directly from a submodule is where its backward begins
                is_direct = any(tensor is output() for output in self._direct)
                if tensor.requires_grad and not is_direct:
                    tensor.register_hook(lambda _gradient: self.mark(f"backward {index - 1}"))
            self._now = index
            self.mark(f"forward {index}")

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._direct = [weakref.ref(tensor) for tensor in nested.tensors(output)]
            for tensor in nested.tensors(output):
                if saving:
                    self._add(following.read, tensor, maker=part)
                if tensor.requires_grad:
                    tensor.register_hook(lambda _gradient: self.mark(f"backward {index}"))
            self._now = index + 1
            self.mark(f"forward {index + 1}")

        return before, after

    def mark(self, name: str) -> None:
        if self.cuda_peaks is not None:
            self.cuda_peaks.begin(name)
        else:
            for card in self._cards:  # else the host's time would be measured
                torch.cuda.synchronize(card)
        self._marks.append((name, time.perf_counter()))
        begin_part(name)

    def seconds(self) -> dict[str, float]:
        spent: dict[str, float] = defaultdict(float)
        for (name, begun_s), (_, ended_s) in itertools.pairwise(self._marks):
            spent[name] += ended_s - begun_s
        return spent

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        part = self.parts[self._now]
        self._add(part.saved, tensor, maker=part)
        return tensor.detach()  # as in `_calls_in`

    def _add(self, to: list[int], tensor: torch.Tensor, *, maker: ObservedPart) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._resident:
            return
        if storage._cdata not in self._numbers:
            number = len(self.storage_bytes)
            self._numbers[storage._cdata] = number, storage
            self.storage_bytes.append(storage.nbytes())
            maker.made.append(number)
        number, _ = self._numbers[storage._cdata]
        if number not in to:
            to.append(number)
