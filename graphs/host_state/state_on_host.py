"""Optimizer state in host memory, which is on the device only while the optimizer steps.

The state is used once per step. If it is kept on the host, the forward and the backward pass can
use its bytes on the device. The optimizer then steps one bucket of parameters at a time: their
state is copied in, used, and copied back, while the next bucket's state arrives and the last one's
leaves. Results are bitwise identical, since each parameter is stepped on its own with the same
operators on the device.

Parameters can be on the host, too (`graphs.host_state.parameter_loads`). In the optimizer's step
they are copied in and out with the state of their bucket.

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
from graphs.host_state.parameter_loads import loadable_parameters, with_loads, without_loads

WHERE = ("auto", "device", "host")
"""Where the user may ask for the state to be; "auto": wherever the plan is better."""

STEP, STATE = "optimizer_step", "optimizer_state"
"""The names of the node and the tensor that `with_optimizer` adds."""

_OPTIMIZER_RECORD = "environment: optimizer"

Seconds = Callable[[int], float]
"""Bytes -> seconds of one copy in one direction."""


@dataclass(frozen=True)
class StateBucket:
    """Consecutive parameters of the optimizer, which it steps together.

    n_parameters: how many of its trained parameters, in its own order.
    state_bytes: bytes of their state, stored contiguously.
    workspace_bytes, time_s: of their step.
    """

    n_parameters: int
    state_bytes: int
    workspace_bytes: int
    time_s: float


def buckets_of(graph: Graph) -> tuple[StateBucket, ...]:
    """The buckets in which the optimizer of this step can fetch its state from the host; () if the
    state has to stay on the device.

    Raises FormatError for malformed figures.
    """
    environment = graph.meta.environment
    if STEP not in graph.node_by_name or STATE not in graph.tensor_by_name:
        return ()
    if "pipeline" in environment or "kept_state_bytes" not in optimizer_of(environment):
        return ()
    return buckets_in(environment)


def optimizer_of(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """The optimizer's description in the environment of a graph or plan; empty if there is none.

    Raises FormatError if it is not an object.
    """
    found = environment.get("optimizer") or {}
    if not isinstance(found, dict):
        raise FormatError(f"{_OPTIMIZER_RECORD} is {found!r:.60}; expected an object")
    return found


def buckets_in(environment: Mapping[str, Any]) -> tuple[StateBucket, ...]:
    """The optimizer's buckets in the environment of a graph or plan; () if there are none.

    Raises FormatError for malformed ones.
    """
    optimizer = Record(optimizer_of(environment), where=_OPTIMIZER_RECORD)
    names = [field.name for field in dataclasses.fields(StateBucket)]
    found = []
    for index, figures in enumerate(optimizer.items("buckets", default=[])):
        where = f"{_OPTIMIZER_RECORD}: buckets[{index}]"
        if not isinstance(figures, list) or len(figures) != len(names):
            raise FormatError(f"{where} is {figures!r:.60}; expected {', '.join(names)}")
        bucket = Record(dict(zip(names, figures, strict=True)), where=where)
        n_parameters, state_bytes, workspace_bytes = map(bucket.integer, names[:3])
        time_s = bucket.number("time_s")
        found.append(StateBucket(n_parameters, state_bytes, workspace_bytes, time_s))
    return tuple(found)


def streamed_step_s(buckets: Sequence[StateBucket], *, out_s: Seconds, in_s: Seconds) -> float:
    """Seconds of the optimizer's step with its state on the host, until all state is back there.

    At most three buckets are on the device: while one is stepped, the next one arrives and the one
    before leaves. A bucket is not stepped before the bucket two before it has left.

    out_s, in_s: bytes -> seconds of a copy to the host and back.
    """
    if not buckets:
        return 0.0
    # when the last bucket was stepped, and when each bucket has left the device (two 0.0 in front)
    stepped_s, left_s = 0.0, [0.0, 0.0]
    arrived_s = in_s(buckets[0].state_bytes)
    for bucket, upcoming in zip(buckets, [*buckets[1:], None], strict=True):
        start_s = max(stepped_s, left_s[-2])
        next_s = 0.0 if upcoming is None else max(arrived_s, start_s) + in_s(upcoming.state_bytes)
        stepped_s = max(start_s, arrived_s) + bucket.time_s
        left_s.append(max(left_s[-1], stepped_s) + out_s(bucket.state_bytes))
        arrived_s = next_s
    return left_s[-1]


def streamed_workspace_bytes(buckets: Sequence[StateBucket]) -> int:
    """The most bytes that such a step takes: the state of the buckets that leave, are stepped and
    arrive at the same time, and the workspace of the one that is stepped."""
    sizes = [0, *(bucket.state_bytes for bucket in buckets), 0]
    taken_bytes = (sum(sizes[i : i + 3]) + each.workspace_bytes for i, each in enumerate(buckets))
    return max(taken_bytes, default=0)


def with_state_on_host(
    graph: Graph, *, out_s: Seconds, in_s: Seconds, parameters: Collection[str] = ()
) -> Graph | None:
    """The same step with the optimizer's state on the host; None if it has to stay on the device.

    State that cannot leave (`kept_state_bytes`) stays on the device.

    out_s, in_s: bytes -> seconds of a copy to the host and back.
    parameters: tensors that are on the host, too, from `host_parameters`.
    """
    graph = with_state_on_device(graph)
    buckets = buckets_of(graph)
    if not buckets or graph.host_state_bytes:
        return None
    if not set(parameters) <= set(host_parameters(graph)):
        return None
    optimizer = Record(optimizer_of(graph.meta.environment), where=_OPTIMIZER_RECORD)
    size_bytes = {name: graph.tensor_by_name[name].size_bytes for name in parameters}
    # buckets whose state_bytes include their parameters on the host, which are copied with them
    tensors = graph.meta.parameters
    trains = iter(optimizer_of(graph.meta.environment).get("trains") or ())
    copied_buckets = []
    for bucket in buckets:
        names = (tensors.get(name, "") for name in islice(trains, bucket.n_parameters))
        n_bytes = bucket.state_bytes + sum(size_bytes.get(name, 0) for name in names)
        copied_buckets.append(dataclasses.replace(bucket, state_bytes=n_bytes))
    if parameters:
        graph = with_loads(graph, parameters, in_s=in_s)
    return _with_optimizer_figures(
        graph,
        time_s=streamed_step_s(copied_buckets, out_s=out_s, in_s=in_s),
        workspace_bytes=streamed_workspace_bytes(copied_buckets),
        device_bytes=optimizer.integer("kept_state_bytes"),
        host_bytes=sum(bucket.state_bytes for bucket in buckets) + sum(size_bytes.values()),
        parameters=parameters,
    )


def host_parameters(graph: Graph) -> tuple[str, ...]:
    """The parameters that can be on the host with the state, in the order of their first use. ()
    if there are none, or the graph does not record which parameters the optimizer trains."""
    trains = optimizer_of(graph.meta.environment).get("trains")
    return loadable_parameters(graph) if isinstance(trains, list) and trains else ()


def parameters_on_host(environment: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that are on the host: name in the module -> tensor.

    Raises FormatError for a malformed record.
    """
    found = Record(optimizer_of(environment), where=_OPTIMIZER_RECORD)
    names = found.mapping("parameters_on_host", default={})
    if not all(isinstance(tensor, str) for tensor in names.values()):
        raise FormatError(
            f"{_OPTIMIZER_RECORD}: parameters_on_host has values that are no names of tensors"
        )
    return dict(names)


