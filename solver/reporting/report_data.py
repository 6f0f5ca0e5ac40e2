"""The Report object and its JSON form. `terminal` and `html` render it for people."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphs.fsdp import Sharding, sharding_of, sharding_words
from graphs.graph import Graph, Node
from graphs.hardware import is_collective, link_named
from graphs.host_state import host_parameter_bytes, with_state_on_device
from graphs.rewrites import PROGRAM_REWRITES, results_of
from graphs.zero import zero_words
from solver.module_checkpointing.for_other_frameworks import Emitted
from solver.plan_analysis import Advice, Curve, SizeSearch, overhead_range
from solver.reporting.verification import Verification
from solver.schedule import (
    PeakMemory,
    Schedule,
    Simulation,
    Solution,
    baseline,
    reserved_by_setting,
    simulate,
)
from solver.sizes_deadlines_progress import OF_THE_COMMAND, Reader, counted, format_time

FORMAT = "report/1"


@dataclass(frozen=True)
class Report:
    """Everything that the terminal report, the JSON object and the HTML page show.

    problem: name of the model, or of the file that was given.
    device, costs: the device and the cost model in words ("": the graph does not record its costs).
    solutions: one solution, or one for each method that is compared.
    refused: (method, why it cannot plan this graph).
    files: (what it contains, path) of each file written.
    notes: sentences on the step.
    verification, verify_error: the measured step, or why it could not be run.
    reserve_reason: why the default reserve applies ("": a reserve was given).
    advice: other ways to reduce memory.
    interrupted: whether Ctrl-C ended the search.
    sizes: the search for the largest batch, whose best candidate is the solution.
    curve: overhead against budget.
    emitted: the setting of another system that is closest to the budget.
    not_traced: why the step is planned by whole submodules, and how to avoid it ("": it is traced).
    reader: phrases its advice for the command line or for Python.
    """

    problem: str
    device: str
    costs: str
    solutions: tuple[Solution, ...]
    refused: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, Path], ...] = ()
    notes: tuple[str, ...] = ()
    verification: Verification | None = None
    verify_error: str = ""
    reserve_reason: str = ""
    advice: tuple[Advice, ...] = ()
    interrupted: bool = False
    sizes: SizeSearch | None = None
    curve: Curve | None = None
    emitted: Emitted | None = None
    not_traced: str = ""
    reader: Reader = OF_THE_COMMAND

    @property
    def best(self) -> Solution:
        return best(self.solutions)

    @property
    def emitted_overhead(self) -> float | None:
        """Extra time of the emitted setting as a share of the baseline."""
        if self.emitted is None:
            return None
        baseline_s = self.best.baseline.time_s
        return (self.emitted.simulation.time_s - baseline_s) / (baseline_s or 1.0)


def best(solutions: Iterable[Solution]) -> Solution:
    """The fastest solution that fits, or the first one if none fits. If several are equally fast,
    the one with the smallest peak."""
    solutions = tuple(solutions)
    return min(
        (s for s in solutions if s.simulation is not None),
        key=lambda s: (s.simulation.time_s, s.simulation.peak_bytes),  # type: ignore[union-attr]
        default=solutions[0],
    )


def _communication(graph: Graph, sharding: Sharding) -> str:
    if sharding.link is None:
        return "Communication is assumed to take no time."
    waits_s = math.fsum(node.time_s for node in graph.nodes if node.op.startswith("fsdp."))
    return (
        f"A rank waits {format_time(waits_s)} for gathers and reductions over "
        f"{link_named(sharding.link).title} that its operators do not hide."
    )


def step_notes(graph: Graph) -> Iterator[str]:
    """Sentences on how the step of this graph differs from a usual training step."""
    sharding = sharding_of(graph.meta.environment)
    if sharding is not None:
        yield (
            f"All figures are {sharding_words(graph.meta.environment)} (fully_shard on "
            f"{len(sharding.groups or ())} modules, then on the model), for the batch of one rank: "
            "shards of parameters, gradients and optimizer state, and gathered parameters with "
            f"their buffers while they are live. {_communication(graph, sharding)} The step is "
            "PyTorch's own; the only rewrite that it can have is F.cross_entropy in row chunks. "
            "Export the plan to run it: to_torch_checkpoint(model, solution)."
        )
    if words := zero_words(graph.meta.environment):
        yield (
            f"All figures are {words} of DeepSpeed, for the batch of one rank: the optimizer's "
            "state is that of the rank's part, with its copy in 32 bits, and buffers are the "
            "engine's buckets. Communication is assumed to take no time. apply the plan, then give "
            "the model to deepspeed.initialize."
        )
    if collectives := [node for node in graph.nodes if is_collective(node.op)]:
        time_s = math.fsum(node.time_s for node in collectives)
        yield (
            f"All figures are of one rank of tensor parallelism. It waits {format_time(time_s)} "
            f"for {counted(len(collectives), 'collective')}; every rank waits again for each "
            "collective that a plan recomputes."
        )
    yield from graph.meta.notes
    if made_with := [name for name in graph.meta.rewrites if name in PROGRAM_REWRITES]:
        yield (
            f"The graph was made with {', '.join(made_with)}. It does not contain the plain step: "
            "the baseline is the rewritten one without recomputation."
        )
    if graph.meta.environment and not any(node.phase == "optimizer" for node in graph.nodes):
        yield (
            "No optimizer is included: its state and the memory of its step are not counted. Pass "
            "optimizer= when tracing to include them."
        )


def describe_costs(described: object) -> str:
    """The cost model in words, from its description in the graph's meta ("": it has none)."""
    if not isinstance(described, Mapping):
        return described if isinstance(described, str) else ""
    title = described.get("title", described.get("device", ""))
    text = f"{described.get('model', 'unknown')}, {title}"
    fallbacks = described.get("n_fallbacks")
    if fallbacks:
        text += f"; {counted(int(fallbacks), 'op')} not measured, from the roofline"
    measured_s, roofline_s = (
        _seconds(described.get(f"{name}_s")) for name in ("measured", "roofline")
    )
    if measured_s and roofline_s:
        text += (
            f"; {format_time(measured_s)}, {measured_s / roofline_s:.2f} times the roofline's "
            f"{format_time(roofline_s)}"
        )
    return text


