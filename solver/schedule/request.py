"""The request given to `solve`, and the obstacle: why no smaller budget is enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphs.files import FormatError, Record
from graphs.host_state import WHERE
from graphs.rewrites import WORDS, check_word
from solver.schedule.host_and_disk import Places
from solver.schedule.ops import Schedule
from solver.schedule.simulation import Simulation
from solver.sizes_deadlines_progress import check_time_limit

BUDGETS_OF = ("allocated", "reserved")


@dataclass(frozen=True)
class Request:
    """What `solve` was asked to plan. A schedule file contains it, so that `apply` can plan again.

    budget_bytes: bytes of the device that the step may take.
    reserve_bytes: the part of the budget that is not available to the plan (CUDA context,
        fragmentation).
    method: the name of the planning method (`solver.methods.METHODS`).
    time_limit_s: for search and proof and, if nothing is found, for explaining why; tracing is not
        included.
    seed: makes a method's random choices reproducible.
    rewrites: the word for which rewrites the plan may use (`graphs.rewrites`). "none" if a graph
        was given: it keeps the rewrites that it was made with.
    places: host memory and disk that the plan may copy to (None: it uses the device alone).
    budget_of: what the budget limits: "allocated", the bytes that tensors hold, or "reserved", the
        bytes that PyTorch's caching allocator takes from a CUDA device for them
        (`solver.schedule.reserved_memory`).
    optimizer_state: where the optimizer's state is: "device", "host", or "auto" for whichever gives
        the faster plan.
    parameters: likewise for parameters while no operator reads them. They can be on the host only
        together with the optimizer's state.

    Raises ValueError for a time limit that is not a positive number, and for an unknown value of
    rewrites, budget_of, optimizer_state or parameters.
    """

    budget_bytes: int
    reserve_bytes: int = 0
    method: str = "auto"
    time_limit_s: float = 60.0
    seed: int = 0
    rewrites: str = "none"
    places: Places | None = None
    budget_of: str = "allocated"
    optimizer_state: str = "auto"
    parameters: str = "device"

    def __post_init__(self) -> None:
        check_time_limit(self.time_limit_s)
        check_word(self.rewrites)
        if self.budget_of not in BUDGETS_OF:
            raise ValueError(f"budget_of is {self.budget_of!r}; one of {', '.join(BUDGETS_OF)}")
        for name in ("optimizer_state", "parameters"):
            if (word := getattr(self, name)) not in WHERE:
                raise ValueError(f"{name} is {word!r}; one of {', '.join(WHERE)}")

    @property
    def available_bytes(self) -> int:
        """The most bytes that the peak may have: the budget without the reserve."""
        return self.budget_bytes - self.reserve_bytes

    def excess(self, simulation: Simulation) -> str:
        """A message if the peak on device, host or disk exceeds the request; "" if all fit."""
        places = self.places or Places()
        host_bytes, disk_bytes = places.host_bytes, places.disk_bytes
        if simulation.peak_bytes > self.available_bytes:
            what, found, most = "the peak", simulation.peak_bytes, self.available_bytes
        elif simulation.host_peak_bytes > host_bytes:
            what, found, most = "the peak on the host", simulation.host_peak_bytes, host_bytes
        elif simulation.disk_peak_bytes > disk_bytes:
            what, found, most = "the peak on the disk", simulation.disk_peak_bytes, disk_bytes
        else:
            return ""
        return f"{what} is {found} bytes, above the {most} available"

    def to_json(self) -> dict[str, Any]:
        """The request in a schedule file; `from_json` reads it."""
        value = {**vars(self)}
        places = value.pop("places")
        if self.optimizer_state == "auto":
            del value["optimizer_state"]
        if self.parameters == "device":
            del value["parameters"]
        return value if places is None else {**value, "places": places.to_json()}

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], *, source: str, budget_bytes: int, method: str
    ) -> Request:
        """Read the request in a schedule file.

        method: the method if the request does not name one.

        Raises FormatError naming the field.
        """
        record = Record(value, where=source)
        time_limit_s = record.number("time_limit_s", default=60.0)
        if time_limit_s == 0:
            raise FormatError(f"{source}: field 'time_limit_s' is 0; it must be above zero")
        places = record.mapping("places", default={})
        request = cls(
            budget_bytes=budget_bytes,
            reserve_bytes=record.integer("reserve_bytes", default=0),
            method=record.string("method", default=method),
            time_limit_s=time_limit_s,
            seed=record.integer("seed", default=0),
            rewrites=record.choice("rewrites", WORDS, default="none"),
            places=Places.from_json(places, source=f"{source}: places") if places else None,
            budget_of=record.choice("budget_of", BUDGETS_OF, default="allocated"),
            optimizer_state=record.choice("optimizer_state", WHERE, default="auto"),
            parameters=record.choice("parameters", WHERE, default="device"),
        )
        if request.reserve_bytes > budget_bytes:
            raise FormatError(f"{source}: reserve_bytes is above budget_bytes")
        return request


@dataclass(frozen=True)
class Obstacle:
    """Why no smaller budget is enough: the bottleneck op, and what must be live while it runs.

    proven_bytes: no schedule at all has a smaller peak.
    reached_bytes: the smallest peak of any schedule that was found.
    schedule: the schedule with that peak (None: a method found it, and can find it again).
    op: the node at which `proven_bytes` are needed.
    on_device: (tensor, bytes) for the tensors that are live while `op` runs, largest first.
    cut_short: the time limit or Ctrl-C ended the search, so a smaller peak may be reachable and a
        larger one may be provable.
    """

    proven_bytes: int
    reached_bytes: int
    schedule: Schedule | None = field(repr=False)
    op: str
    on_device: tuple[tuple[str, int], ...]
    cut_short: bool = False
