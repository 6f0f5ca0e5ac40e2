"""Which device a step is planned for, where it is traced, and what says how long its ops take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphs.hardware import DEVICES, Hardware, card_called, named
from solver.figures import counted
from solver.usage import UsageError

if TYPE_CHECKING:
    from graphs.costs import CostModel


@dataclass(frozen=True)
class Target:
    """torch_device: where the tensors of the trace stand, "cpu" or "cuda". notes: sentences."""

    hardware: Hardware
    torch_device: str
    costs: CostModel
    notes: tuple[str, ...] = ()


def named_device(name: str) -> Hardware:
    """`graphs.hardware.named`, and "cuda" for the card in this machine. Raises UsageError."""
    if name == "cuda":
        return card_here()
    try:
        return named(name)
    except ValueError as error:
        raise UsageError(f"--device {name}: {error}, cuda") from error


def find_target(device: str | None, *, costs: str | None) -> Target:
    """The target of `--device` and `--costs`. Imports torch. Raises UsageError."""
    import torch

    from graphs.costs import Measured, Roofline

    has_cuda = torch.cuda.is_available()
    name = device if device is not None else ("cuda" if has_cuda else "cpu")
    hardware = named_device(name)
    torch_device = "cuda" if hardware.kind == "cuda" and has_cuda else "cpu"
    notes = []
    if hardware.kind != torch_device:
        notes.append(
            f"Traced on the CPU, since there is no CUDA device here: a forecast for "
            f"{hardware.title}. Some operators are others there (attention above all); a plan to "
            "run is made on a machine that has the device."
        )
    if costs == "measured":
        if name not in ("cpu", "cuda"):
            raise UsageError(
                f"--costs measured measures the device in this machine (--device cpu or cuda), "
                f"not {name}"
            )
        return Target(hardware, torch_device, Measured(torch_device, fallback=hardware))
    return Target(hardware, torch_device, Roofline(hardware), tuple(notes))


def card_here(index: int = 0) -> Hardware:
    """A CUDA card of this machine, with the capacity that its driver reports."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: there is no CUDA device here; name a card (--device h100) to plan for "
            "it, or --device cpu"
        )
    card = torch.cuda.get_device_properties(index)
    known = card_called(card.name, capacity_bytes=card.total_memory)
    if known is None:
        raise UsageError(
            f"--device cuda: no rates are known for {card.name}; name a card that is like it "
            f"({', '.join(DEVICES)})"
        )
    return dataclasses.replace(known, capacity_bytes=card.total_memory)


def cost_words(described: object) -> str:
    """The cost model in words, from the description that the trace wrote into the graph's meta."""
    if not isinstance(described, Mapping):
        return described if isinstance(described, str) else ""
    title = described.get("title", described.get("device", ""))
    words = f"{described.get('model', 'unknown')}, {title}"
    fallbacks = described.get("n_fallbacks")
    return (
        f"{words}; {counted(int(fallbacks), 'op')} not measured but by roofline"
        if fallbacks
        else words
    )
