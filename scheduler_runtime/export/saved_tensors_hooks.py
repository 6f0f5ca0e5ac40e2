"""Export a plan's copies to the host as saved-tensor hooks of PyTorch; the model's own code runs.

The storages that the plan copies to the host are copied there by
`torch.autograd.graph.saved_tensors_hooks`. Nothing is recomputed, and each copy blocks the
computation; the simulator gives the peak and the time of the step that results.

PyTorch 2.13 has two more ways to offload activations, and neither can be used here.
`CheckpointPolicy` has MUST_CPU_OFFLOAD, but eager mode recomputes the results that have that policy
(torch/utils/checkpoint.py only compares with the two SAVE policies). The compiler's activation
offload (`torch._functorch.config.enable_activation_offloading`) only works inside of PyTorch's own
partitioners.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from graphs.graph import Graph, Node, without_random_states
from scheduler_runtime.execute import CallsOnHost, ForwardWithHooks, operator_named
from scheduler_runtime.export.exportable import ExportError, check_exportable, differentiated_words
from scheduler_runtime.export.selective_calls import can_be_kept, dead_calls, eager_calls
from scheduler_runtime.export.stock_checkpoints import ExportedStep
from scheduler_runtime.planned import check_order
from solver.module_checkpointing import EagerStep, held_by_variables
from solver.schedule import (
    Compute,
    Drop,
    Fetch,
    Free,
    Op,
    Schedule,
    Solution,
    Spill,
    Store,
    baseline,
    simulate,
)
from solver.sizes_deadlines_progress import counted, format_share, format_size


@dataclass(frozen=True, kw_only=True)
class ExportedCopies(ExportedStep):
    """What was exported to the model as saved-tensor hooks, and what a step takes with it.

    The figures are for a step in which each tensor is freed after its last use.

    storages: the storages that are copied to the host, each by the name of the tensor that is on it
        first: eager mode writes some results over others.
    host_bytes: the most host memory that they take at once.
    """

    storages: tuple[str, ...]
    host_bytes: int

    def __str__(self) -> str:
        head = (
            f"peak {format_size(self.peak_bytes)} of {format_size(self.budget_bytes)}, "
            f"{counted(len(self.storages), 'tensor')} ({format_size(self.host_bytes)}) on the "
            f"host, overhead {format_share(self.overhead)} (the plan itself: "
            f"{format_share(self.planned_overhead)})" + ("" if self.fits else ": ABOVE THE BUDGET")
        )
        return "\n".join([head, *self.lost])


def to_saved_tensors_hooks(
    model: nn.Module, solution: Solution, *, on_excess: Literal["error", "least"] = "error"
) -> ExportedCopies:
    """Copy to the host what the solution's schedule copies there; replaces the model's forward.

    solution: from solve(model, ..., host_budget=...).
    on_excess: what to do if the step with these copies, but without recomputation, exceeds the
        budget: "error" raises ExportError, "least" exports anyway (see `ExportedCopies.fits`).

    Raises ExportError if the solution has no schedule or copies nothing that autograd saves, if the
    model is not the planned one, has a plan already or has parts that are planned as one piece, and
    if the step does not fit.
    """
    if on_excess not in ("error", "least"):
        raise ValueError(f"on_excess is {on_excess!r}; 'error' or 'least'")
    check_order(model, solution, call="to_saved_tensors_hooks")
    check_exportable(model, solution, call="to_saved_tensors_hooks")
    assert solution.schedule is not None
    assert solution.simulation is not None
    graph = solution.plain
    eager = without_random_states(solution.unplanned)  # with what eager mode holds longer
    if graph.meta.rewrites:
        raise ExportError(
            "the plan rewrites the step, and the plain step is not known; plan the model, not a "
            "file"
        )
    if parts := graph.meta.opaque_parts:
        raise ExportError(
            f"a part of the model is planned as one piece ({parts[0]['module']}), and hooks of "
            "saved tensors cannot tell what is saved inside it from what the plan copies; use "
            "apply(model, solution)"
        )
    if words := differentiated_words(graph):
        raise ExportError(f"{words}; use apply(model, solution), which copies as planned")
    copied = {op.storage for op in solution.schedule.ops if isinstance(op, Store)}
    chosen = _can_be_offloaded(solution, copied)
    storages = tuple(dict.fromkeys(chosen.values()))
    if not chosen:
        raise ExportError(
            "the solution's schedule copies nothing to the host that autograd saves; give solve() "
            "a host_budget, or export with to_torch_checkpoint()"
        )
    schedule = _schedule_with_hooks(eager, frozenset(storages))
    simulation = simulate(eager, schedule, places=solution.request.places)
    exported = ExportedCopies(
        storages=storages,
        schedule=replace(schedule, graph_id=solution.unplanned.graph_id),
        peak_bytes=simulation.peak_bytes,
        time_s=simulation.time_s,
        host_bytes=simulation.host_peak_bytes,
        planned_time_s=solution.simulation.time_s,
        baseline_time_s=solution.baseline.time_s,
        budget_bytes=solution.request.available_bytes,
        lost=tuple(_limitations(solution, len(copied) - len(chosen), simulation.stall_s)),
        _model=model,
    )
    if not exported.fits and on_excess == "error":
        raise ExportError(
            f"the budget is {exported.budget_bytes} bytes, and with the copies of this plan alone "
            f"the step takes {exported.peak_bytes}: hooks of saved tensors recompute nothing. "
            'apply(model, solution) keeps to the budget; or give on_excess="least"'
        )
    model.forward = ForwardWithHooks(model, _calls_to_offload(graph, frozenset(chosen)))
    return exported


def _can_be_offloaded(solution: Solution, names: Set[str]) -> dict[str, str]:
    """Those of the named tensors that hooks can keep on the host -> their storages in eager mode,
    which writes some results over other tensors."""
    graph, eager = solution.plain, solution.unplanned
    stays = {eager.root(tensor.name) for tensor in eager.resident}
    stays |= {eager.root(name) for name in eager.outputs}
    return {
        name: eager.root(name)
        for node in graph.forward_nodes
        for name in node.outputs
        if name in names and eager.root(name) not in stays and _is_recognised(graph, node, name)
    }


def _is_recognised(graph: Graph, node: Node, name: str) -> bool:
    """Whether a hook recognises this result of the model's forward pass: only if eager mode calls
    an operator that returns it."""
    if not can_be_kept(graph, node):
        return False
    # the eager batch norm does not return the new running statistics, unlike the traced one
    operator = operator_named(eager_calls(graph, node)[-1])
    return operator is not None and _result_index(node, name) < len(operator._schema.returns)


def _result_index(node: Node, name: str) -> int:
    """The index of a tensor among the results of the call that makes it."""
    return 0 if name == node.name else int(name.rsplit(".", 1)[1])


def _schedule_with_hooks(graph: Graph, storages: frozenset[str]) -> Schedule:
    """The step as eager mode runs it with the hooks.

    Each of these storages leaves the device after the last forward operator that reads it, once no
    variable of `forward` holds it. It comes back for each backward function that reads it, before
    the function's first operator, and leaves again after the function's last one that reads it.
    """
    plain = baseline(graph)
    position = {op.node: at for at, op in enumerate(plain.ops) if isinstance(op, Compute)}
    # storage -> position of its last use in the forward pass
    forward: defaultdict[str, int] = defaultdict(int)
    # storage -> position of a backward function -> the last one at which the function reads it
    backward: defaultdict[str, dict[int, int]] = defaultdict(dict)
    function_of = EagerStep.of(graph).function_of
    for name, at in position.items():
        node = graph.node_by_name[name]
        for root in {graph.root(each) for each in (*graph.needs[name], *node.outputs)} & storages:
            if node.phase in ("forward", "outside"):
                forward[root] = at
            else:
                backward[root][position[function_of.get(name, (name,))[0]]] = at
    for until, held in held_by_variables(graph).items():
        for root in {graph.root(name) for name in held} & storages:
            forward[root] = max(forward[root], position[until])
    before: dict[int, list[Op]] = defaultdict(list)
    after: dict[int, list[Op]] = defaultdict(list)
    for root, functions in backward.items():  # what no backward function reads is freed as usual
        tensors = [n for n in (root, *graph.views.get(root, ())) if n in graph.producer]
        after[forward[root]] += [Store(root), *map(Free, tensors)]
        for first, last in functions.items():
            before[first].append(Fetch(root))
            after[last] += [*map(Free, tensors)]
        after[max(functions.values())].append(Drop(root))
    ops: list[Op] = []
    for at, op in enumerate(plain.ops):
        is_freed_by_hooks = isinstance(op, Free) and graph.root(op.tensor) in backward
        ops += [*before[at], *([] if is_freed_by_hooks else [op]), *after[at]]
    return Schedule(ops=tuple(ops), graph_id=graph.graph_id)


def _calls_to_offload(graph: Graph, chosen: frozenset[str]) -> CallsOnHost:
    """The operator calls of eager mode that return these tensors."""
    dead = dead_calls(graph, [node.name for node in graph.forward_nodes])
    seen = Counter(dead.get("", ()))
    results: defaultdict[str, dict[int, frozenset[int]]] = defaultdict(dict)
    for node in graph.forward_nodes:
        *before, last = eager_calls(graph, node) or (node.name,)
        for name in before:
            seen[name] += 1
        made = [name for name in node.outputs if name in chosen]
        if made:
            results[last][seen[last]] = frozenset(_result_index(node, name) for name in made)
        seen[last] += 1
        seen.update(dead.get(node.name, ()))
    return CallsOnHost(dict(results), {name: seen[name] for name in results})


def _limitations(solution: Solution, n_not_saved: int, stall_s: float) -> Iterator[str]:
    """Sentences on what the hooks do not do, although the plan does.

    n_not_saved: tensors that the plan copies and the hooks do not.
    stall_s: how long the exported step waits for copies.
    """
    assert solution.simulation is not None
    if n := solution.simulation.n_recomputed:
        yield f"{counted(n, 'recomputed operator')} of the plan: not recomputed, results stay saved"
    more_s = stall_s - solution.simulation.stall_s
    if more_s > 0:
        share = format_share(more_s / (solution.baseline.time_s or 1.0))
        yield f"longer waits for copies than in the plan: {share} time"
    if n_not_saved:
        yield f"{counted(n_not_saved, 'tensor')} that the plan copies: not saved by autograd"
    if solution.graph.host_state_bytes:
        yield "the optimizer's state stays on the device"
    if any(isinstance(op, Spill) for op in (solution.schedule.ops if solution.schedule else ())):
        yield "nothing goes on to the disk"
    if solution.graph.meta.rewrites:
        yield "the rewrites of the plan: PyTorch's own step runs"
