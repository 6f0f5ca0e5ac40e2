"""Where the optimizer's state is: a choice beside those of the rewrites."""

from __future__ import annotations

import dataclasses

from graphs.graph import Graph
from graphs.host_state import WHERE, optimizer_of, with_state_on_device, with_state_on_host
from graphs.rewrites import Variants
from solver.schedule import Places
from solver.sizes_deadlines_progress import BudgetError, format_both


def check_where(where: str, *, with_host: bool) -> None:
    """Raises ValueError for another word, and for a host that is not there."""
    if where not in WHERE:
        raise ValueError(f"optimizer_state is {where!r}; one of {', '.join(WHERE)}")
    if where == "host" and not with_host:
        raise ValueError("optimizer_state is 'host', and there is no host; give host_budget")


def with_state_choices(
    step: Graph | Variants, places: Places | None, *, where: str = "auto"
) -> Variants:
    """Each planned program with the state on the device, then each with it on the host.

    where: "device" or "host" alone. Without a host, where the host is too small and where the
    optimizer cannot do it, the state stays on the device. Done twice it is the same.

    Raises BudgetError for state that has to be on the host and has no room there, or cannot leave
    the device.
    """
    variants = Variants.of(step)
    host = None if places is None else places.host
    most_bytes = 0 if host is None else host.capacity_bytes
    here: list[Graph] = []
    for graph in variants.planned:
        back = with_state_on_device(graph)
        here += [back] if back is graph or back not in here else []
    away: list[Graph] = []
    if host is not None and where != "device":
        link = host.link
        tried = (with_state_on_host(g, out_s=link.out_s, in_s=link.in_s) for g in here)
        away = [graph for graph in tried if graph is not None]
    if where == "host" and not away:
        raise BudgetError(_why_not_away(variants.plain))
    planned = away if where == "host" else [*here, *_within(away, most_bytes)]
    if not _within(planned, most_bytes):
        least_bytes = min(graph.host_state_bytes for graph in planned)
        raise BudgetError(
            f"the optimizer's state takes {format_both(least_bytes)} of host memory, and there are "
            f"{format_both(most_bytes)}; give more (--host, or in Python host_budget=)"
        )
    return dataclasses.replace(variants, planned=tuple(_within(planned, most_bytes)))


def _within(graphs: list[Graph], most_bytes: int) -> list[Graph]:
    return [graph for graph in graphs if graph.host_state_bytes <= most_bytes]


def _why_not_away(graph: Graph) -> str:
    optimizer = optimizer_of(graph.meta.environment)
    unknown = "the step has no optimizer, or does not say in which parts it can be copied"
    reason = optimizer.get("state_stays") or unknown
    return f"the optimizer's state cannot be on the host: {reason}"
