"""Resolve the device that a step is planned for, the device it is traced on, and its cost model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from graphs.fsdp import sharding_of
from graphs.graph import Graph
from graphs.hardware import DEVICES, Hardware, card_called, named
from solver.schedule import Link, Place, Places
from solver.sizes_deadlines_progress import (
    BudgetError,
    Rates,
    format_both,
    parse_rates,
    parse_size,
    reject_missing_unit,
    reject_share,
)

if TYPE_CHECKING:
    import torch

    from graphs.costs import CostModel

_Step = TypeVar("_Step")
_CUDA = re.compile(r"cuda(?::([0-9]{1,3}))?")


class DeviceError(ValueError):
    """The device or the cost model does not exist, or cannot be used on this machine."""


@dataclass(frozen=True)
class Target:
    """What a step is planned for, and how it is traced.

    hardware: the device that the plan is for; percentages refer to its memory.
    torch_device: the device of the traced tensors: "cpu", "cuda" or "cuda:1".
    costs: the model for each operator's seconds and workspace.
    notes: sentences for the report.
    is_absent: whether the device is a card that is not in this machine.
    """

    hardware: Hardware
    torch_device: str
    costs: CostModel
    notes: tuple[str, ...] = ()
    is_absent: bool = False

    @property
    def local_device(self) -> str:
        """The device for real tensors, and for running steps, on this machine."""
        return "cpu" if self.is_absent else self.torch_device

    def traced_with(self, trace: Callable[[Target], _Step]) -> tuple[_Step, Target]:
        """Call `trace` with this target; return its result and the target that was used.

        If the card is absent and its operators cannot be traced, this is the CPU. Raises what
        `trace` raises.
        """
        from graphs.trace import TraceError

        try:
            return trace(self), self
        except TraceError as error:
            if not (self.is_absent and self.torch_device != "cpu"):
                raise
            on_cpu = self.on_cpu(error.short)
            try:
                return trace(on_cpu), on_cpu
            except TraceError as same:
                raise same from None

    def running_here(self) -> Target:
        """The target for a step that will run on this machine: traced on the CPU if the card is
        absent."""
        return self.on_cpu("what is planned runs here") if self.is_absent else self

    def on_cpu(self, why: str) -> Target:
        """The same target, traced on the CPU. why: the reason, for the note in the report."""
        note = (
            f"Traced on the CPU, not for the card ({why}): a forecast for {self.hardware.title}. "
            "Some operators differ there, attention in particular; create the plan to run on a "
            "machine with the device."
        )
        return dataclasses.replace(self, torch_device="cpu", notes=(note,))


def find_target(
    device: str | torch.device | None = None,
    costs: str | CostModel | None = None,
    *,
    runs_here: bool = False,
) -> Target:
    """Resolve the device and the cost model that were asked for. Imports torch.

    device: "cpu", "cuda", "cuda:1", a torch.device, or a named card such as "h100", which is traced
        for CUDA even if this machine has no card (None: CUDA if available, else the CPU).
    costs: "roofline", "measured" or a cost model (None: measured on a CUDA device of this machine,
        otherwise the roofline).
    runs_here: the plan must run on this machine, so without a card the step is traced on the CPU.

    Raises DeviceError.
    """
    import torch

    from graphs.capture import can_trace_absent
    from graphs.costs import Roofline, measured

    if isinstance(costs, str) and costs not in ("roofline", "measured"):
        raise DeviceError(f"costs is {costs!r}; expected 'roofline', 'measured' or a cost model")
    has_cuda = torch.cuda.is_available()
    name = str(device) if device is not None else "cuda" if has_cuda else "cpu"
    name = "cpu" if name == "meta" else name
    is_local = name == "cpu" or _CUDA.fullmatch(name) is not None
    if costs == "measured" and not is_local:
        raise DeviceError(
            f"costs cannot be measured for {name!r}: measuring needs the device itself "
            "('cpu' or 'cuda')"
        )
    is_measured = costs == "measured" or (costs is None and is_local and name != "cpu")
    model = None if isinstance(costs, str) else costs
    hardware = find_hardware(name, needs_rates=not is_measured and model is None)
    on_cuda = hardware.kind == "cuda" and has_cuda
    torch_device = name if is_local else "cuda" if on_cuda else "cpu"
    if model is None and is_measured:
        model = measured(torch.device(torch_device), fallback=hardware)
    elif model is None:
        model = Roofline(hardware)
    target = Target(hardware, torch_device, model)
    if hardware.kind == "cpu" or on_cuda:
        return target
    target = dataclasses.replace(target, is_absent=True)
    if runs_here:
        return target.running_here()
    if not can_trace_absent():
        return target.on_cpu("this build of PyTorch has no fake CUDA tensors")
    note = (
        f"No card is in this machine: a forecast for {hardware.title}, with the operators that "
        "PyTorch picks for it by the rules of its source."
    )
    return dataclasses.replace(target, torch_device="cuda", notes=(note,))


def host_places(
    budget: str | int | float | None,
    link: Rates | None = None,
    *,
    hardware: Hardware | None,
    costs: CostModel | None = None,
    resident_bytes: int = 0,
) -> Places | None:
    """The host memory that a plan may copy to (None: no budget for it is given).

    budget: bytes of pinned host memory: "64GB", 64e9.
    link: bytes per second for both directions, "50GB/s", or away from the device and back to it:
        "50GB/s,40GB/s", ("50GB/s", "40GB/s"). None: measured if the costs are measured, else the
        hardware's. If the link is given, the latency of a copy is the hardware's (0 if unknown).
    resident_bytes: resident bytes of the step, to reject "64" if 64 GB was meant.

    Raises BudgetError for an invalid size or rate, a link without a budget, an unknown link, and
    for more memory than the host of a superchip has.
    """
    if budget is None:
        if link is not None:
            raise BudgetError(
                f"a link to the host is given ({link!r}) and no host memory; say how much a plan "
                "may use (--host 64GB, or in Python host_budget='64GB')"
            )
        return None
    reject_share(budget, what="host budget")
    capacity_bytes = parse_size(budget, what="host budget")
    reject_missing_unit(budget, resident_bytes=resident_bytes, what="host budget")
    copies = None if hardware is None else hardware.host_copies
    most_bytes = None if copies is None else copies.capacity_bytes
    if most_bytes is not None and capacity_bytes > most_bytes:
        raise BudgetError(
            f"invalid host budget {budget!r}: the host of this device has {format_both(most_bytes)}"
        )
    if link is None:
        copies = getattr(costs, "host_copies", None) or copies
        if copies is None:
            raise BudgetError(
                "the rate of the link to the host is unknown; give it (--host-link 50GB/s, or in "
                "Python host_link='50GB/s') or name a device (--device h100, device='h100')"
            )
        rates = copies.out_bytes_per_s, copies.in_bytes_per_s
    else:
        rates = parse_rates(link, what="host link", example="50GB/s,40GB/s")
    latency_s = 0.0 if copies is None else copies.latency_s
    return Places(host=Place(capacity_bytes, Link(*rates, latency_s)))


def find_hardware(name: str, *, needs_rates: bool = True) -> Hardware:
    """The hardware of a named device or, for "cuda" and "cuda:1", of a card in this machine.

    needs_rates: reject a card whose rates are unknown. Otherwise it gets the rates of an H100,
        which are used only for operators that cannot be measured.

    Raises DeviceError.
    """
    local = _CUDA.fullmatch(name)
    if local is not None:
        return _local_card(int(local.group(1) or 0), needs_rates=needs_rates)
    if name.split(":")[0] in ("mps", "xpu"):
        raise DeviceError(
            f"device {name!r} is not supported: steps are planned for cpu and cuda only, where "
            "peak memory can be measured and random numbers reproduced"
        )
    try:
        return named(name)
    except ValueError as error:
        raise DeviceError(f"{error}, or cuda, cuda:1 for a card of this machine") from error


def _local_card(index: int, *, needs_rates: bool) -> Hardware:
    """The hardware of the card cuda:`index` in this machine, with its own capacity."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            "device 'cuda': no CUDA device is available; name a card ('h100') to plan for it, or "
            "use 'cpu'"
        )
    n_cards = torch.cuda.device_count()
    if index >= n_cards:
        raise DeviceError(
            f"device 'cuda:{index}' does not exist: {n_cards} CUDA devices, from cuda:0 on"
        )
    card = torch.cuda.get_device_properties(index)
    known = card_called(card.name, capacity_bytes=card.total_memory)
    if known is None and not needs_rates:
        capability = (card.major, card.minor)
        known = dataclasses.replace(named("h100"), title=card.name, compute_capability=capability)
    if known is None:
        raise DeviceError(
            f"no rates are known for {card.name}: use measured costs, or name a similar card "
            f"({', '.join(DEVICES)})"
        )
    return dataclasses.replace(known, capacity_bytes=card.total_memory)


