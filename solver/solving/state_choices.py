"""Variants of a step with optimizer state and parameters on the device or in host memory."""

from __future__ import annotations

import dataclasses

from graphs.graph import Graph
from graphs.host_state import (
    WHERE,
    host_parameters,
    optimizer_of,
    parameters_on_host,
    with_state_on_device,
    with_state_on_host,
)
from graphs.rewrites import Variants
from solver.schedule import Places
from solver.sizes_deadlines_progress import BudgetError, format_both

PARAMETER_SHARES = (0.5, 1.0)
"""The choices that are planned: these shares, in bytes, of the parameters that can be on the host.
Those that are read first are chosen first, as they are idle the longest before backward."""


def check_where(where: str, *, with_host: bool, parameters: str = "device") -> None:
    """Check the options optimizer_state (`where`) and parameters.

    Raises ValueError for an unknown word, for "host" without a host budget, and for parameters on
    the host without the optimizer's state.
    """
    for name, word in (("optimizer_state", where), ("parameters", parameters)):
        if word not in WHERE:
            raise ValueError(f"{name} is {word!r}; one of {', '.join(WHERE)}")
        if word == "host" and not with_host:
            raise ValueError(f"{name} is 'host', and there is no host; give host_budget")
    if parameters != "device" and where == "device":
        raise ValueError(
            f"parameters is {parameters!r} and optimizer_state 'device': parameters leave the "
            "device with the optimizer's state; leave optimizer_state out"
        )


def with_state_choices(
    step: Graph | Variants,
    places: Places | None,
    *,
    where: str = "auto",
    parameters: str = "device",
) -> Variants:
    """Return the step's variants with each choice of where optimizer state and parameters are.

    First come all planned programs with the state on the device, then with the state on the host,
    then with parameters on the host too: half of their bytes, and all that can be there. With
    "auto", choices that do not fit into the host's memory, or that the optimizer cannot run, are
    left out. Applying the function twice changes nothing.

    places: the host memory (None: everything stays on the device).
    where: for the optimizer's state: "device" or "host" for one choice only, "auto" for both.
    parameters: "device": they stay; "auto": both choices; "host": all that can be on the host.

    Raises BudgetError if what has to be on the host does not fit there or cannot leave the device.
    """
    if parameters == "host":
        where = "host"
    variants = Variants.of(step)
    host = None if places is None else places.host
    most_bytes = 0 if host is None else host.capacity_bytes
    # Undo earlier choices first, so that applying the function twice changes nothing.
    on_device: list[Graph] = []
    for graph in variants.planned:
        restored = with_state_on_device(graph)
        on_device += [restored] if restored is graph or restored not in on_device else []
    on_host: list[Graph] = []
    if host is not None and where != "device":
        link = host.link
        for graph in on_device:
            for chosen in _parameter_choices(graph, parameters):
                moved = with_state_on_host(
                    graph, out_s=link.out_s, in_s=link.in_s, parameters=chosen
                )
                on_host += [] if moved is None else [moved]
        # state alone before state with parameters
        on_host.sort(key=lambda graph: len(parameters_on_host(graph.meta.environment)) > 0)
    if where == "host" and not on_host:
        raise BudgetError(_why_not_on_host(variants.plain, with_parameters=parameters == "host"))
    planned = on_host if where == "host" else [*on_device, *_fitting_on_host(on_host, most_bytes)]
    if not _fitting_on_host(planned, most_bytes):
        least_bytes = min(graph.host_state_bytes for graph in planned)
        what = "the parameters and the optimizer's state take"
        if parameters != "host":
            what = "the optimizer's state takes"
        raise BudgetError(
            f"{what} {format_both(least_bytes)} of host memory, more than the "
            f"{format_both(most_bytes)} given; give more (--host, or in Python host_budget=)"
        )
    return dataclasses.replace(variants, planned=tuple(_fitting_on_host(planned, most_bytes)))


def _parameter_choices(graph: Graph, parameters: str) -> list[tuple[str, ...]]:
    """The names of the parameters on the host, for each choice that is planned."""
    if parameters == "device":
        return [()]
    names = host_parameters(graph)
    if parameters == "host":
        return [names] if names else []
    size_bytes = {name: graph.tensor_by_name[name].size_bytes for name in names}
    found: list[tuple[str, ...]] = [()]
    for share in PARAMETER_SHARES:
        left_bytes, n_chosen = share * sum(size_bytes.values()), 0
        while n_chosen < len(names) and left_bytes > 0:
            left_bytes -= size_bytes[names[n_chosen]]
            n_chosen += 1
        found.append(names[:n_chosen])
    return list(dict.fromkeys(found))


def _fitting_on_host(graphs: list[Graph], most_bytes: int) -> list[Graph]:
    """The graphs whose state on the host takes at most `most_bytes`."""
    return [graph for graph in graphs if graph.host_state_bytes <= most_bytes]


def _why_not_on_host(graph: Graph, *, with_parameters: bool) -> str:
    """The error message: why the state, or parameters, cannot be on the host."""
    optimizer = optimizer_of(graph.meta.environment)
    if with_parameters and not optimizer.get("state_stays") and optimizer.get("buckets"):
        return (
            "no parameter can be on the host: each is small, is not contiguous (channels last), "
            "shares its storage, or is read by a loss outside of the model"
        )
    unknown = "the step has no optimizer, or does not say in which parts it can be copied"
    reason = optimizer.get("state_stays") or unknown
    if with_parameters:
        return (
            "the parameters cannot be on the host: they leave the device with the optimizer's "
            f"state, which has to stay: {reason}"
        )
    return f"the optimizer's state cannot be on the host: {reason}"
