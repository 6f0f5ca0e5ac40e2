"""Cost models: seconds and workspace bytes of one operator call.

`Roofline` computes seconds from FLOPs and bytes moved for a known device. `Measured` runs each
distinct call on the device of this machine. Both have the method `cost(call)`. `NodeCosts` adds up
the costs of a traced program.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphs.costs.cache import CostCache, default_cache_file
from graphs.costs.collectives import Collective, is_collective, is_wait
from graphs.costs.cuda_workspace import cuda_workspace_bytes
from graphs.costs.device_memory import CudaPeaks, free_bytes
from graphs.costs.host_copies import measured_host_copies, seconds_of
from graphs.costs.loops import loop_cost, row_loop
from graphs.costs.memory_events import cpu_peak_bytes
from graphs.costs.observed import observed_run
from graphs.costs.operators import Cost, OpCall, aten, bytes_moved, dtype_of, flops_of
from graphs.costs.real_calls import runner
from graphs.costs.workspace import cpu_workspace_bytes
from graphs.files import FormatError
from graphs.hardware import Hardware, HostCopies, Link, card_called, link_between, link_named, named

logger = logging.getLogger(__name__)

DISPATCH_S = 5e-6
"""Seconds in which eager PyTorch dispatches one operator, however small: `torch.ops.aten.add` of
eight numbers takes 5 µs and `mm` of 8 x 8 takes 7 µs from Python on a server core with torch 2.13.
On a GPU the host dispatches while the device works, so an operator takes at least this long; it is
not added to the device's time."""

TIME_PER_CALL_S = 0.5
"""Measuring one call stops once its runs have taken this long; a slower call runs once more."""

BATCH_S, MOST_IN_BATCH = 2e-3, 50
"""On CUDA, short calls are timed in batches of about BATCH_S seconds and at most MOST_IN_BATCH
runs. With events around every single run, the device would wait for the host's dispatch, and that
wait would be timed too."""

_CALL_ERRORS = (RuntimeError, LookupError, TypeError, ValueError, AssertionError, MemoryError)
"""What a call raises that cannot be run in isolation."""


class CostModel(Protocol):
    """Gives the cost of a call; `description` goes into the graph's meta and the report.

    A model may also have the attribute `host_copies` (`graphs.hardware.HostCopies`), for plans that
    move tensors to host memory; without it, the rates of the named device are used.
    """

    @property
    def description(self) -> Mapping[str, Any]: ...

    def cost(self, call: OpCall) -> Cost: ...


class Roofline:
    """max(FLOPs / rate of the dtype, bytes moved / bandwidth, dispatch) of a named device.

    float32 products run at the TF32 rate where torch's settings of this process allow it and the
    device has it: by default in convolutions, not in matrix products. Not modelled: caches, and
    that no operator reaches the peak rates. Workspace is estimated from what the device's kernels
    allocate; that of cuDNN's convolutions can only be measured and counts as 0.

    hardware: the device.
    link: the connection to the other ranks, for collectives (default: `link_between(hardware)`).
    """

    def __init__(self, hardware: Hardware, *, link: Link | None = None) -> None:
        self.hardware = hardware
        self.link = link_between(hardware) if link is None else link

    @property
    def description(self) -> Mapping[str, Any]:
        is_usual = self.link is link_between(self.hardware)
        return {
            "model": "roofline",
            "device": self.hardware.name,
            "title": self.hardware.title,
            **({} if is_usual else {"link": self.link.name}),
        }

    def cost(self, call: OpCall) -> Cost:
        if (collective := Collective.of(call)) is not None:
            on_cpu = self.hardware.kind == "cpu"
            copied_bytes = collective.gloo_workspace_bytes if on_cpu else 0
            return Cost(collective.time_s(self.link), copied_bytes)
        if call.is_view() or is_wait(call.target):
            return Cost(time_s=0.0)
        if (loop := row_loop(call)) is not None:
            return loop_cost(loop, call, self.cost)
        if (run := observed_run(call)) is not None:
            return Cost(sum(self.cost(each).time_s for each in run.calls), run.workspace_bytes)
        compute_s = flops_of(call) / self.hardware.rate(_rate_name(call))
        transfer_s = bytes_moved(call) / self.hardware.bytes_per_s
        is_cpu = self.hardware.kind == "cpu"
        workspace_bytes = cpu_workspace_bytes(call) if is_cpu else cuda_workspace_bytes(call)
        return Cost(max(compute_s, transfer_s, DISPATCH_S), workspace_bytes)


