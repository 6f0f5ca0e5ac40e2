"""What `solve` returns: the request, the schedule, what it costs, and its proven lower bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from graphs.files import Record, read_json, write_json
from graphs.fsdp import sharding_words
from graphs.graph import Graph, as_eager
from graphs.host_state import (
    optimizer_of,
    parameters_on_host,
    with_state_on_device,
    with_state_on_host,
)
from graphs.passes import passes_of
from graphs.pipeline import pipeline_of
from graphs.rewrites import Variants
from graphs.zero import zero_words
from solver.schedule.ops import Schedule, ops_from_json
from solver.schedule.peak_memory import PeakMemory
from solver.schedule.recompute import baseline as baseline_schedule
from solver.schedule.request import Obstacle, Request
from solver.schedule.simulation import IllegalScheduleError, OtherGraphError, Simulation
from solver.schedule.simulator import simulate
from solver.sizes_deadlines_progress import (
    counted,
    describe_op,
    format_share,
    format_size,
    format_size_up,
)

Status = Literal["optimal", "feasible", "infeasible", "time_limit"]
STATUSES: tuple[str, ...] = get_args(Status)
FORMAT, OLDER_FORMATS = "schedule/2", ("schedule/1",)
OPTIMAL_GAP = 1e-3
"""A schedule is called optimal if its gap is at most this share of the baseline's time."""


