"""A step observed in eager mode: which submodules run in sequence, and what each takes.

Nothing is traced: real steps run, with hooks on modules and tensors. A step is cut into parts, in
turn what runs outside of the chosen submodules and one of these. For each part: how long its
forward and its backward take, what it saves for backward, and its peak memory above that. All that
the steps change (buffers, gradients, random state) is restored.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from graphs.calls import device_of, nested
from graphs.costs import begin_part, cpu_peak_bytes_by_part
from scheduler_runtime.by_submodule.eager_step import state_restored
from scheduler_runtime.measuring import CudaPeaks

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
    """parts: outside, submodule, outside, submodule, ..., outside. storage_bytes: by number."""

    parts: tuple[ObservedPart, ...]
    storage_bytes: tuple[int, ...]

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the submodules, in the order in which they run."""
        return tuple(part.path for part in self.parts if part.path)


def find_sequence(model: nn.Module, step: Callable[[], torch.Tensor]) -> tuple[str, ...]:
    """The submodules to plan: they run in sequence, called by the same module, once each.

    Of all such sequences the one that saves the most for backward beside its largest member, for
    that is what checkpoints can win. Returns paths; empty where there is none.
    """
    calls = _Calls(model)
    with state_restored(model), calls.recorded():
        step()
    n_calls = Counter(call.path for call in calls.calls)
    sequences: dict[int, list[_Call]] = defaultdict(list)
    for call in calls.calls:
        if n_calls[call.path] == 1:
            sequences[call.parent].append(call)

    def gain_bytes(sequence: list[_Call]) -> int:
        sizes = [call.saved_bytes for call in sequence]
        return sum(sizes) - max(sizes)

    best = max(sequences.values(), key=gain_bytes, default=[])
    return tuple(call.path for call in best) if best and gain_bytes(best) else ()


def observe(
    model: nn.Module,
    step: Callable[[], torch.Tensor],
    blocks: Sequence[str],
    *,
    resident: Sequence[torch.Tensor] = (),
) -> Observed:
    """Run real steps and observe these submodules.

    step: forward pass and loss.
    blocks: submodules called once each, one after another.
    resident: what is there before the step beside parameters and buffers (the batch).
    """
    watch = _Watch(model, blocks, resident)

    def run() -> None:
        loss = step()
        watch.mark(f"backward {len(watch.parts) - 1}")
        loss.backward()

    with state_restored(model), watch.hooked(saving=True):
        run()
    device = device_of(model)
    with state_restored(model), watch.hooked(saving=False):
        if device.type == "cuda":
            watch.cuda_peaks = CudaPeaks(device)
            run()
            peaks, watch.cuda_peaks = watch.cuda_peaks.ended(), None
        else:
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


@dataclass
class _Call:
    """parent: number of the call inside of which it runs; -1: none."""

    path: str
    parent: int
    saved_bytes: int = 0


class _Calls:
    """Which module calls which, and how many bytes are saved for backward inside of each call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open: list[int] = [-1]
        # storages by address; held, so that none gets another's address
        self._seen = {storage._cdata: storage for storage in _state_storages(model)}
        self.calls: list[_Call] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        paths = {module: path for path, module in self._model.named_modules() if path}

        def enter(module: nn.Module, _args: Any) -> None:
            self.calls.append(_Call(paths[module], self._open[-1]))
            self._open.append(len(self.calls) - 1)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._open.pop()

        handles: list[Any] = []
        for module in paths:
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            for index in self._open[1:]:
                self.calls[index].saved_bytes += storage.nbytes()
        return tensor


def _state_storages(model: nn.Module) -> Iterator[Any]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.untyped_storage()


class _Watch:
    """Marks where parts begin, and in a first step what they allocate, read and save."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], resident: Sequence[torch.Tensor] = ()
    ) -> None:
        self._model = model
        self._blocks = tuple(blocks)
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self.storage_bytes: list[int] = []
        self.parts = [ObservedPart("")]
        for path in self._blocks:
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
        handles: list[Any] = []
        for position, path in enumerate(self._blocks):
            module = self._model.get_submodule(path)
            before, after = self._hooks(2 * position + 1, saving=saving)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        self._now = 0
        self._marks = []
        try:
            with contextlib.ExitStack() as stack:
                if saving:
                    stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
                self.mark("forward 0")
                yield
                self.mark("end")
        finally:
            for handle in handles:
                handle.remove()
            for part, tensor, version in self._arguments:
                part.overwritten |= tensor._version != version
            self._arguments.clear()
            self._alive.clear()

    def _hooks(self, index: int, *, saving: bool) -> tuple[Any, Any]:
        part, outside = self.parts[index], self.parts[index - 1]

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in nested.tensors((args, kwargs)):
                if saving:
                    self._add(part.read, tensor, maker=outside)
                    self._arguments.append((part, tensor.detach(), tensor._version))
                # a gradient of what comes directly from a submodule is where its backward begins
                is_direct = any(tensor is output() for output in self._direct)
                if tensor.requires_grad and not is_direct:
                    tensor.register_hook(self._marking(f"backward {index - 1}"))
            self._now = index
            self.mark(f"forward {index}")

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._direct = [weakref.ref(tensor) for tensor in nested.tensors(output)]
            for tensor in nested.tensors(output):
                if saving:
                    self._add(self.parts[index + 1].read, tensor, maker=part)
                if tensor.requires_grad:
                    tensor.register_hook(self._marking(f"backward {index}"))
            self._now = index + 1
            self.mark(f"forward {index + 1}")

        return before, after

    def _marking(self, name: str) -> Callable[[Any], None]:
        return lambda _gradient: self.mark(name)

    def mark(self, name: str) -> None:
        if self.cuda_peaks is not None:
            self.cuda_peaks.begin(name)
        else:
            for card in self._cards:  # else the host's time would be measured
                torch.cuda.synchronize(card)
        self._marks.append((name, time.perf_counter()))
        begin_part(name)

    def seconds(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        for (name, begun_s), (_, ended_s) in zip(self._marks, self._marks[1:], strict=False):
            spent[name] = spent.get(name, 0.0) + ended_s - begun_s
        return spent

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        part = self.parts[self._now]
        self._add(part.saved, tensor, maker=part)
        return tensor

    def _add(self, to: list[int], tensor: torch.Tensor, *, maker: ObservedPart) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._resident:
            return
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = len(self.storage_bytes)
            self._numbers[storage._cdata] = number
            self._alive.append(storage)  # so that no other gets its place
            self.storage_bytes.append(storage.nbytes())
            maker.made.append(number)
        if number not in to:
            to.append(number)
