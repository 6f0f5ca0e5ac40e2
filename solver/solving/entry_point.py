"""`solve`: from a model or a graph, and a budget in bytes, to a Solution."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.graph import Graph
from graphs.host_state import optimizer_of
from graphs.rewrites import check_word
from solver.device_and_costs import (
    check_budget_of,
    check_step_allows,
    find_hardware,
    host_places,
)
from solver.methods import METHODS
from solver.schedule import Request, Solution, plan_line
from solver.sizes_deadlines_progress import (
    Rates,
    check_time_limit,
    counted,
    names_checked,
    now_s,
    parse_budget,
    parse_size,
    tell,
    telling,
)
from solver.solving.disk import with_disk
from solver.solving.problem import as_step, is_traced, name_of
from solver.solving.solve_request import answer
from solver.solving.state_choices import check_where

if TYPE_CHECKING:
    from torch import nn

    from graphs.costs import CostModel
    from graphs.hardware import Hardware


@names_checked
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
    host_link: Rates | None = None,
    disk_budget: int | float | str | None = None,
    disk_rate: Rates | None = None,
    optimizer_state: str = "auto",
    parameters: str = "device",
    budget_of: str = "allocated",
    **trace_options: Any,
) -> Solution:
    """Find the schedule that fits the training step into `budget` with the least extra time.

    problem: a module, which is traced, a Graph, or the path of a graph file.
    batch: what the module is called with: a tensor, a tuple or a dict of tensors.
    trace_options: for a module, the keyword arguments of `graphs.trace.trace`, such as loss,
        optimizer and gradients. `device` and `costs` may be words, as on the command line: "cpu",
        "cuda", "cuda:1" or a named card such as "h100"; "roofline", "measured" or a cost model
        (`solver.device_and_costs`).

    budget: bytes of the device for the whole step (16e9, 0.85 * total_memory; rounded down),
        "16GB", or "60%" of `capacity_bytes`.
    reserve: the part of the budget that the step may not use (default: CUDA_RESERVE_BYTES for a
        module on CUDA or planned for a named card, else 0).
    capacity_bytes: the device's memory (default: that of the named device).
    budget_of: what the budget limits. "allocated": the bytes that tensors hold; the reserve is for
        everything else. "reserved": the bytes that PyTorch's caching allocator takes from a CUDA
        device, as simulated (`solver.solving.within_reserved`).
    method: a key of `solver.methods.METHODS`.
    time_limit_s: for everything after tracing: search, proof and, if nothing is found, the reason.
        Then the best plan found so far is returned, with `timed_out` set.
    seed: makes a method's random choices reproducible.
    rewrites: how the plan may rewrite the step: "bitwise" (the default for a module), "allclose",
        "lossless", "bf16", "fp8", "int8" or "none" (`graphs.rewrites`). A graph keeps the rewrites
        that it was made with.

    host_budget: bytes of host memory that the plan may copy to in addition to recomputing ("64GB";
        default: none). Only some methods copy.
    host_link: bytes per second to the host and back: "50GB/s" for both directions, or
        "50GB/s,40GB/s" or (50e9, 40e9) (default: the named device's).
    disk_budget: bytes of a disk that the plan may copy to by way of the host, with or without the
        directory that `apply` will use ("500GB:/scratch", "500GB"; default: none).
    disk_rate: bytes per second that the disk writes and reads, "5GB/s,6GB/s", or "measured" in the
        directory (the default if the costs are measured).
    optimizer_state: where the optimizer's state is between its steps: on the "device", in "host"
        memory, within `host_budget`, or "auto" for whichever gives the faster plan (the device if
        there is no host budget). If it is on the host, `apply` has to be given the optimizer.
    parameters: likewise for parameters while no operator reads them ("device" by default). They can
        be on the host only together with the optimizer's state.

    Raises ValueError for an invalid budget, reserve, method, time limit or word for rewrites, and
    for optimizer state that cannot be on the host; TraceError for a module that cannot be traced;
    FormatError for a graph file. If nothing fits, no error is raised: see the Solution's status.
    """
    started_s = now_s()
    check_options(
        method=method,
        time_limit_s=time_limit_s,
        budget=budget,
        capacity_bytes=capacity_bytes,
        with_host=host_budget is not None,
    )
    check_where(optimizer_state, with_host=host_budget is not None, parameters=parameters)
    if rewrites is not None:
        trace_options["rewrites"] = check_word(rewrites)
    name = name_of(problem)
    with telling(f"{'planning' if is_traced(problem) else 'tracing'} {name}...") as say:
        others = inspect.signature(solve).parameters
        step, hardware, costs = as_step(problem, batch, trace_options, others=others)
        request = request_for(
            step.plain,
            hardware,
            costs,
            is_module=not is_traced(problem),
            budget=budget,
            reserve=reserve,
            capacity_bytes=capacity_bytes,
            host_budget=host_budget,
            host_link=host_link,
            disk_budget=disk_budget,
            disk_rate=disk_rate,
            rewrites=rewrites,
            optimizer_state=optimizer_state,
            parameters=parameters,
            budget_of=budget_of,
            method=method,
            time_limit_s=time_limit_s,
            seed=seed,
        )
        say(f"planning {name} ({counted(len(step.plain.nodes), 'op')})...")
        solution = answer(step, request, thorough=True)
    line = plan_line(solution, name=name, took_s=now_s() - started_s)
    if not is_traced(problem) and not optimizer_of(solution.environment):
        line += "; no optimizer is counted"
    if solution.environment.get("train", True) is False:
        line += "; the model is in evaluation mode (for a training step, call model.train() first)"
    tell(line)
    return solution


def check_options(
    *,
    method: str,
    time_limit_s: float,
    budget: int | float | str,
    capacity_bytes: int | None,
    with_host: bool = False,
) -> None:
    """Check the options that can be rejected before anything is traced.

    Raises ValueError for an invalid time limit or budget, an unknown method, a host budget with a
    method that cannot copy, and a method that needs a host budget without one.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; one of {', '.join(METHODS)}")
    if with_host and not METHODS[method].takes_places:
        raise ValueError(f"method {method} copies nothing to the host; leave out host_budget")
    if METHODS[method].needs_places and not with_host:
        raise ValueError(
            f"method {method} is for host memory and disks beside the device; give host_budget"
        )
    check_time_limit(time_limit_s)
    if "%" not in str(budget):  # a share can be checked only once the device is known
        parse_size(budget, capacity_bytes=capacity_bytes)


def request_for(
    graph: Graph,
    hardware: Hardware | None,
    costs: CostModel | None,
    *,
    is_module: bool,
    budget: int | float | str,
    reserve: int | float | str | None,
    capacity_bytes: int | None,
    rewrites: str | None,
    host_budget: int | float | str | None = None,
    host_link: Rates | None = None,
    disk_budget: int | float | str | None = None,
    disk_rate: Rates | None = None,
    budget_of: str = "allocated",
    **options: Any,
) -> Request:
    """The Request for the options of `solve`, with all sizes in bytes.

    graph: the plain step.
    hardware: the named device (None: none was named).
    costs: the cost model given for the trace, or that of the named device (None: neither).
    is_module: whether the graph was just traced from a module.
    options: further fields of the Request.

    Raises ValueError, BudgetError or DeviceError for what is invalid or cannot be planned.
    """
    check_step_allows(graph, with_host=host_budget is not None, budget_of=budget_of)
    if capacity_bytes is None and hardware is not None:
        capacity_bytes = hardware.capacity_bytes
    # A graph file may be planned for another device than it was traced on: no default reserve.
    on_cuda = graph.meta.device == "cuda"
    budget_bytes, reserve_bytes = parse_budget(
        budget,
        reserve,
        capacity_bytes=capacity_bytes,
        on_cuda=is_module and (on_cuda or (hardware is not None and hardware.kind == "cuda")),
        resident_bytes=graph.resident_bytes,
    )
    traced_on = graph.meta.device if is_module else None
    check_budget_of(budget_of, kind=traced_on if hardware is None else hardware.kind)
    if hardware is None and is_module and host_budget is not None:
        from graphs.costs import from_description

        described = graph.meta.costs
        if costs is None and isinstance(described, Mapping):
            costs = from_description(described)
        is_known = host_link is not None or hasattr(costs, "host_copies")
        where = graph.meta.device  # where it was traced
        hardware = find_hardware(where, needs_rates=not is_known)
    resident_bytes = graph.resident_bytes
    places = host_places(
        host_budget, host_link, hardware=hardware, costs=costs, resident_bytes=resident_bytes
    )
    return Request(
        budget_bytes=budget_bytes,
        reserve_bytes=reserve_bytes,
        rewrites=(rewrites or "bitwise") if is_module else "none",
        budget_of=budget_of,
        places=with_disk(
            places, disk_budget, disk_rate, costs=costs, resident_bytes=resident_bytes
        ),
        **options,
    )