def _seconds(value: object) -> float:
    """The value, or 0 if it is not a finite number, as graph files are not trusted."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def to_json(report: Report) -> dict[str, Any]:
    """The object of `--json`. Sizes are in bytes, times in seconds; None if nothing was found."""
    answer = report.best
    graph, request = answer.graph, answer.request
    return {
        "format": FORMAT,
        "problem": report.problem,
        "graph_id": graph.graph_id,
        "n_ops": len(graph.nodes),
        "n_forward_ops": len(graph.forward_nodes),
        "device": report.device or None,
        "costs": report.costs or None,
        "budget_bytes": request.budget_bytes,
        "reserve_bytes": request.reserve_bytes,
        "budget_of": request.budget_of,
        "baseline": _run(answer.unplanned, baseline(answer.unplanned), answer.baseline),
        **_answer(answer),
        "methods": [_answer(solution) for solution in report.solutions],
        "refused": dict(report.refused),
        "verification": _verification(report),
        "files": {what: str(path) for what, path in report.files},
        "interrupted": report.interrupted,
        "not_traced": report.not_traced or None,
        "sizes": None if report.sizes is None else _sizes(report.sizes),
        "emitted": None if report.emitted is None else _emitted(report, report.emitted),
        "notes": list(report.notes),
        "advice": [asdict(advice) for advice in report.advice],
    }


RESULTS = {
    "bitwise": "bitwise identical results",
    "allclose": "last bits of the results differ",
    "lossy": "lossy: the loss is bitwise identical, gradients have errors (--verify measures them)",
}
"""How close a plan's results are to those of the plain step, in words, by class of results."""


@dataclass(frozen=True)
class Rewritten:
    """How the rewritten program of a plan differs from the plain step. All without recomputation.

    names: names of the rewrites.
    n_in_place: number of outputs that are written in place of an input.
    peak_bytes: peak of the rewritten program.
    overhead: its extra time, as a share of the plain step's time.
    results: "bitwise", "allclose" (last bits differ) or "lossy" (gradients are rounded).
    saved_bytes, overheads: by how much each rewrite lowers the peak, and its extra time as a share
        of the plain step's; () if the programs with only some of the rewrites are not known.
    plain_bytes: peak without any rewrite.
    """

    names: tuple[str, ...]
    n_in_place: int
    peak_bytes: int
    overhead: float
    results: str
    saved_bytes: tuple[int, ...]
    overheads: tuple[float, ...]
    plain_bytes: int


def rewritten(solution: Solution) -> Rewritten | None:
    """How rewrites change the step, with optimizer state on the device (None: no rewrites)."""
    graph = with_state_on_device(solution.graph)
    if not graph.meta.rewrites:
        return None
    names = tuple(graph.meta.rewrites)
    variants = solution.variants.planned if solution.variants else ()
    here = map(with_state_on_device, variants)
    by_names = {tuple(variant.meta.rewrites): variant for variant in here}
    steps = [by_names.get(names[at:]) for at in range(len(names))]  # each without one more rewrite
    known = [each for each in steps if each is not None]
    plain_bytes, plain_s = freed_early_bytes(solution), solution.baseline.time_s
    takes = [(simulate(each, baseline(each)).peak_bytes, each.baseline_time_s) for each in known]
    pairs = [*itertools.pairwise([*takes, (plain_bytes, plain_s)])]
    if len(known) < len(names):
        pairs = []
    return Rewritten(
        names=names,
        n_in_place=sum(node.overwrites is not None for node in graph.nodes),
        peak_bytes=simulate(graph, baseline(graph)).peak_bytes,
        overhead=graph.baseline_time_s / (plain_s or 1.0) - 1.0,
        results=results_of(names),
        saved_bytes=tuple(fewer[0] - more[0] for more, fewer in pairs),
        overheads=tuple((more[1] - fewer[1]) / (plain_s or 1.0) for more, fewer in pairs),
        plain_bytes=plain_bytes,
    )


