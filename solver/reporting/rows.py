"""What there is to report, and the object of `--json`; `terminal` prints it for a person."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphs.fsdp import sharding_of, sharding_words
from graphs.graph import Graph, Node
from solver.analysis import Advice, SizeSearch
from solver.common import counted, format_time
from solver.emit import Emitted
from solver.runtime_hooks import Verification
from solver.schedule import Schedule, Simulation, Solution, baseline, memory_at, node_at

FORMAT = "report/1"
EVALUATION = (
    "The model is in evaluation mode: dropout is off and batch norm uses its running statistics. "
    "Call model.train() before planning if it is to be trained."
)


@dataclass(frozen=True)
class Report:
    """Everything that both printers need.

    problem: what was given. device, costs: in words, "" where the graph file says nothing.
    solutions: one, or one per method of a comparison. refused: method -> why it gave no answer.
    files: (what, path) of each file written. notes: whole sentences. reserve_reason: where the
    reserve comes from, "" if the caller named it. verify_error: why the step could not be run.
    advice: what else would help the best of the solutions. interrupted: Ctrl-C ended the search.
    sizes: the search for the largest batch, if there was one; its answer is the solution. emitted:
    another system's nearest setting, if it was asked for. how_to_save: what writes the schedule.
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
    emitted: Emitted | None = None
    how_to_save: str = "-o schedule.json"

    @property
    def best(self) -> Solution:
        return best(self.solutions)


OWN_CHECKPOINTS = (
    "The model calls torch.utils.checkpoint by itself. The plan is made without those checkpoints "
    "and takes their place, and so do the figures without checkpointing: the model as it stands "
    "takes less memory and more time than they say."
)
OPTIMIZER = (
    "No optimizer is counted: its state, and the memory of its step, are not in these figures. "
    "Give optimizer= to count them."
)


def optimizer_note(graph: Graph) -> list[str]:
    """A sentence where a traced training step has no optimizer."""
    if not graph.meta.environment or any(node.phase == "optimizer" for node in graph.nodes):
        return []
    return [OPTIMIZER]


def step_notes(graph: Graph) -> list[str]:
    """Sentences on what the figures are of, where that is not the usual step."""
    return [*_sharding_note(graph), *_evaluation_note(graph), *_checkpoints_note(graph)]


def _sharding_note(graph: Graph) -> list[str]:
    """Sentences where the graph is what one rank of FSDP2 sees."""
    sharding = sharding_of(graph.meta.environment)
    if sharding is None:
        return []
    n_modules = len(sharding.groups or ())
    words = (
        f"All figures are {sharding_words(graph.meta.environment)} (fully_shard on {n_modules} "
        "modules, then on the model), with the batch of one rank: parameters, gradients and "
        "optimizer state as shards, and what is gathered, with its buffers, for as long as it is. "
        "Communication takes no time in them. Such a plan is exported: "
        "to_torch_checkpoint(model, solution)."
    )
    return [words]


def _evaluation_note(graph: Graph) -> list[str]:
    """A sentence where the graph is of a model in evaluation mode."""
    return [EVALUATION] if graph.meta.environment.get("train", True) is False else []


def _checkpoints_note(graph: Graph) -> list[str]:
    """A sentence where the model checkpoints by itself (`graphs.capture.own_checkpointing`)."""
    return [OWN_CHECKPOINTS] if graph.meta.own_checkpoints else []


def best(solutions: Iterable[Solution]) -> Solution:
    """The fastest that fits, of equal ones the smallest; without any, the first asked for."""
    solutions = tuple(solutions)
    found = [s for s in solutions if s.simulation is not None]
    return min(found, key=_rank) if found else solutions[0]


def _rank(solution: Solution) -> tuple[float, int]:
    assert solution.simulation is not None
    return solution.simulation.time_s, solution.simulation.peak_bytes


def describe_costs(described: object) -> str:
    """The cost model, from its description in the graph's meta; "" if the graph has none."""
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
    """0 for anything but a finite number, as graph files are not trusted."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def to_json(report: Report) -> dict[str, Any]:
    """The object of `--json`: sizes in bytes, times in seconds, null where there is nothing."""
    answer = report.best
    graph, request = answer.graph, answer.request
    plain = baseline(graph)
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
        "baseline": _run(graph, plain, answer.baseline),
        **_answer(answer),
        "methods": [_answer(solution) for solution in report.solutions],
        "refused": dict(report.refused),
        "verification": _verification(report),
        "files": {what: str(path) for what, path in report.files},
        "sizes": _sizes(report.sizes),
        "emitted": _emitted(report),
        "notes": list(report.notes),
        "advice": [asdict(advice) for advice in report.advice],
    }


def _answer(solution: Solution) -> dict[str, Any]:
    """One method's answer; the fields of a schedule are null when there is none."""
    found = solution.schedule is not None and solution.simulation is not None
    return {
        "status": solution.status,
        "method": solution.method,
        "schedule": _run(solution.graph, solution.schedule, solution.simulation) if found else None,
        "overhead": solution.overhead,
        "lower_bound_s": _finite(solution.lower_bound_s),
        "lower_bound_overhead": _finite(solution.lower_bound_overhead),
        "gap": solution.gap,
        "solve_time_s": solution.solve_time_s,
        "timed_out": solution.timed_out,
        "infeasible": None if found else _infeasible(solution),
    }


def _run(graph: Graph, schedule: Schedule | None, simulation: Simulation | None) -> dict[str, Any]:
    assert schedule is not None
    assert simulation is not None
    return {
        "peak_bytes": simulation.peak_bytes,
        "peak_op": _op(node_at(graph, schedule, simulation)),
        "memory_bytes": memory_at(graph, schedule, simulation.peak_op),
        "time_s": simulation.time_s,
        "n_recomputed": simulation.n_recomputed,
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
        "on_device": [
            {"tensor": name, "size_bytes": size_bytes}
            for name, size_bytes in (obstacle.on_device if obstacle else ())
            if name in solution.graph.producer
        ],
    }


def _sizes(search: SizeSearch | None) -> dict[str, Any] | None:
    if search is None:
        return None
    largest, pays_until = search.largest, search.pays_until
    return {
        "size": search.size,
        "largest": None if largest is None else largest.size,
        "pays_until": None if pays_until is None else pays_until.size,
        "interrupted": search.interrupted,
        "candidates": [
            {"size": c.size, "rate_per_s": c.rate_per_s, **_answer(c.solution)}
            for c in search.candidates
        ],
        "refused": [{"size": size, "reason": reason} for size, reason in search.refused],
    }


def _emitted(report: Report) -> dict[str, Any] | None:
    found = report.emitted
    if found is None:
        return None
    simulation = found.setting.simulation
    return {
        "system": found.system,
        "setting": found.setting.text,
        "fits": found.fits,
        "peak_bytes": simulation.peak_bytes,
        "time_s": simulation.time_s,
        "overhead": emitted_overhead(report, found),
        "n_recomputed": simulation.n_recomputed,
        "n_layers": found.n_layers,
        "n_judged": found.n_judged,
    }


def emitted_overhead(report: Report, found: Emitted) -> float:
    """Extra time of the emitted setting, as a share of the step without checkpointing."""
    baseline_s = report.best.baseline.time_s
    return (found.setting.simulation.time_s - baseline_s) / (baseline_s or 1.0)


def _verification(report: Report) -> dict[str, Any] | None:
    found = report.verification
    if found is None:
        return {"passed": False, "error": report.verify_error} if report.verify_error else None
    return {**asdict(found), "fits": found.fits, "passed": found.passed}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