def _rate_name(call: OpCall) -> str:
    """The dtype that the call computes in; "tfloat32" where torch may use it for float32."""
    dtype = dtype_of(call)
    if dtype != "float32":
        return dtype
    settings: Any = torch.backends.cuda.matmul
    if call.packet in (aten.convolution, aten.convolution_backward):
        settings = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    elif call.packet in (aten._cudnn_rnn, aten._cudnn_rnn_backward):
        settings = torch.backends.cudnn.rnn
    return "tfloat32" if settings.fp32_precision == "tf32" else dtype


class Measured:
    """Runs each distinct call on the device, for the median time of a few runs and its workspace.

    Inputs are random, with the call's shapes, strides and dtypes: uniform between 0 and 1, but
    normally distributed in matrix products, since the values affect the power draw and with it the
    clock (an H200 takes 2 to 5 % longer). Integers are valid indices in operators that look up
    rows, the ends of equal groups in grouped products, and zeros elsewhere. Inputs may be in the
    card's cache: on an H200 that makes no difference. Only the tensors of one call are held at a
    time. Active modes (autocast, FLOP counters, fake tensors) do not affect the runs. The random
    state is restored; on CUDA the allocator's peak statistics are not.

    device: a CPU or CUDA device of this machine.
    fallback: the hardware whose roofline is used for a call that cannot be run in isolation or
        does not fit in memory (`n_fallbacks` counts these); default: this device, or an H100 if the
        card is unknown.
    n_runs: timed runs per call.
    cache: costs saved by earlier processes; `save` adds to it.

    Raises ValueError for another device type or n_runs below 1, and RuntimeError if a call leaves
    the CUDA device in an error state, after which nothing can run.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        fallback: Hardware | None = None,
        n_runs: int = 5,
        cache: CostCache | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device}; only cpu and cuda can be measured")
        if n_runs < 1:
            raise ValueError(f"n_runs is {n_runs}; it must be at least 1")
        self.n_fallbacks = 0
        self.roofline = Roofline(_hardware_of_device(self.device) if fallback is None else fallback)
        self._n_runs = n_runs
        self._measured_costs: dict[Any, Cost] = {}
        self._cache = cache

    @property
    def description(self) -> Mapping[str, Any]:
        n_threads = torch.get_num_threads()
        return {
            "model": "measured",
            "device": self.device.type,
            "title": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"this machine's CPU ({n_threads} {'thread' if n_threads == 1 else 'threads'})",
            "fallback": self.roofline.hardware.name,
            "n_distinct": len(self._measured_costs),
            "n_fallbacks": self.n_fallbacks,
        }

    def cost(self, call: OpCall) -> Cost:
        if is_collective(call.target):  # it runs on all ranks or not at all
            return self.roofline.cost(call)
        if call.is_view() or is_wait(call.target):
            return Cost(time_s=0.0)
        if (run := observed_run(call)) is not None:
            return Cost(run.time_s, run.workspace_bytes)
        key = call.key()
        if key in self._measured_costs:
            return self._measured_costs[key]
        saved = None if self._cache is None else self._cache.get(key)
        n_fallbacks = self.n_fallbacks
        cost = self._measured_costs[key] = self._measure(call) if saved is None else Cost(*saved)
        is_new = saved is None and self.n_fallbacks == n_fallbacks  # fallbacks are not saved
        if self._cache is not None and is_new:
            self._cache.put(key, cost.time_s, cost.workspace_bytes)
        return cost

    @functools.cached_property
    def host_copies(self) -> HostCopies:
        """Rates of copies to and from the host, measured on first access."""
        return measured_host_copies(self.device)

    def save(self) -> None:
        """Write new costs to the cache, if there is one."""
        if self._cache is not None:
            self._cache.save()

    def _measure(self, call: OpCall) -> Cost:
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            _disable_current_modes(),
            torch.autocast(self.device.type, enabled=False),
            torch.random.fork_rng(devices=devices, device_type="cuda"),
            torch.no_grad(),
        ):
            try:
                return self._run(call)
            except _CALL_ERRORS as error:
                reason = f"{type(error).__name__}: {error}"
            if self.device.type == "cuda":
                # after a kernel has failed on the device every later call fails: say which it was
                try:
                    torch.cuda.synchronize(self.device)
                except RuntimeError as error:
                    raise RuntimeError(
                        f"measuring {call.target} left the device {self.device} in error "
                        f"({reason}); plan with costs='roofline' in a new process"
                    ) from error
            self.n_fallbacks += 1
            return self.roofline.cost(call)

    def _run(self, call: OpCall) -> Cost:
        """A warm-up run, timed runs, and one run for the peak memory; a slow call is timed once.

        The warm-up is never timed: cuDNN compiles its attention in it, which takes up to a second.
        """
        needed = call.made_bytes() + sum(t.untyped_storage().nbytes() for t in call.inputs())
        if needed > free_bytes(self.device):
            raise MemoryError(f"{call.target} needs {needed} bytes")
        run = runner(call, self.device)
        self._seconds(run)
        times_s = [self._seconds(run)]
        while len(times_s) < self._n_runs and sum(times_s) < TIME_PER_CALL_S:
            times_s.append(self._seconds(run))
        workspace = max(0, self._peak_bytes(run) - call.made_bytes())
        return Cost(time_s=statistics.median(times_s), workspace_bytes=workspace)

    def _seconds(self, run: Callable[[], Any]) -> float:
        once_s = seconds_of(run, self.device)
        n_together = min(MOST_IN_BATCH, int(BATCH_S / max(once_s, 1e-9)))
        if self.device.type == "cpu" or n_together < 2:
            return once_s
        return seconds_of(run, self.device, n_runs=n_together)

    def _peak_bytes(self, run: Callable[[], Any]) -> int:
        if self.device.type == "cpu":
            return cpu_peak_bytes(run).peak_bytes
        torch.cuda.synchronize(self.device)
        peaks = CudaPeaks(self.device)
        peaks.begin("run")
        run()
        return peaks.end()["run"]


def from_description(
    description: Mapping[str, Any], *, device: torch.device | None = None
) -> CostModel:
    """The cost model that a graph's meta describes; a generic CPU's roofline if it describes none.

    device: the device to measure on, if the described costs were measured on one of this type
        (None: the first device of that type). If the costs were measured on CUDA and there is none
        here, the roofline of the described `fallback` is used.
    """
    kind = str(description.get("device", "cpu"))
    if description.get("model") != "measured":
        link = description.get("link")
        return Roofline(named(kind), link=None if link is None else link_named(str(link)))
    fallback = named(str(description.get("fallback", "cpu")))
    if kind == "cuda" and not torch.cuda.is_available():
        return Roofline(fallback)
    here = device if device is not None and device.type == kind else kind
    return Measured(here, fallback=fallback)


def _hardware_of_device(device: torch.device) -> Hardware:
    """The known hardware of a device: a generic CPU, or its card (an unknown one: an H100)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return named("cpu")
    card = torch.cuda.get_device_properties(device)
    return card_called(card.name, capacity_bytes=card.total_memory) or named("h100")