@dataclass(frozen=True)
class Solution:
    """What `solve` returns; `apply` runs it, `solver.report` prints it, `save` writes it.

    status: "optimal" (gap at most OPTIMAL_GAP), "feasible", "infeasible" (nothing was found), or
        "time_limit" (nothing was found in time).
    graph: the step that the schedule is for: the variant with the best plan.
    schedule, simulation: the plan and what it costs (None: nothing was found).
    baseline: the simulation of the step as PyTorch runs it without a plan (`unplanned`).
    lower_bound_s: no schedule that keeps the order of first computation and fits the budget is
        faster.
    obstacle: why nothing was found (None: something was).
    timed_out: the time limit ended the search: more time might find a better plan, and another
        machine might find a different one.
    interrupted: Ctrl-C, not the time limit, ended the search.
    variants: the programs that `graph` was chosen from (None: only one was given).
    """

    status: Status
    graph: Graph
    schedule: Schedule | None
    simulation: Simulation | None
    request: Request
    baseline: Simulation
    lower_bound_s: float
    method: str
    solve_time_s: float
    obstacle: Obstacle | None = None
    timed_out: bool = False
    interrupted: bool = False
    variants: Variants | None = field(default=None, repr=False)

    @property
    def plain(self) -> Graph:
        """The step without rewrites if it is known, else the graph of the plan."""
        return self.graph if self.variants is None else self.variants.plain

    @property
    def step(self) -> Variants:
        """The programs that `graph` was chosen from, or `graph` alone if they are not known."""
        return Variants.of(self.variants or self.graph)

    @cached_property
    def unplanned(self) -> Graph:
        """The plain step with the tensor lifetimes of eager mode (`graphs.graph.as_eager`)."""
        return as_eager(self.plain)

    @cached_property
    def peaks(self) -> tuple[PeakMemory, ...]:
        """The memory at the peak of the baseline and, if a plan differs from it, of the plan."""
        plain, found = self.baseline, self.simulation
        unplanned = baseline_schedule(self.unplanned)
        before = PeakMemory("baseline", self.unplanned, unplanned, plain)
        if self.schedule is None or found is None:
            return (before,)
        if found.n_recomputed or self.schedule.has_copies or found.peak_bytes != plain.peak_bytes:
            return before, PeakMemory("plan", self.graph, self.schedule, found)
        return (before,)

    @property
    def trace(self) -> Simulation | None:
        """The former name of `simulation`."""
        return self.simulation

    def __repr__(self) -> str:
        """One line: the request, the plan found, and the proven bound."""
        request_text = (
            f"{self.method}, {self.status}, budget {format_size(self.request.budget_bytes)}"
        )
        environment = self.graph.meta.environment
        if words := sharding_words(environment) or zero_words(environment):
            request_text += f" {words}"
        if (pipeline := pipeline_of(environment)) is not None:
            request_text += f", {pipeline.words}"
        if (passes := passes_of(environment)).n > 1:
            request_text += f", {passes.words}"
        if self.simulation is None or self.overhead is None:
            return f"Solution({request_text}: no schedule{self.obstacle_text})"
        host, disk = self.simulation.host_peak_bytes, self.simulation.disk_peak_bytes
        copy_texts = [f"{format_size(host)} on the host"] if host else []
        copy_texts += [f"{format_size(disk)} on the disk"] if disk else []
        copies_text = f"at most {', '.join(copy_texts)}; " if copy_texts else ""
        return (
            f"Solution({request_text}: peak {format_size(self.simulation.peak_bytes)}, "
            f"without checkpointing {format_size(self.baseline.peak_bytes)}; "
            f"{copies_text}overhead {_unsigned_share(self.overhead)}, "
            f"proven at least {_unsigned_share(self.lower_bound_overhead)}; "
            f"{counted(self.simulation.n_recomputed, 'op')} recomputed)"
        )

    @property
    def proven_infeasible(self) -> bool:
        """Whether it is proven that no schedule fits, whichever method makes it."""
        obstacle, available_bytes = self.obstacle, self.request.available_bytes
        is_below = obstacle is not None and obstacle.proven_bytes > available_bytes
        return self.simulation is None and (math.isinf(self.lower_bound_s) or is_below)

    @property
    def fits_without_plan(self) -> bool:
        """Whether no plan was found, yet the step as PyTorch runs it without a plan fits.

        This can happen because eager mode updates some tensors in place that the planned program
        copies.
        """
        fits = self.baseline.peak_bytes <= self.request.available_bytes
        return self.simulation is None and fits

    @property
    def minimum_budget_bytes(self) -> int | None:
        """The smallest budget with a known schedule, reserve included (None: unknown)."""
        if self.obstacle is None:
            return None
        return self.obstacle.reached_bytes + self.request.reserve_bytes

    @property
    def proven_minimum_bytes(self) -> int:
        """The budget, reserve included, below which provably no schedule fits (0: unknown)."""
        if self.obstacle is None or not self.obstacle.proven_bytes:
            return 0
        return self.obstacle.proven_bytes + self.request.reserve_bytes

    @property
    def obstacle_text(self) -> str:
        """Minimum budget and bottleneck op, to append to "nothing fits"; "" if unknown."""
        if self.obstacle is None:
            return ""
        text = f"; minimum budget found: {format_size_up(self.minimum_budget_bytes or 0)}"
        proven_bytes = self.proven_minimum_bytes
        if proven_bytes == self.minimum_budget_bytes:
            text += ", proven to be the least"
        elif proven_bytes:
            text += f", proven: at least {format_size(proven_bytes)}"
        if self.request.reserve_bytes:
            text += ", reserve included"
        if self.fits_without_plan:
            text += f"; {self.without_plan_text}"
        node = self.graph.node_by_name.get(self.obstacle.op)
        return text if node is None else f"{text}; bottleneck op: {describe_op(node)}"

    @property
    def without_plan_text(self) -> str:
        """Advice for the case `fits_without_plan`."""
        needed = format_size_up(self.baseline.peak_bytes + self.request.reserve_bytes)
        return f"without a plan the step takes {needed}, which fits: train without one"

    @property
    def overhead(self) -> float | None:
        """Extra time as a share of the baseline's; None without a schedule."""
        if self.simulation is None:
            return None
        return _share(self.simulation.time_s, self.baseline.time_s)

    @property
    def lower_bound_overhead(self) -> float:
        """The smallest overhead that a schedule within the budget may have (inf: nothing fits)."""
        return max(0.0, _share(self.lower_bound_s, self.baseline.time_s))

    @property
    def gap(self) -> float | None:
        """Overhead minus its lower bound; None without a schedule."""
        if self.simulation is None:
            return None
        slower_s = self.simulation.time_s - self.lower_bound_s
        return max(0.0, slower_s / (self.baseline.time_s or 1.0))

    def with_bound(self, lower_bound_s: float) -> Solution:
        """This solution with the larger of its bound and another one proven for the same graph and
        budget. With a schedule, the status is set by the gap to that bound.
        """
        lower_bound_s = max(lower_bound_s, self.lower_bound_s)
        status = self.status
        if self.simulation is not None:
            proven = self.simulation.time_s - lower_bound_s <= OPTIMAL_GAP * self.baseline.time_s
            status = "optimal" if proven else "feasible"
        return dataclasses.replace(self, lower_bound_s=lower_bound_s, status=status)

    @property
    def environment(self) -> Mapping[str, Any]:
        """How the graph was traced: torch, device, shapes, dtypes, train, autocast, costs."""
        return {**self.graph.meta.environment, "costs": self.graph.meta.costs}

    def save(self, path: str | Path) -> None:
        """Write schedule.json (format schedule/2) atomically: the whole file or nothing.

        Raises ValueError if there is no schedule.
        """
        if self.schedule is None or self.simulation is None:
            raise ValueError(
                f"no schedule to save: the status is {self.status}{self.obstacle_text}"
            )
        loss, of_module = self.graph.loss_part(), self.graph.module_part()
        copy_fields: dict[str, Any] = {}
        if self.simulation.host_peak_bytes:
            names = ("host_peak_bytes", "disk_peak_bytes", "stall_s")
            copy_fields = {name: getattr(self.simulation, name) for name in names}
        value = {
            "format": FORMAT,
            "graph_id": self.schedule.graph_id,
            "method": self.method,
            "status": self.status,
            "budget_bytes": self.request.budget_bytes,
            "peak_bytes": self.simulation.peak_bytes,
            "time_s": self.simulation.time_s,
            "baseline_time_s": self.baseline.time_s,
            "baseline_peak_bytes": self.baseline.peak_bytes,
            **copy_fields,
            "lower_bound_s": self.lower_bound_s,
            "rewrites": list(self.graph.meta.rewrites),
            "request": self.request.to_json(),
            "environment": {
                **self.environment,
                "module_graph_id": of_module.graph_id,
                "n_module_operators": len(of_module.nodes),
                "parameter_forms": dict(self.graph.meta.parameter_forms),
                "buffer_forms": dict(self.graph.meta.buffer_forms),
                "input_forms": list(self.graph.meta.input_forms),
                **(
                    {"saved_bytes": self.simulation.saved_bytes}
                    if self.graph.n_in_flight > 1
                    else {}
                ),
                **({"loss_graph": {**loss.to_json(), "meta": {}}} if loss.nodes else {}),
            },
            "ops": self.schedule.ops_to_json(),
        }
        write_json(path, value)

    @classmethod
    def load(cls, path: str | Path, *, graph: Graph | str | Path) -> Solution:
        """Read schedule.json against its graph and simulate the schedule.

        Bound and status are taken from the file, since proving them takes a search. Time and peak
        of the baseline are also taken from it if the graph was made by rewrites of the program:
        such a graph does not contain the step before the rewrites.

        Raises FormatError for an invalid file, IllegalScheduleError if the schedule is illegal on
        this graph or exceeds the file's request, and OSError.
        """
        graph = graph if isinstance(graph, Graph) else Graph.load(graph)
        saved = SavedSchedule.load(path)
        graph = _with_state_as_planned(graph, saved)
        if saved.schedule.graph_id != graph.graph_id:
            raise OtherGraphError(
                f"{path}: the schedule was made for another graph "
                f"({saved.schedule.graph_id[:19]}…) than the one given "
                f"({graph.graph_id[:19]}…); give the graph that was saved with it, or plan again"
            )
        variants = Variants.of(graph)
        baseline = simulate_unplanned(variants.plain)
        if variants.plain.meta.rewrites and saved.baseline_peak_bytes:
            baseline = dataclasses.replace(
                baseline, time_s=saved.baseline_time_s, peak_bytes=saved.baseline_peak_bytes
            )
        simulation = simulate(graph, saved.schedule, places=saved.request.places)
        if excess := saved.request.excess(simulation):
            raise IllegalScheduleError(
                simulation.peak_op, f"{path}: {excess} by the file's request"
            )
        return cls(
            status=saved.status,
            graph=graph,
            schedule=saved.schedule,
            simulation=simulation,
            request=saved.request,
            baseline=baseline,
            lower_bound_s=saved.lower_bound_s,
            method=saved.method,
            solve_time_s=0.0,
            variants=variants,
        )


