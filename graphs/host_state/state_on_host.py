"""Optimizer state in host memory: on the device only while the optimizer steps, in buckets.

Parameters can be there with it (`graphs.parameter_loads`): they are copied in and out with the
state of their bucket.

State is used once a step. Kept on the host, it leaves its bytes on the device to forward and
backward pass. The optimizer then steps a bucket of parameters at a time: their state is fetched,
used, and stored again, while that of the next bucket arrives and that of the last one leaves. As
each parameter is stepped by itself, with the same operators on the device, the bits are the same.

The idea is that of ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840), which steps on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from graphs.files import FormatError, Record
from graphs.graph import Graph
from graphs.host_state.parameter_loads import may_be_loaded, with_loads, without_loads

WHERE = ("auto", "device", "host")
"""What may be asked for: where the state is better off, or one of the two."""

STEP, STATE = "optimizer_step", "optimizer_state"
"""The node and the tensor of `with_optimizer`."""

_WHERE = "environment: optimizer"

Seconds = Callable[[int], float]
"""Bytes -> seconds of one copy in one direction."""


@dataclass(frozen=True)
class StateBucket:
    """The next n_parameters of those that the optimizer trains, in its own order.

    state_bytes: of their state, side by side. workspace_bytes, time_s: of their step.
    """

    n_parameters: int
    state_bytes: int
    workspace_bytes: int
    time_s: float


def buckets_of(graph: Graph) -> tuple[StateBucket, ...]:
    """Those that the optimizer of this step can take its state through; (): it has to stay.

    Raises FormatError for figures that are none.
    """
    environment = graph.meta.environment
    if STEP not in graph.node_by_name or STATE not in graph.tensor_by_name:
        return ()
    if "pipeline" in environment or "kept_state_bytes" not in optimizer_of(environment):
        return ()
    return buckets_in(environment)


def optimizer_of(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """The optimizer in the environment of a graph or plan. Raises FormatError for what is none."""
    found = environment.get("optimizer") or {}
    if not isinstance(found, dict):
        raise FormatError(f"{_WHERE} is {found!r:.60}; expected an object")
    return found


def buckets_in(environment: Mapping[str, Any]) -> tuple[StateBucket, ...]:
    """Those that the environment of a graph or plan has. Raises FormatError."""
    optimizer = Record(optimizer_of(environment), where=_WHERE)
    names = [field.name for field in dataclasses.fields(StateBucket)]
    found = []
    for index, figures in enumerate(optimizer.items("buckets", default=[])):
        where = f"{_WHERE}: buckets[{index}]"
        if not isinstance(figures, list) or len(figures) != len(names):
            raise FormatError(f"{where} is {figures!r:.60}; expected {', '.join(names)}")
        bucket = Record(dict(zip(names, figures, strict=True)), where=where)
        n_parameters, state_bytes, workspace_bytes = map(bucket.integer, names[:3])
        time_s = bucket.number("time_s")
        found.append(StateBucket(n_parameters, state_bytes, workspace_bytes, time_s))
    return tuple(found)


def streamed_step_s(buckets: Sequence[StateBucket], *, out_s: Seconds, in_s: Seconds) -> float:
    """Seconds of the optimizer's step with its state on the host, until all of it is back there.

    The next bucket is fetched as soon as one is about to be stepped, and the bucket before the last
    has left by then.
    """
    if not buckets:
        return 0.0
    stepped_s, left_s = 0.0, [0.0, 0.0]
    arrived_s = in_s(buckets[0].state_bytes)
    for bucket, after in zip(buckets, [*buckets[1:], None], strict=True):
        start_s = max(stepped_s, left_s[-2])
        next_s = 0.0 if after is None else max(arrived_s, start_s) + in_s(after.state_bytes)
        stepped_s = max(start_s, arrived_s) + bucket.time_s
        left_s.append(max(left_s[-1], stepped_s) + out_s(bucket.state_bytes))
        arrived_s = next_s
    return left_s[-1]


def streamed_workspace_bytes(buckets: Sequence[StateBucket]) -> int:
    """The most that such a step takes: of a bucket that leaves, one that is stepped, and one that
    arrives the state, and the workspace."""
    sizes = [0, *(bucket.state_bytes for bucket in buckets), 0]
    taken = (sum(sizes[i : i + 3]) + each.workspace_bytes for i, each in enumerate(buckets))
    return max(taken, default=0)


def with_state_on_host(
    graph: Graph, *, out_s: Seconds, in_s: Seconds, parameters: Collection[str] = ()
) -> Graph | None:
    """The same step with the optimizer's state on the host; None: it has to stay on the device.

    out_s, in_s: of copies to the host and back. What cannot leave (`kept_state_bytes`) stays.
    parameters: tensors of `host_parameters` that are on the host, too.
    """
    graph = with_state_on_device(graph)
    buckets = buckets_of(graph)
    if not buckets or graph.host_state_bytes:
        return None
    if not set(parameters) <= set(host_parameters(graph)):
        return None
    optimizer = Record(optimizer_of(graph.meta.environment), where=_WHERE)
    size_bytes = {name: graph.tensor_by_name[name].size_bytes for name in parameters}
    # the buckets with the bytes of their parameters that are on the host
    tensors = graph.meta.parameters
    trains = iter(optimizer_of(graph.meta.environment).get("trains") or ())
    copied = []
    for bucket in buckets:
        names = (tensors.get(name, "") for name in islice(trains, bucket.n_parameters))
        n_bytes = bucket.state_bytes + sum(size_bytes.get(name, 0) for name in names)
        copied.append(dataclasses.replace(bucket, state_bytes=n_bytes))
    if parameters:
        graph = with_loads(graph, parameters, in_s=in_s)
    return _with(
        graph,
        time_s=streamed_step_s(copied, out_s=out_s, in_s=in_s),
        workspace_bytes=streamed_workspace_bytes(copied),
        device_bytes=optimizer.integer("kept_state_bytes"),
        host_bytes=sum(bucket.state_bytes for bucket in buckets) + sum(size_bytes.values()),
        parameters=parameters,
    )


def host_parameters(graph: Graph) -> tuple[str, ...]:
    """The parameters that can be on the host with the state, in the order of their first use; ():
    none, or the graph does not say which the optimizer trains, in which order."""
    trains = optimizer_of(graph.meta.environment).get("trains")
    return may_be_loaded(graph) if isinstance(trains, list) and trains else ()


def parameters_on_host(environment: Mapping[str, Any]) -> dict[str, str]:
    """Those that are there: name in the module -> tensor. Raises FormatError for what is none."""
    found = Record(optimizer_of(environment), where=_WHERE)
    names = found.mapping("parameters_on_host", default={})
    if not all(isinstance(tensor, str) for tensor in names.values()):
        raise FormatError(f"{_WHERE}: parameters_on_host has values that are no names of tensors")
    return dict(names)


def host_parameter_bytes(graph: Graph) -> int:
    """Of `host_state_bytes`, those of parameters."""
    names = parameters_on_host(graph.meta.environment).values()
    known = graph.tensor_by_name
    return sum(known[name].size_bytes for name in names if name in known)


def with_state_on_device(graph: Graph) -> Graph:
    """The step that `with_state_on_host` was given; a graph that does not say it as it is."""
    if not graph.host_state_bytes or not buckets_of(graph):
        return graph
    optimizer = Record(optimizer_of(graph.meta.environment), where=_WHERE)
    if parameters := parameters_on_host(graph.meta.environment):
        graph = without_loads(graph, parameters.values())
    return _with(
        graph,
        time_s=optimizer.number("time_s"),
        workspace_bytes=optimizer.integer("workspace_bytes"),
        device_bytes=optimizer.integer("state_bytes"),
        host_bytes=0,
    )


def state_copies_s(graph: Graph) -> float:
    """Seconds by which copies of the optimizer's state, and of parameters, make the step longer,
    each parameter copied once before the optimizer; 0 on the device."""
    return graph.baseline_time_s - with_state_on_device(graph).baseline_time_s


def _with(
    graph: Graph,
    *,
    time_s: float,
    workspace_bytes: int,
    device_bytes: int,
    host_bytes: int,
    parameters: Collection[str] = (),
) -> Graph:
    optimizer = {**optimizer_of(graph.meta.environment), "state_on_host": host_bytes > 0}
    optimizer.pop("parameters_on_host", None)
    if parameters:
        optimizer["parameters_on_host"] = {
            name: tensor for name, tensor in graph.meta.parameters.items() if tensor in parameters
        }
    return dataclasses.replace(
        graph,
        nodes=tuple(
            dataclasses.replace(node, time_s=time_s, workspace_bytes=workspace_bytes)
            if node.name == STEP
            else node
            for node in graph.nodes
        ),
        tensors=tuple(
            dataclasses.replace(tensor, size_bytes=device_bytes) if tensor.name == STATE else tensor
            for tensor in graph.tensors
        ),
        host_state_bytes=host_bytes,
        meta=graph.meta.with_environment(optimizer=optimizer),
    )