def freed_early_bytes(solution: Solution) -> int:
    """The plain step's peak if each tensor is freed after its last use, as plans do (the baseline's
    peak if the plain step is not known)."""
    if solution.plain.meta.rewrites:
        return solution.baseline.peak_bytes
    return simulate(solution.plain, baseline(solution.plain)).peak_bytes


def _answer(solution: Solution) -> dict[str, Any]:
    """The solution of one method; the fields of the schedule are None if there is no schedule."""
    schedule, simulation = solution.schedule, solution.simulation
    run = schedule and simulation and _run(solution.graph, schedule, simulation)
    return {
        "status": solution.status,
        "method": solution.method,
        "schedule": run,
        "rewrites": (found := rewritten(solution)) and asdict(found),
        "overhead": solution.overhead,
        "overhead_range": overhead_range(solution),
        "lower_bound_s": _finite(solution.lower_bound_s),
        "lower_bound_overhead": _finite(solution.lower_bound_overhead),
        "gap": solution.gap,
        "solve_time_s": solution.solve_time_s,
        "timed_out": solution.timed_out,
        "interrupted": solution.interrupted,
        "infeasible": None if run else _infeasible(solution),
    }


def _run(graph: Graph, schedule: Schedule, simulation: Simulation) -> dict[str, Any]:
    at_peak = PeakMemory("", graph, schedule, simulation)
    return {
        "peak_bytes": simulation.peak_bytes,
        "peak_op": _op(at_peak.node),
        "memory_bytes": at_peak.bytes_of,
        "activation_bytes_by_dtype": at_peak.activations_of,
        "time_s": simulation.time_s,
        "n_recomputed": simulation.n_recomputed,
        **(
            {"n_in_flight": graph.n_in_flight, "saved_bytes": simulation.saved_bytes}
            if graph.n_in_flight > 1
            else {}
        ),
        "reserved_bytes": reserved_by_setting(graph, schedule) or None,
        **(
            {
                "host_peak_bytes": simulation.host_peak_bytes,
                "disk_peak_bytes": simulation.disk_peak_bytes,
                "stall_s": simulation.stall_s,
                "busy_s": dict(simulation.busy_s),
            }
            if simulation.host_peak_bytes
            else {}
        ),
        **({"host_state_bytes": graph.host_state_bytes} if graph.host_state_bytes else {}),
        **({"host_parameter_bytes": size} if (size := host_parameter_bytes(graph)) else {}),
    }


def _op(node: Node | None) -> dict[str, str] | None:
    if node is None:
        return None
    return {"node": node.name, "op": node.op, "phase": node.phase, "module": node.module}


def _infeasible(solution: Solution) -> dict[str, Any]:
    obstacle = solution.obstacle
    node = solution.graph.node_by_name.get(obstacle.op) if obstacle else None
    proven_bytes = obstacle.proven_bytes + solution.request.reserve_bytes if obstacle else None
    return {
        "proven": solution.proven_infeasible,
        "least_budget_bytes": solution.minimum_budget_bytes,
        "proven_budget_bytes": proven_bytes,
        "cut_short": obstacle is not None and obstacle.cut_short,
        "op": _op(node),
        "resident_bytes": solution.graph.resident_bytes,
        "workspace_bytes": node.workspace_bytes if node else 0,
        "on_device": [
            {"tensor": name, "size_bytes": size_bytes}
            for name, size_bytes in (obstacle.on_device if obstacle else ())
            if name in solution.graph.producer
        ],
    }


def _sizes(search: SizeSearch) -> dict[str, Any]:
    largest, saturation = search.largest, search.saturation
    return {
        "size": search.size,
        "largest": None if largest is None else largest.size,
        "pays_until": None if saturation is None else saturation.size,
        "interrupted": search.interrupted,
        "candidates": [
            {"size": c.size, "rate_per_s": c.rate_per_s, **_answer(c.solution)}
            for c in search.candidates
        ],
        "refused": [{"size": size, "reason": reason} for size, reason in search.refused],
    }


def _emitted(report: Report, found: Emitted) -> dict[str, Any]:
    simulation = found.simulation
    return {
        "system": found.system,
        "setting": found.setting,
        "fits": found.fits,
        "peak_bytes": simulation.peak_bytes,
        "time_s": simulation.time_s,
        "overhead": report.emitted_overhead,
        "n_recomputed": simulation.n_recomputed,
        "n_layers": found.n_layers,
        "n_judged": found.n_judged,
    }


def _verification(report: Report) -> dict[str, Any] | None:
    found = report.verification
    if found is None:
        return {"passed": False, "error": report.verify_error} if report.verify_error else None
    return {
        **asdict(found),
        "measured_time_s": found.measured_time_s,
        "baseline_measured_time_s": found.baseline_measured_time_s,
        "overhead": found.overhead,
        "overheads": list(found.overheads),
        "fits": found.fits,
        "baseline_fits": found.baseline_fits,
        "passed": found.passed,
        "warnings": list(found.warnings),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
