"""Which device a step is planned for, where it is traced, and what says how long its ops take."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphs.hardware import DEVICES, Hardware, card_called, named
from solver.common import UsageError, counted, format_time

if TYPE_CHECKING:
    from graphs.costs import CostModel


@dataclass(frozen=True)
class Target:
    """torch_device: where the tensors of the trace stand, "cpu", "cuda" or "cuda:1". notes:
    sentences."""

    hardware: Hardware
    torch_device: str
    costs: CostModel
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """torch_device without its index."""
        return self.torch_device.split(":")[0]


_CUDA = re.compile(r"cuda(?::([0-9]{1,3}))?")
_NOT_MEASURABLE = ("mps", "xpu")


def named_device(name: str, *, needs_rates: bool = True) -> Hardware:
    """`graphs.hardware.named`, and "cuda" or "cuda:1" for a card in this machine.

    needs_rates: see `card_here`. Raises UsageError.
    """
    here = _CUDA.fullmatch(name)
    if here is not None:
        return card_here(int(here.group(1) or 0), needs_rates=needs_rates)
    if name.split(":")[0] in _NOT_MEASURABLE:
        raise UsageError(
            f"--device {name}: steps are planned for cpu and cuda alone, where the peak can be "
            "measured and random numbers be drawn again"
        )
    try:
        return named(name)
    except ValueError as error:
        raise UsageError(f"--device {name}: {error}, cuda, cuda:1") from error


def find_target(device: str | None, *, costs: str | None) -> Target:
    """The target of `--device` and `--costs`. Imports torch.

    costs: "measured", "roofline", or None: measured on a CUDA device that is here, else the
    roofline. Raises UsageError.
    """
    import torch

    from graphs.costs import Roofline, measured

    has_cuda = torch.cuda.is_available()
    name = device if device is not None else ("cuda" if has_cuda else "cpu")
    is_here = name == "cpu" or _CUDA.fullmatch(name) is not None
    if costs == "measured" and not is_here:
        raise UsageError(
            f"--costs measured measures the device in this machine (--device cpu or cuda), "
            f"not {name}"
        )
    is_measured = costs == "measured" or (costs is None and is_here and name != "cpu")
    hardware = named_device(name, needs_rates=not is_measured)
    forecast = "cuda" if hardware.kind == "cuda" and has_cuda else "cpu"
    torch_device = name if is_here else forecast
    if is_measured:
        return Target(
            hardware, torch_device, measured(torch.device(torch_device), fallback=hardware)
        )
    notes = []
    if hardware.kind != torch_device.split(":")[0]:
        notes.append(
            f"Traced on the CPU, since there is no CUDA device here: a forecast for "
            f"{hardware.title}. Some operators are others there (attention above all); a plan to "
            "run is made on a machine that has the device."
        )
    return Target(hardware, torch_device, Roofline(hardware), tuple(notes))


def card_here(index: int = 0, *, needs_rates: bool = True) -> Hardware:
    """A CUDA card of this machine, with the capacity that its driver reports.

    needs_rates: a card of unknown rates is refused; else it has an H100's, for the operators that
    cannot be measured. Raises UsageError.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: there is no CUDA device here; name a card (--device h100) to plan for "
            "it, or --device cpu"
        )
    n_cards = torch.cuda.device_count()
    if index >= n_cards:
        raise UsageError(f"--device cuda:{index}: there are {n_cards} CUDA devices, from cuda:0 on")
    card = torch.cuda.get_device_properties(index)
    known = card_called(card.name, capacity_bytes=card.total_memory)
    if known is None and not needs_rates:
        known = dataclasses.replace(named("h100"), title=card.name)
    if known is None:
        raise UsageError(
            f"--device cuda: no rates are known for {card.name}; measure them (--costs measured), "
            f"or name a card that is like it ({', '.join(DEVICES)})"
        )
    return dataclasses.replace(known, capacity_bytes=card.total_memory)


def cost_words(described: object) -> str:
    """The cost model in words, from the description that the trace wrote into the graph's meta."""
    if not isinstance(described, Mapping):
        return described if isinstance(described, str) else ""
    title = described.get("title", described.get("device", ""))
    words = f"{described.get('model', 'unknown')}, {title}"
    fallbacks = described.get("n_fallbacks")
    if fallbacks:
        words += f"; {counted(int(fallbacks), 'op')} not measured but by roofline"
    measured_s, roofline_s = (_seconds(described.get(f"{name}_s")) for name in _SUMS)
    if measured_s and roofline_s:
        words += (
            f"; {format_time(measured_s)}, {measured_s / roofline_s:.2f} times the roofline's "
            f"{format_time(roofline_s)}"
        )
    return words


_SUMS = ("measured", "roofline")


def _seconds(value: object) -> float:
    """0 for what is no number: graph files come from strangers."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


_TORCH_KINDS = ("cpu", "cuda", "meta", "mps", "xpu")


@dataclass(frozen=True)
class TraceTarget:
    """options: `device` and `costs` for `graphs.trace.trace`, those that are given. hardware: what
    a budget in percent is a share of (None: not named)."""

    options: dict[str, Any]
    hardware: Hardware | None = None


def trace_target(device: Any, costs: Any) -> TraceTarget:
    """What the two words mean here.

    device: "cpu", "cuda", "cuda:1" or a torch.device; a named card ("h100"), traced on CUDA where
        there is one, else on the CPU as a forecast; None: where the model is.
    costs: "roofline"; "measured", on the device that is here; a cost model; None: of a named card
        the roofline, of a CUDA device that is here measured, else as `trace` chooses.

    Raises ValueError.
    """
    import torch

    if isinstance(costs, str) and costs not in ("roofline", "measured"):
        raise ValueError(f"costs is {costs!r}; 'roofline', 'measured' or a cost model")
    card = _named_card(device)
    where: torch.device | None
    if card is not None:
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        where = None if device is None else torch.device(device)
    options: dict[str, Any] = {} if where is None else {"device": where}
    if costs is not None and not isinstance(costs, str):
        return TraceTarget({**options, "costs": costs}, card)
    if costs is None and card is None:
        if where is None or where.type != "cuda" or not torch.cuda.is_available():
            return TraceTarget(options)
        costs = "measured"
    if where is None:
        raise ValueError(f"costs={costs!r} needs a device: 'cpu', 'cuda' or a named card")
    return _with_costs(options, card, where, measured=costs == "measured")


def _with_costs(
    options: dict[str, Any], card: Hardware | None, where: Any, *, measured: bool
) -> TraceTarget:
    from graphs.costs import Roofline
    from graphs.costs import measured as measured_costs

    if measured and card is not None and card.name != "cpu":
        raise ValueError(
            f"costs='measured' measures the device in this machine: device='cpu' or 'cuda', not "
            f"{card.name!r}"
        )
    if card is None:
        on_cuda = where.type == "cuda"
        card = card_here(where.index or 0, needs_rates=not measured) if on_cuda else named("cpu")
    model = measured_costs(where, fallback=card) if measured else Roofline(card)
    return TraceTarget({**options, "costs": model}, card)


def _named_card(device: Any) -> Hardware | None:
    """The named device, if it is a word that is no device of torch's."""
    if not isinstance(device, str) or device.split(":")[0] in _TORCH_KINDS:
        return None
    try:
        return named(device)
    except ValueError as error:
        raise ValueError(
            f"device is {device!r}; cpu, cuda, cuda:1, or one of {', '.join(DEVICES)}"
        ) from error
