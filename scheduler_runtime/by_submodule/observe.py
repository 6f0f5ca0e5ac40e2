"""A step watched in eager mode: which submodules run one after another, and what each takes.

Nothing is traced: real steps run, with hooks on modules and tensors. A step is cut into pieces, in
turn what runs outside of the chosen submodules and one of these. Of each piece it is noted how long
its forward and its backward take, which memory it puts by for its backward, and how much more it
takes for a moment. Everything that the steps change (buffers, gradients, random state) is put back.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from graphs.calls import device_of, nested
from graphs.costs import begin_part, cpu_peak_bytes_by_part
from scheduler_runtime.measuring import CudaPeaks

N_TIMED_STEPS = 3


@dataclass
class ObservedPart:
    """path: of the submodule; "" outside of them. made, saved, read: storages by number, in the
    order in which they were met. Times in seconds; peaks in bytes above the piece's start."""

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
    """pieces: outside, submodule, outside, submodule, ..., outside. storage_bytes: by number."""

    pieces: tuple[ObservedPart, ...]
    storage_bytes: tuple[int, ...]


@contextlib.contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Put back buffers, gradients and the random state."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def chain_of(model: nn.Module, step: Callable[[], torch.Tensor]) -> tuple[str, ...]:
    """The submodules that run one after another, called by the same module, once each: of all such
    rows the one that puts by the most beside its largest member. Paths; empty: there is none."""
    calls = _Calls(model)
    with as_before(model), calls.watched():
        step()
    rows: dict[int, list[int]] = {}
    for index, call in enumerate(calls.calls):
        rows.setdefault(call.parent, []).append(index)
    n_calls = Counter(call.path for call in calls.calls)
    best: tuple[int, tuple[str, ...]] = (0, ())
    for row in rows.values():
        once = [calls.calls[i] for i in row if n_calls[calls.calls[i].path] == 1]
        sizes = [call.saved_bytes for call in once]
        if len(once) > 1 and sum(sizes) - max(sizes) > best[0]:
            best = sum(sizes) - max(sizes), tuple(call.path for call in once)
    return best[1]


def observe(
    model: nn.Module,
    step: Callable[[], torch.Tensor],
    blocks: Sequence[str],
    *,
    resident: Sequence[torch.Tensor] = (),
) -> Observed:
    """step: forward and loss. blocks: submodules called once each, one after another. resident:
    what is there before the step beside parameters and buffers (the batch)."""
    watch = _Watch(model, blocks)
    watch.keep_out(resident)

    def run() -> None:
        loss = step()
        watch.start_backward()
        loss.backward()

    with as_before(model), watch.hooked(saving=True):
        run()
    device = device_of(model)
    with as_before(model), watch.hooked(saving=False):
        if device.type == "cuda":
            watch.cuda_peaks = CudaPeaks(device)
            run()
            peaks, watch.cuda_peaks = watch.cuda_peaks.ended(), None
        else:
            peaks = cpu_peak_bytes_by_part(run)
    times: dict[str, list[float]] = {}
    for _ in range(N_TIMED_STEPS):
        with as_before(model), watch.hooked(saving=False):
            run()
        for name, seconds in watch.seconds().items():
            times.setdefault(name, []).append(seconds)
    for index, piece in enumerate(watch.pieces):
        forward, backward = f"forward {index}", f"backward {index}"
        piece.forward_peak_bytes = peaks.get(forward, 0)
        piece.backward_peak_bytes = peaks.get(backward, 0)
        piece.forward_s = statistics.median(times[forward])
        piece.backward_s = statistics.median(times.get(backward, [0.0]))
    return Observed(tuple(watch.pieces), tuple(watch.storage_bytes))


@dataclass
class _Call:
    path: str
    parent: int
    saved_bytes: int = 0


class _Calls:
    """Which module calls which, and how much is put by inside of each call."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path for path, module in model.named_modules() if path}
        self._resident = {t.untyped_storage()._cdata for t in _state(model)}
        self._open: list[int] = [-1]
        self._seen: dict[int, Any] = {}
        self.calls: list[_Call] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        handles: list[Any] = []
        for module in self._paths:
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self.calls.append(_Call(self._paths[module], self._open[-1]))
        self._open.append(len(self.calls) - 1)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._open.pop()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._resident and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            for index in self._open[1:]:
                self.calls[index].saved_bytes += storage.nbytes()
        return tensor


def _state(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _tensors(value: Any) -> list[torch.Tensor]:
    return nested.tensors(value)


class _Watch:
    """Marks where pieces begin, and in a first step what they make, read and put by."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._model = model
        self._blocks = tuple(blocks)
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self.storage_bytes: list[int] = []
        self.pieces = [ObservedPart("")]
        for path in self._blocks:
            self.pieces += [ObservedPart(path), ObservedPart("")]
        self._resident = {t.untyped_storage()._cdata for t in _state(model)}
        self._arguments: list[tuple[ObservedPart, torch.Tensor, int]] = []
        self._marks: list[tuple[str, float]] = []
        self._marked: list[weakref.ref[torch.Tensor]] = []
        self._now = 0
        self._cards = {p.device for p in model.parameters() if p.is_cuda}
        self.cuda_peaks: CudaPeaks | None = None

    def keep_out(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are there before the step: they are no piece's."""
        self._resident |= {tensor.untyped_storage()._cdata for tensor in tensors}

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
                self._mark("forward 0")
                yield
                self._mark("end")
        finally:
            for handle in handles:
                handle.remove()
            for piece, tensor, version in self._arguments:
                piece.overwritten |= tensor._version != version
            self._arguments.clear()
            self._alive.clear()

    def _hooks(self, index: int, *, saving: bool) -> tuple[Any, Any]:
        piece, outside = self.pieces[index], self.pieces[index - 1]

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in _tensors((args, kwargs)):
                if saving:
                    self._add(piece.read, tensor, maker=outside)
                    self._arguments.append((piece, tensor.detach(), tensor._version))
                # what comes right from a submodule marks that one's backward, and nothing between
                direct = any(tensor is made() for made in self._marked)
                if tensor.requires_grad and not direct:
                    tensor.register_hook(self._marking(f"backward {index - 1}"))
            self._now = index
            self._mark(f"forward {index}")

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._marked = [weakref.ref(tensor) for tensor in _tensors(output)]
            for tensor in _tensors(output):
                if saving:
                    self._add(self.pieces[index + 1].read, tensor, maker=piece)
                if tensor.requires_grad:
                    tensor.register_hook(self._marking(f"backward {index}"))
            self._now = index + 1
            self._mark(f"forward {index + 1}")

        return before, after

    def _marking(self, name: str) -> Callable[[Any], None]:
        return lambda _gradient: self._mark(name)

    def _mark(self, name: str) -> None:
        if self.cuda_peaks is not None:
            self.cuda_peaks.begin(name)
        else:
            for card in self._cards:  # else the host's time would be told
                torch.cuda.synchronize(card)
        self._marks.append((name, time.perf_counter()))
        begin_part(name)

    def start_backward(self) -> None:
        """The loss is there."""
        self._mark(f"backward {len(self.pieces) - 1}")

    def seconds(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        for (name, begun_s), (_, ended_s) in zip(self._marks, self._marks[1:], strict=False):
            spent[name] = spent.get(name, 0.0) + ended_s - begun_s
        return spent

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        piece = self.pieces[self._now]
        self._add(piece.saved, tensor, maker=piece)
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