def host_parameter_bytes(graph: Graph) -> int:
    """The part of `host_state_bytes` that is parameters."""
    names = parameters_on_host(graph.meta.environment).values()
    tensor_by_name = graph.tensor_by_name
    return sum(tensor_by_name[name].size_bytes for name in names if name in tensor_by_name)


def with_state_on_device(graph: Graph) -> Graph:
    """The step that `with_state_on_host` was given: undoes it. A graph without state on the host is
    returned unchanged."""
    if not graph.host_state_bytes or not buckets_of(graph):
        return graph
    optimizer = Record(optimizer_of(graph.meta.environment), where=_OPTIMIZER_RECORD)
    if parameters := parameters_on_host(graph.meta.environment):
        graph = without_loads(graph, parameters.values())
    return _with_optimizer_figures(
        graph,
        time_s=optimizer.number("time_s"),
        workspace_bytes=optimizer.integer("workspace_bytes"),
        device_bytes=optimizer.integer("state_bytes"),
        host_bytes=0,
    )


def state_copies_s(graph: Graph) -> float:
    """Seconds that copies of the optimizer's state and of parameters add to the step, if each
    parameter is copied in once before the optimizer's step; 0 if all is on the device."""
    return graph.baseline_time_s - with_state_on_device(graph).baseline_time_s


def _with_optimizer_figures(
    graph: Graph,
    *,
    time_s: float,
    workspace_bytes: int,
    device_bytes: int,
    host_bytes: int,
    parameters: Collection[str] = (),
) -> Graph:
    """The graph with these figures of the optimizer's step, and these bytes of state.

    device_bytes: bytes of state on the device.
    host_bytes: bytes of state and parameters on the host.
    parameters: the parameters on the host.
    """
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