@dataclass(frozen=True)
class SavedSchedule:
    """The contents of schedule.json: a schedule and its request, without the graph.

    rewrites: the rewrites that its graph was made with (`graphs.rewrites`).
    baseline_time_s, baseline_peak_bytes: of the plain step (0: an older file does not say).
    """

    schedule: Schedule
    method: str
    status: Status
    peak_bytes: int
    time_s: float
    lower_bound_s: float
    request: Request
    environment: Mapping[str, Any] = field(default_factory=dict)
    rewrites: tuple[str, ...] = ()
    baseline_time_s: float = 0.0
    baseline_peak_bytes: int = 0

    @classmethod
    def load(cls, path: str | Path) -> SavedSchedule:
        """Read and check the file; raises FormatError naming the field, OSError."""
        record = Record(read_json(path), where=str(path))
        record.expect_format(FORMAT, *OLDER_FORMATS)
        if record.string("format") in OLDER_FORMATS:
            record.expect_none_of("rewrites", newer=FORMAT)
        budget_bytes = record.integer("budget_bytes")
        method = record.string("method")
        request = Request.from_json(
            record.mapping("request", default={}),
            source=f"{path}: request",
            budget_bytes=budget_bytes,
            method=method,
        )
        schedule = Schedule(
            ops=ops_from_json(record.items("ops"), source=str(path)),
            graph_id=record.string("graph_id"),
        )
        return cls(
            schedule=schedule,
            method=method,
            status=record.choice("status", STATUSES),  # type: ignore[arg-type]
            peak_bytes=record.integer("peak_bytes"),
            time_s=record.number("time_s"),
            lower_bound_s=record.number("lower_bound_s"),
            request=request,
            environment=record.mapping("environment", default={}),
            rewrites=record.strings("rewrites", default=[]),
            baseline_time_s=record.number("baseline_time_s", default=0.0),
            baseline_peak_bytes=record.integer("baseline_peak_bytes", default=0),
        )


def _with_state_as_planned(graph: Graph, saved: SavedSchedule) -> Graph:
    """The graph with the optimizer's state and the parameters on host or device, as in the file."""
    graph = with_state_on_device(graph)
    optimizer = optimizer_of(saved.environment)
    places = saved.request.places
    if not optimizer.get("state_on_host") or places is None or places.host is None:
        return graph
    link = places.host.link
    parameters = parameters_on_host(saved.environment).values()
    moved = with_state_on_host(graph, out_s=link.out_s, in_s=link.in_s, parameters=parameters)
    return moved or graph


def simulate_unplanned(plain: Graph) -> Simulation:
    """Simulate the step as PyTorch runs it without a plan. plain: the step without rewrites."""
    eager = as_eager(plain)
    return simulate(eager, baseline_schedule(eager))


def _share(time_s: float, baseline_time_s: float) -> float:
    """The extra time as a share of the baseline's."""
    if math.isinf(time_s):
        return math.inf
    return (time_s - baseline_time_s) / baseline_time_s if baseline_time_s else 0.0


def _unsigned_share(overhead: float) -> str:
    return format_share(overhead).removeprefix("+")
