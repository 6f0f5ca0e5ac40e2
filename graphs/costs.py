"""What one operator call costs: seconds, and bytes of workspace beside inputs and outputs.

`Roofline` computes seconds from FLOPs (torch's own registry) and bytes moved for a named device.
`Measured` runs each distinct call on the device that is there. Both are asked through `cost(call)`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from graphs.hardware import Hardware, named
from graphs.memory_events import cpu_peak_bytes

aten = torch.ops.aten

_READS_ROWS = {
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
}
"""Of their first input they read as many rows as they write, not all of it."""


@dataclass(frozen=True)
class OpCall:
    """An operator call with (fake) tensors in the places of its tensor arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any

    @classmethod
    def from_node(cls, node: torch.fx.Node) -> OpCall:
        """The call of a traced fx node, by the values in its `meta`."""
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
        return cls(target=node.target, args=args, kwargs=kwargs, value=node.meta["val"])

    def inputs(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return [item for item in leaves if isinstance(item, torch.Tensor)]

    def outputs(self) -> list[torch.Tensor]:
        return [item for item in pytree.tree_leaves(self.value) if isinstance(item, torch.Tensor)]

    def key(self) -> Any:
        """Equal for calls that cost the same: operator, shapes, strides, dtypes, options."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return (self.target, tuple(_described(item) for item in leaves))


@dataclass(frozen=True)
class Cost:
    """Seconds of one run, and bytes taken beside inputs and outputs while it runs."""

    time_s: float
    workspace_bytes: int = 0


class CostModel(Protocol):
    """Says what a call costs; `description` goes into the graph's meta and the report."""

    @property
    def description(self) -> Mapping[str, Any]: ...

    def cost(self, call: OpCall) -> Cost: ...


class Roofline:
    """max(FLOPs / rate of the dtype, bytes moved / bandwidth) of a named device; no workspace.

    Launch overheads and caches are left out, and so is what an operator takes inside (a tenth of
    the peak in convolutional nets on the CPU): measured costs know both.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    @property
    def description(self) -> Mapping[str, Any]:
        return {"model": "roofline", "device": self.hardware.name, "title": self.hardware.title}

    def cost(self, call: OpCall) -> Cost:
        compute_s = flops_of(call) / self.hardware.rate(_dtype_of(call))
        return Cost(time_s=max(compute_s, bytes_moved(call) / self.hardware.bytes_per_s))


def flops_of(call: OpCall) -> int:
    """Floating-point operations by torch's registry, and of the CPU's flash attention."""
    formula = flop_registry.get(getattr(call.target, "overloadpacket", None))
    if formula is not None:
        return int(formula(*call.args, **call.kwargs, out_val=call.value))
    if call.target is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return int(sdpa_flop_count(*(t.shape for t in call.args[:3])))
    if call.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return int(sdpa_backward_flop_count(*(t.shape for t in call.args[:4])))
    return 0


def bytes_moved(call: OpCall) -> int:
    """Bytes of all tensors read and written, each once."""
    inputs, outputs = call.inputs(), call.outputs()
    written = sum(_n_bytes(item) for item in outputs)
    if call.target in _READS_ROWS:
        return 2 * written + sum(_n_bytes(item) for item in inputs[1:])
    return written + sum(_n_bytes(item) for item in inputs)


class Measured:
    """Each distinct call is run on the device: the median of a few runs, and its workspace.

    Inputs are random numbers of the call's shapes, strides and types (zeros for integers, which are
    valid indices). Only the tensors of one call are held at a time. A call that cannot be run by
    itself is costed by the roofline of `fallback`; `n_fallbacks` counts them. The random state
    is as before afterwards.
    """

    def __init__(
        self, device: torch.device | str, *, fallback: Hardware | None = None, n_runs: int = 5
    ) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device}; measuring knows cpu and cuda")
        self.n_fallbacks = 0
        self._roofline = Roofline(named("cpu") if fallback is None else fallback)
        self._n_runs = n_runs
        self._known: dict[Any, Cost] = {}

    @property
    def description(self) -> Mapping[str, Any]:
        return {
            "model": "measured",
            "device": self.device.type,
            "title": _device_title(self.device),
            "n_distinct": len(self._known),
            "n_fallbacks": self.n_fallbacks,
        }

    def cost(self, call: OpCall) -> Cost:
        key = call.key()
        if key not in self._known:
            self._known[key] = self._measure(call)
        return self._known[key]

    def _measure(self, call: OpCall) -> Cost:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            try:
                run = _runnable(call, self.device)
                run()
            except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
                self.n_fallbacks += 1
                return self._roofline.cost(call)
            return Cost(time_s=self._time_s(run), workspace_bytes=self._workspace_bytes(run, call))

    def _time_s(self, run: Callable[[], Any]) -> float:
        times_s: list[float] = []
        while len(times_s) < self._n_runs and (len(times_s) < 3 or sum(times_s) < 0.5):
            times_s.append(
                _seconds_cuda(run, self.device) if self.device.type == "cuda" else _seconds(run)
            )
        return statistics.median(times_s)

    def _workspace_bytes(self, run: Callable[[], Any], call: OpCall) -> int:
        made = _made_bytes(call)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            run()
            peak = torch.cuda.max_memory_allocated(self.device) - before
        else:
            peak = cpu_peak_bytes(run).peak_bytes
        return max(0, peak - made)


def from_description(description: Mapping[str, Any]) -> CostModel:
    """The cost model that a graph's meta describes; a generic CPU's roofline where it says none."""
    if description.get("model") == "measured":
        device = str(description.get("device", "cpu"))
        if device == "cpu" or torch.cuda.is_available():
            return Measured(device)
    return Roofline(named(str(description.get("device", "cpu"))))


def _seconds(run: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def _seconds_cuda(run: Callable[[], Any], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _runnable(call: OpCall, device: torch.device) -> Callable[[], Any]:
    """The call with real tensors of the same shapes, strides and types."""
    flat, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    real = [_like(item, device) if isinstance(item, torch.Tensor) else item for item in flat]
    args, kwargs = pytree.tree_unflatten(real, spec)
    return lambda: call.target(*args, **kwargs)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    storage = torch.empty(0, dtype=tensor.dtype, device=device).set_(new.untyped_storage())
    if tensor.dtype.is_floating_point:
        storage.normal_()
    else:
        storage.zero_()
    return new


def _made_bytes(call: OpCall) -> int:
    """Bytes of the storages that the call allocates for its outputs, each once."""
    storages = {
        item.untyped_storage()._cdata: item.untyped_storage().nbytes() for item in call.outputs()
    }
    for item in call.inputs():
        storages.pop(item.untyped_storage()._cdata, None)
    return sum(storages.values())


def _n_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype_of(call: OpCall) -> str:
    """The dtype that the operator computes in: that of its largest floating-point input."""
    floating = [item for item in call.inputs() or call.outputs() if item.dtype.is_floating_point]
    if not floating:
        return "float32"
    return str(max(floating, key=lambda item: item.numel()).dtype).removeprefix("torch.")


def _described(item: object) -> Any:
    if isinstance(item, torch.Tensor):
        return (tuple(item.shape), item.stride(), item.dtype)
    return repr(item)


def _device_title(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"this machine's CPU ({torch.get_num_threads()} threads)"
