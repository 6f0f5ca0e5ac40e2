"""`device` and `costs` of `solver.solve`: the words of the command line, from Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphs.hardware import DEVICES, Hardware, named
from solver.target import card_here

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
    from graphs.default_costs import measured as measured_costs

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
