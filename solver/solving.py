"""The front door: a model or a graph and a budget in bytes, and back comes a Solution.

Methods propose a schedule, `solver.simulate` decides what it costs and whether it fits, and
`solver.bound.lower_bound` proves how far from the best it can be. A new method is a function with
the signature that `methods.Method` describes and a line in `methods.METHODS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.files import FormatError
from graphs.graph import Graph
from graphs.rewrites import Variants, check_word
from solver.bound import lower_bound_s
from solver.common import Deadline, check_time_limit, now_s, parse_budget
from solver.device import find_hardware, host_beside
from solver.methods import METHODS, find_obstacle
from solver.runtime_hooks import PLAN_BY_SUBMODULES
from solver.schedule import (
    IllegalScheduleError,
    Request,
    Schedule,
    Simulation,
    Solution,
    Status,
    simulate,
)
from solver.schedule import baseline as baseline_schedule

if TYPE_CHECKING:
    from torch import nn

    from graphs.hardware import Hardware


KEPT_SHARE = 0.1
"""Of the time limit: kept for the bound, or for saying why nothing was found."""


class NoPlainStepError(ValueError):
    """Of a step there is only the program that a rewrite made of it; says what to do."""


def solve(
    problem: nn.Module | Graph | str | Path,
    batch: Any = None,
    *,
    budget: int | float | str,
    reserve: int | float | str | None = None,
    method: str = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    capacity_bytes: int | None = None,
    rewrites: str | None = None,
    host_budget: int | float | str | None = None,
    host_link: int | float | str | None = None,
    **trace_options: Any,
) -> Solution:
    """Find the schedule that fits the training step into `budget` at the least extra time.

    problem: a module (traced with `batch` and the keyword arguments of `graphs.trace.trace`: loss,
    optimizer, gradients), a Graph, or the path of a graph file.
    device, costs: as on the command line: "cpu", "cuda", "cuda:1" or a named card such as "h100";
    "roofline", "measured" or a cost model (`solver.device`).
    budget: bytes of the device for the whole step (16e9), "16GB", "60%" of `capacity_bytes`.
    reserve: bytes of the budget that the step may not use (default: CUDA_RESERVE_BYTES for a
    module on CUDA or planned for a named card, else 0).
    rewrites: how the plan may rewrite the step: "bitwise" (the default for a module), "allclose" or
    "none" (`graphs.rewrites`). A graph is planned with those that it was made with.

    host_budget: bytes of host memory that the plan may copy to beside recomputing ("64GB"; default:
        none). Only the method auto does.
    host_link: bytes per second to the host and back, "50GB/s" or "50GB/s,40GB/s" (default: those
        of the device that was named).

    time_limit_s: of all that comes after tracing: search, proof and, where nothing is found, the
    reason. What is best by then is the answer; it says that the clock ended the search.

    Raises ValueError for an invalid budget, reserve, method, time limit or word of rewrites;
    TraceError (a module that cannot be traced), FormatError (a file). That nothing fits is no error
    but the Solution's status.
    """
    started_s = now_s()
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; one of {', '.join(METHODS)}")
    if host_budget is not None and not METHODS[method].takes_places:
        raise ValueError(f"method {method} copies nothing to the host; leave out host_budget")
    check_time_limit(time_limit_s)
    if rewrites is not None:
        trace_options["rewrites"] = check_word(rewrites)
    step, hardware = _as_step(problem, batch, trace_options)
    graph = step.plain
    if host_budget is not None and graph.meta.environment.get("opaque"):
        raise ValueError(
            "a part of the model is planned as one piece, which cannot be copied to the host; "
            "leave out host_budget"
        )
    if capacity_bytes is None and hardware is not None:
        capacity_bytes = hardware.capacity_bytes
    # A graph file may be planned for another device than it was traced on: no default reserve.
    is_module = not isinstance(problem, Graph | str | Path)
    on_cuda = graph.meta.environment.get("device") == "cuda"
    budget_bytes, reserve_bytes = parse_budget(
        budget,
        reserve,
        capacity_bytes=capacity_bytes,
        on_cuda=is_module and (on_cuda or (hardware is not None and hardware.kind == "cuda")),
        resident_bytes=graph.resident_bytes,
    )
    if hardware is None and is_module and host_budget is not None:
        hardware = find_hardware(str(graph.meta.environment["device"]))  # where it was traced
    request = Request(
        budget_bytes=budget_bytes,
        reserve_bytes=reserve_bytes,
        method=method,
        time_limit_s=time_limit_s,
        seed=seed,
        rewrites=(rewrites or "bitwise") if is_module else "none",
        places=host_beside(
            host_budget, host_link, hardware=hardware, resident_bytes=graph.resident_bytes
        ),
    )
    return answer(step, request, started_s=started_s)


def answer(
    step: Graph | Variants,
    request: Request,
    *,
    started_s: float | None = None,
    starts: Sequence[Schedule] = (),
) -> Solution:
    """`attempt`, and where nothing was found `explained`."""
    deadline = Deadline.after(request.time_limit_s)
    found = attempt(step, request, started_s=started_s, starts=starts, deadline=deadline)
    return explained(found, deadline=deadline)


def attempt(
    step: Graph | Variants,
    request: Request,
    *,
    started_s: float | None = None,
    starts: Sequence[Schedule] = (),
    quick: bool = False,
    deadline: Deadline | None = None,
) -> Solution:
    """Run the requested method on each variant of the step, simulate its proposals, take the best.

    started_s: what the solution's time counts from.
    starts: schedules known for the variants, for a method that can begin from them.
    quick: with a fraction of the work, where the method can.
    deadline: when the answer is due (None: the request's time limit from now on). The variants
        share the time.
    """
    started_s = now_s() if started_s is None else started_s
    deadline = deadline or Deadline.after(request.time_limit_s)
    variants = Variants.of(step)
    answers: list[Solution] = []
    graphs = _promising_first(variants.planned, request.available_bytes)
    for index, graph in enumerate(graphs):
        due = Deadline.after(deadline.left_s / (len(graphs) - index))
        if not _may_be_faster(graph, request, answers, due):
            continue
        answers.append(
            _attempt_one(
                graph,
                request,
                plain=variants.plain,
                starts=[s for s in starts if s.graph_id == graph.graph_id],
                quick=quick,
                deadline=due,
            )
        )
    found = _best(answers)
    return dataclasses.replace(found, variants=variants, solve_time_s=now_s() - started_s)


def _promising_first(graphs: Sequence[Graph], available_bytes: int) -> list[Graph]:
    """The fastest of those that fit as they are, then those that hold least."""
    peak_bytes = {g.graph_id: simulate(g, baseline_schedule(g)).peak_bytes for g in graphs}

    def rank(graph: Graph) -> tuple[bool, float]:
        over = peak_bytes[graph.graph_id] > available_bytes
        return over, peak_bytes[graph.graph_id] if over else graph.baseline_time_s

    return sorted(graphs, key=rank)


def _may_be_faster(
    graph: Graph, request: Request, answers: Sequence[Solution], deadline: Deadline
) -> bool:
    """Whether a plan of this variant could be faster than the answers of others.

    Where not, its own bound is above what was found, and so no part of the least bound.
    """
    found_s = [answer.simulation.time_s for answer in answers if answer.simulation is not None]
    if not found_s:
        return True
    if graph.baseline_time_s >= min(found_s):
        return False
    budget_bytes, left_s = request.available_bytes, deadline.left_s
    bound_s = lower_bound_s(
        graph, budget_bytes=budget_bytes, time_limit_s=left_s, places=request.places
    )
    return bound_s < min(found_s)


def _best(answers: Sequence[Solution]) -> Solution:
    """The fastest of the variants' answers, with what is proven for all: the least bound."""
    chosen = min(answers, key=lambda s: math.inf if s.simulation is None else s.simulation.time_s)
    bound_s = min(answer.lower_bound_s for answer in answers)
    late = chosen.simulation is None and any(s.status == "time_limit" for s in answers)
    return dataclasses.replace(
        chosen,
        lower_bound_s=bound_s,
        status="time_limit" if late else chosen.status,
        timed_out=any(answer.timed_out for answer in answers),
    ).with_bound(bound_s)


def _attempt_one(
    graph: Graph,
    request: Request,
    *,
    plain: Graph,
    starts: Sequence[Schedule],
    quick: bool,
    deadline: Deadline,
) -> Solution:
    """Run the requested method on a graph and simulate its proposal."""
    started_s = now_s()
    baseline = simulate(plain, baseline_schedule(plain))
    method = METHODS[request.method]
    proposal = method(
        graph,
        budget_bytes=request.available_bytes,
        time_limit_s=deadline.earlier(KEPT_SHARE * deadline.left_s).left_s,
        seed=request.seed,
        starts=starts,
        quick=quick,
        places=request.places,
    )
    bound_s = max(proposal.lower_bound_s, graph.baseline_time_s)
    if not method.proves_bound:
        cut_s = lower_bound_s(
            graph, budget_bytes=request.available_bytes, time_limit_s=deadline.left_s
        )
        bound_s = max(bound_s, cut_s)
    simulation = _accepted(graph, request, proposal.schedule)
    status: Status = "feasible" if simulation is not None else "infeasible"
    if simulation is None and proposal.timed_out and not math.isinf(bound_s):
        status = "time_limit"
    return Solution(
        status=status,
        graph=graph,
        schedule=None if simulation is None else proposal.schedule,
        simulation=simulation,
        request=request,
        baseline=baseline,
        lower_bound_s=bound_s,
        method=request.method,
        solve_time_s=now_s() - started_s,
        timed_out=proposal.timed_out,
    ).with_bound(bound_s)


def _accepted(graph: Graph, request: Request, schedule: Schedule | None) -> Simulation | None:
    """What the schedule costs; None, with a warning, if it is illegal or above the budget."""
    if schedule is None:
        return None
    try:
        simulation = simulate(graph, schedule, places=request.places)
    except IllegalScheduleError as error:
        reason = str(error)
    else:
        reason = request.excess(simulation)
        if not reason:
            return simulation
    warnings.warn(
        f"method {request.method} proposed a schedule that does not count ({reason}); "
        "please report this as a bug",
        stacklevel=3,
    )
    return None


def explained(solution: Solution, *, deadline: Deadline | None = None) -> Solution:
    """With the obstacle if there is no schedule: the least budget, and the bottleneck op.

    deadline: when the answer is due (None: what the request's time limit leaves, KEPT_SHARE of it
    at least). The obstacle says where that was not enough.

    Where the schedule of the least budget fits after all, because the time limit ended the search
    before one was found, it is the answer. The time that this takes counts as the solution's.
    """
    if solution.schedule is not None or solution.obstacle is not None:
        return solution
    started_s, request = now_s(), solution.request
    if deadline is None:
        left_s = request.time_limit_s - solution.solve_time_s
        deadline = Deadline.after(max(KEPT_SHARE * request.time_limit_s, left_s))
    graphs = Variants.of(solution.variants or solution.graph).planned
    obstacles = [
        find_obstacle(
            graph,
            method=METHODS[solution.method],
            above_bytes=request.available_bytes + 1,
            seed=request.seed,
            deadline=Deadline.after(deadline.left_s / (len(graphs) - index)),
            places=request.places,
        )
        for index, graph in enumerate(graphs)
    ]
    least = min(range(len(graphs)), key=lambda index: obstacles[index].reached_bytes)
    obstacle = dataclasses.replace(
        obstacles[least], proven_bytes=min(each.proven_bytes for each in obstacles)
    )
    solution = dataclasses.replace(
        solution, graph=graphs[least], solve_time_s=solution.solve_time_s + now_s() - started_s
    )
    if obstacle.schedule is None or obstacle.reached_bytes > request.available_bytes:
        return dataclasses.replace(solution, obstacle=obstacle)
    simulation = simulate(solution.graph, obstacle.schedule, places=request.places)
    found = dataclasses.replace(solution, schedule=obstacle.schedule, simulation=simulation)
    return found.with_bound(solution.lower_bound_s)


def without_rewrites(solution: Solution) -> Solution:
    """The plan itself if its step is the plain one, else a plan of the plain step.

    For whatever runs PyTorch's own operators: it answers the same request, and may find nothing.

    Raises NoPlainStepError for a graph that was made by rewrites and is all that is known.
    """
    if not solution.graph.meta.rewrites:
        return solution
    if made_with := solution.plain.meta.rewrites:
        raise NoPlainStepError(
            f"the graph of this plan was made with {', '.join(made_with)}, and the plain step, "
            "which PyTorch runs, is not in the file; plan again from the model, with "
            'rewrites="none"'
        )
    return answer(solution.plain, solution.request)


def _loaded(path: str | Path) -> Graph:
    """Read a graph file; says what would be right where the path is of something else."""
    name = str(path)
    if name.startswith("hf:") or Path(name).suffix == ".py":
        raise FormatError(
            f"{name}: solve() in Python takes a module and its batch, a Graph or a graph file "
            "(.json); a model file or configuration is for the command (solve --budget SIZE "
            f"{name}); here import it: solve(get_model(), get_batch(), budget=...)"
        )
    try:
        return Graph.load(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name}: no such file; give a graph file (--graph-out or Graph.save writes one)"
        ) from error