def default_costs(device: torch.device) -> CostModel:
    """Measured costs on a CUDA device, where a roofline does not know the workspace of cuDNN's
    convolutions; on the CPU, the roofline of a generic CPU."""
    return measured(device) if device.type == "cuda" else Roofline(named("cpu"))


def measured(device: torch.device, *, fallback: Hardware | None = None) -> Measured:
    """A model that measures on this device; on CUDA it starts from the costs that earlier processes
    saved.

    fallback: as in `Measured`.
    """
    cache = None
    if device.type == "cuda":
        try:
            cache = CostCache(default_cache_file(device), device)
        except FormatError as error:  # the cache is implicit: a corrupt file must not fail
            logger.warning("measured costs will not be saved: %s", error)
    return Measured(device, fallback=fallback, cache=cache)


def finish_measuring(costs: CostModel) -> None:
    """Save measured costs to the file, and empty PyTorch's CUDA allocator cache.

    The allocator has cached blocks of all sizes that were measured. A step that runs afterwards
    would allocate its own besides, and the process would exceed the budget.
    """
    if not isinstance(costs, Measured):
        return
    try:
        costs.save()
    except OSError as error:
        logger.warning("measured costs were not saved: %s", error)
    if costs.device.type == "cuda":
        torch.cuda.empty_cache()


class NodeCosts:
    """Gives the cost of each fx node; adds up measured times and, for comparison, the roofline's.

    costs: the cost model; None: every node costs nothing.
    """

    def __init__(self, costs: CostModel | None) -> None:
        self._costs = costs
        self._measured_s = 0.0
        self._roofline_s = 0.0

    def __call__(self, node: torch.fx.Node) -> Cost:
        if self._costs is None:
            return Cost(time_s=0.0)
        call = OpCall.from_node(node)
        cost = self._costs.cost(call)
        if isinstance(self._costs, Measured):
            self._measured_s += cost.time_s
            self._roofline_s += self._costs.roofline.cost(call).time_s
        return cost

    @property
    def hardware(self) -> Hardware | None:
        """The hardware that the costs are for; None if the model does not say."""
        if isinstance(self._costs, Measured):
            return self._costs.roofline.hardware
        return self._costs.hardware if isinstance(self._costs, Roofline) else None

    @property
    def description(self) -> dict[str, Any]:
        """The cost model's description; for measured costs, also the sums over all operators."""
        if self._costs is None:
            return {}
        described = dict(self._costs.description)
        if isinstance(self._costs, Measured):
            described |= {"measured_s": self._measured_s, "roofline_s": self._roofline_s}
        return described
