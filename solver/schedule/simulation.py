"""What the simulator returns, and the errors of schedules that break a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


class IllegalScheduleError(ValueError):
    """The schedule breaks a rule at `position`, an index of its ops (None: at the end)."""

    def __init__(self, position: int | None, reason: str) -> None:
        self.position = position
        self.reason = reason
        where = "at the end" if position is None else f"op {position}"
        super().__init__(f"illegal schedule, {where}: {reason}")


class OtherGraphError(IllegalScheduleError):
    """The schedule is of another graph; none of its ops was simulated."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)
        self.args = (reason,)


@dataclass(frozen=True)
class Simulation:
    """What a legal schedule costs.

    time_s: seconds until computes and copies have ended.
    peak_bytes: the most on the device at once, resident tensors and other micro-batches in flight
        included.
    peak_op: position of the first op that reaches the peak (None: no ops, only resident tensors).
    live_bytes: bytes on the device during each op (outputs and workspace included for a compute,
        after the drop for a free).
    n_recomputed: computes beyond each node's first.
    saved_bytes: on the device when the forward pass has ended, beside what is resident.
    host_peak_bytes, disk_peak_bytes: the most that copies take there at once, on the host with the
        optimizer's state that is there.
    stall_s: the part of `time_s` in which nothing is computed.
    busy_s: seconds of all copies by direction: store, fetch, spill, load ({}: no copies).
    """

    time_s: float
    peak_bytes: int
    peak_op: int | None
    live_bytes: tuple[int, ...] = field(repr=False)
    n_recomputed: int
    saved_bytes: int = 0
    host_peak_bytes: int = 0
    disk_peak_bytes: int = 0
    stall_s: float = 0.0
    busy_s: Mapping[str, float] = field(default_factory=dict)


Layer = Literal["kept", "recomputed", "gradients"]


@dataclass(frozen=True, slots=True)
class Stay:
    """A storage on the device from the op that allocates or overwrites it to the one that frees or
    overwrites it.

    layer: kept (allocated by a forward op's first run, or by the caller's loss), recomputed (by a
        later run) or gradients (by the backward pass or the optimizer). Fetched again: kept, or
        gradients.
    start, stop: it counts during the ops at positions start .. stop - 1.
    """

    storage: str
    layer: Layer
    start: int
    stop: int