def _as_step(
    problem: nn.Module | Graph | str | Path, batch: Any, trace_options: Mapping[str, Any]
) -> tuple[Variants, Hardware | None]:
    """The variants of the step, and the device that was named (None: none was)."""
    if isinstance(problem, Graph | str | Path):
        if batch is not None or trace_options:
            given = ", ".join([*(["batch"] if batch is not None else []), *trace_options])
            raise TypeError(f"a graph is traced already: {given} would have no effect")
        graph = problem if isinstance(problem, Graph) else _loaded(problem)
        return Variants.of(graph), None
    if isinstance(problem, type):
        name = problem.__name__
        raise TypeError(f"{name} is a class; give a module: solve({name}(...), batch, budget=...)")
    if batch is None:
        raise TypeError(
            "a batch is missing: solve(model, batch, budget=...), with what the model is called "
            "with: a tensor, a tuple or a dict of tensors"
        )
    from graphs.trace import TraceError, trace, trace_variants
    from solver.device import find_target

    known = [*inspect.signature(solve).parameters, *inspect.signature(trace).parameters]
    for name in trace_options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"solve() takes no argument {name!r}{hint}")
    options = dict(trace_options)
    device, costs = options.pop("device", None), options.pop("costs", None)
    if device is None and isinstance(costs, str):
        device = next((parameter.device for parameter in problem.parameters()), "cpu")
    try:
        if device is None:  # the device of the model, found and checked by trace
            return trace_variants(problem, batch, **options, costs=costs), None
        target = find_target(device, costs)
        step = trace_variants(
            problem, batch, **options, device=target.torch_device, costs=target.costs
        )
    except TraceError as error:
        if error.runs_in_eager:
            error.add_note(PLAN_BY_SUBMODULES)
        raise
    return step, target.hardware
