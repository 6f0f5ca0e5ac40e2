"""Observe steps in eager mode: which submodules run in sequence, and what each of them takes.

Nothing is traced: real steps run, with hooks on modules and tensors. A step is cut into parts:
alternately, what runs outside of the chosen submodules, and one of these. For each part we observe
how long its forward and backward take, what it saves for backward, and its peak memory. Everything
that the steps change (buffers, gradients, random state) is restored.
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

    path: path of the submodule ("": the part is outside of submodules).
    made, saved, read: numbers of the storages that it allocates, saves for backward, and reads as
        arguments.
    forward_s, backward_s: seconds.
    forward_peak_bytes, backward_peak_bytes: the most bytes in use above those in use at its start.
    overwritten: whether an argument of it is written in place after it was read.
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
    storage_bytes: bytes of each storage, by its number.
    container: path of the nn.Sequential that runs the submodules in a loop.
    steps: steps of that loop, each one child or several that must be recomputed together (None: no
        loop).
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
        """Temporary memory of part k's forward, beside the storages that it makes."""
        return max(0, self.parts[k].forward_peak_bytes - self.bytes_of(self.parts[k].made))


@dataclass
class _Call:
    """A call of a submodule.

    path: path of the submodule.
    parent: index of the call inside of which it runs (-1: none).
    saved_bytes: what is saved for backward inside of it.
    """

    path: str
    parent: int
    saved_bytes: int = 0


def find_sequences(
    model: nn.Module, step: Callable[[], torch.Tensor]
) -> tuple[tuple[str, ...], ...]:
    """Candidates for the submodules to plan, each as paths in the order in which they run.

    A sequence is the submodules that one module calls one after the other, each called once in a
    step. Its gain is the bytes that its members save for backward, except for the largest member:
    that is what checkpoints can save. The first candidate is the sequence with the largest gain.
    The second one is the sequences that gain the most together, none of them inside of a submodule
    of another. Only one candidate is returned if both are the same, and none if no sequence has a
    gain.

    step: runs the forward pass and returns the loss.
    """
    calls = _calls_in(model, step)
    n_calls = Counter(call.path for call in calls)
    calls_inside: dict[int, list[int]] = defaultdict(list)
    sequences: dict[int, list[int]] = defaultdict(list)  # by the call inside of which they run
    for index, call in enumerate(calls):
        calls_inside[call.parent].append(index)
        if n_calls[call.path] == 1:
            sequences[call.parent].append(index)

    def gain_bytes(sequence: Sequence[int]) -> int:
        sizes = [calls[index].saved_bytes for index in sequence]
        return sum(sizes) - max(sizes)

    def best_sequences(inside: int) -> tuple[int, list[int]]:
        """The most that sequences inside of a call gain together, and their calls."""
        parts = [best_sequences(index) for index in calls_inside[inside]]
        sequence = sequences.get(inside, [])
        alone = (gain_bytes(sequence) if sequence else 0), sequence
        finer = sum(gain for gain, _ in parts), [index for _, part in parts for index in part]
        return max(alone, finer, key=lambda each: each[0])

    best = max(sequences.values(), key=gain_bytes, default=[])
    found = [best, best_sequences(-1)[1]] if best and gain_bytes(best) else []
    paths = (tuple(calls[index].path for index in each) for each in found)
    return tuple(dict.fromkeys(paths))