def check_budget_of(budget_of: str, *, kind: str | None) -> None:
    """Raise BudgetError for a budget of reserved memory on a device without a caching allocator.

    kind: of the device: "cuda" or another one (None: unknown).
    """
    if budget_of == "reserved" and kind not in ("cuda", None):
        raise BudgetError(
            f"a budget of reserved memory is for CUDA's caching allocator, and the plan is for "
            f"{kind!r}; name a card (--device h100, device='h100'), or leave the option out"
        )


def check_step_allows(graph: Graph, *, with_host: bool, budget_of: str) -> None:
    """Raise BudgetError for a host, or a budget of reserved memory, that this step cannot have."""
    if with_host and sharding_of(graph.meta.environment) is not None:
        raise BudgetError(
            "copies to the host: not planned with FSDP2, which runs exported plans, and an "
            "exported plan cannot copy during the computation; leave out --host (host_budget=) or "
            "--fsdp (fsdp=)"
        )
    if graph.n_in_flight == 1 or not (with_host or budget_of == "reserved"):
        return
    what = "copies to the host" if with_host else "a budget of reserved memory"
    option = "--host (host_budget=)" if with_host else "--budget-of (budget_of=)"
    raise BudgetError(
        f"{what}: not planned for a step with {graph.n_in_flight} micro-batches or passes in "
        f"flight; leave out {option}"
    )
