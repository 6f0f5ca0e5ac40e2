"""The simulator's result, and the errors for schedules that break a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


class IllegalScheduleError(ValueError):
    """The schedule breaks a rule at `position`, an index into its ops (None: at the end)."""

    def __init__(self, position: int | None, reason: str) -> None:
        self.position = position
        self.reason = reason
        where = "at the end" if position is None else f"op {position}"
        super().__init__(f"illegal schedule, {where}: {reason}")


class OtherGraphError(IllegalScheduleError):
    """The schedule was made for another graph; none of its ops was simulated."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)
        self.args = (reason,)


@dataclass(frozen=True)
class Simulation:
    """The time and memory of a legal schedule.

    time_s: seconds until all computes and copies have ended.
    peak_bytes: the most bytes on the device at once, resident tensors and other micro-batches in
        flight included.
    peak_op: position of the first op that reaches the peak (None: the schedule has no ops).
    live_bytes: bytes on the device during each op: for a compute with its outputs and workspace,
        for a free after it.
    n_recomputed: number of recomputes: computes beyond each node's first.
    saved_bytes: bytes on the device when the forward pass has ended, without resident tensors.
    host_peak_bytes, disk_peak_bytes: the most bytes in host memory and on the disk at once. Host
        memory includes the optimizer's state and parameters that are there for the whole step.
    stall_s: the part of `time_s` in which nothing is computed.
    busy_s: total seconds of copies by stream: store, fetch, spill, load ({}: no copies).
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
    """One stay of a storage on the device, from the op that allocates or overwrites it to the op
    that frees or overwrites it.

    storage: its root tensor.
    layer: "kept" (made by the first run of a forward node, or by the caller's loss), "recomputed"
        (by a later run) or "gradients" (by the backward pass or the optimizer). A storage that is
        fetched from the host is "kept" or "gradients".
    start, stop: its bytes count during the ops at positions start .. stop - 1.
    """

    storage: str
    layer: Layer
    start: int
    stop: int