def _calls_in(model: nn.Module, step: Callable[[], torch.Tensor]) -> list[_Call]:
    """The calls of submodules in a step, in order, with the bytes saved for backward in each."""
    paths = {module: path for path, module in model.named_modules() if path}
    calls: list[_Call] = []
    open_calls = [-1]
    # storages by address; holding them keeps addresses from being reused
    known_storages = {storage._cdata: storage for storage in _state_storages(model)}

    def enter(module: nn.Module, _args: Any) -> None:
        open_calls.append(len(calls))
        calls.append(_Call(paths[module], open_calls[-2]))

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        open_calls.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known_storages:
            known_storages[storage._cdata] = storage
            for index in open_calls[1:]:
                calls[index].saved_bytes += storage.nbytes()
        return tensor.detach()  # the tensor itself may hold the node that saves it: a cycle

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

    step: runs the forward pass and returns the loss.
    blocks: paths of submodules that are called once each, one after the other.
    resident: tensors that exist before the step, besides parameters and buffers (the batch).
    release: drops what `step` holds until the end of a step.
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
            peaks, watch.cuda_peaks = watch.cuda_peaks.end(), None
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
    """Marks where parts begin and, in a first step, records what they allocate, read and save."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], resident: Sequence[torch.Tensor] = ()
    ) -> None:
        self._modules = [model.get_submodule(path) for path in blocks]
        # address of a storage -> its number; the storage is held, so that no address is reused
        self._numbers: dict[int, tuple[int, Any]] = {}
        self.storage_bytes: list[int] = []
        self.parts = [ObservedPart("")]
        for path in blocks:
            self.parts += [ObservedPart(path), ObservedPart("")]
        self._resident = {storage._cdata for storage in _state_storages(model)}
        self._resident |= {tensor.untyped_storage()._cdata for tensor in resident}
        self._arguments: list[tuple[ObservedPart, torch.Tensor, int]] = []
        self._marks: list[tuple[str, float]] = []
        self._last_outputs: list[weakref.ref[torch.Tensor]] = []  # outputs of the last submodule
        self._running_part = 0  # index of the running part
        self._cuda_devices = {p.device for p in model.parameters() if p.is_cuda}
        self.cuda_peaks: CudaPeaks | None = None

    @contextlib.contextmanager
    def hooked(self, *, saving: bool) -> Iterator[None]:
        """A context with all hooks, for one step.

        saving: whether to record what parts allocate, read and save.
        """
        self._running_part = 0
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
                    self._record_storage(part.read, tensor, made_by=outside)
                    self._arguments.append((part, tensor.detach(), tensor._version))
                # for an output that comes directly from a submodule, `after` has added a hook
                is_direct = any(tensor is output() for output in self._last_outputs)
                if tensor.requires_grad and not is_direct:
                    tensor.register_hook(lambda _gradient: self.mark(f"backward {index - 1}"))
            self._running_part = index
            self.mark(f"forward {index}")

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._last_outputs = [weakref.ref(tensor) for tensor in nested.tensors(output)]
            for tensor in nested.tensors(output):
                if saving:
                    self._record_storage(following.read, tensor, made_by=part)
                if tensor.requires_grad:
                    tensor.register_hook(lambda _gradient: self.mark(f"backward {index}"))
            self._running_part = index + 1
            self.mark(f"forward {index + 1}")

        return before, after

    def mark(self, name: str) -> None:
        """Note that a part begins: "forward 3", "backward 2"."""
        if self.cuda_peaks is not None:
            self.cuda_peaks.begin(name)
        else:
            for card in self._cuda_devices:  # otherwise the host's time would be measured
                torch.cuda.synchronize(card)
        self._marks.append((name, time.perf_counter()))
        begin_part(name)

    def seconds(self) -> dict[str, float]:
        spent: dict[str, float] = defaultdict(float)
        for (name, begun_s), (_, ended_s) in itertools.pairwise(self._marks):
            spent[name] += ended_s - begun_s
        return spent

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        part = self.parts[self._running_part]
        self._record_storage(part.saved, tensor, made_by=part)
        return tensor.detach()  # as in `_calls_in`

    def _record_storage(
        self, numbers: list[int], tensor: torch.Tensor, *, made_by: ObservedPart
    ) -> None:
        """Add the number of a tensor's storage to a list.

        made_by: the part that made the storage, if it is new.
        """
        storage = tensor.untyped_storage()
        if storage._cdata in self._resident:
            return
        if storage._cdata not in self._numbers:
            number = len(self.storage_bytes)
            self._numbers[storage._cdata] = number, storage
            self.storage_bytes.append(storage.nbytes())
            made_by.made.append(number)
        number, _ = self._numbers[storage._cdata]
        if number not in numbers:
            numbers.append(number)
