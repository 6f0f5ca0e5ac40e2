"""What else would help: where the bytes are, and whether recomputation is the lever for them.

Said only where the step does not fit as it is; every sentence has this graph's own figures. An op
is known by its operator (`aten._log_softmax.default`), a dtype by what the trace wrote into the
graph's meta; nothing is read out of a name, and what a graph file does not say is not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from graphs.fsdp import sharding_of
from graphs.graph import Graph, Node
from solver.chain import Blocks, checkpoints, split_into_blocks
from solver.common import counted, describe_op, format_share, format_size
from solver.schedule import Solution, baseline, keep, memory_at, node_at, simulate

Kind = Literal["state", "logits", "one_op", "precision", "theory"]

ABOUT: Mapping[Kind, str] = {
    "state": "model state",
    "logits": "logits",
    "one_op": "one operator",
    "precision": "precision",
    "theory": "theory",
}
"""For people: what each kind is about."""

STATE_SHARE = 0.5
"""Of the budget: from here on parameters, gradients and optimizer state are what fills it."""
OP_SHARE = 0.5
"""Of the budget above what is resident: from here on one op's own tensors are what fills it."""
LARGE_SHARE = 0.2
"""Of an op's own bytes: tensors from here on tell what kind of op it is."""
ACTIVATION_SHARE = 0.25
"""Of the peak without a plan: below it, smaller activations would change little."""
LOSS_OPERATORS = (
    *("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"),
    *("nll_loss2d_forward", "nll_loss2d_backward", "cross_entropy_loss"),
)
"""Operators of a classification loss: what they read and make is as large as the logits."""
OP_LEVEL_METHODS = ("auto", "ilp")
WIDE_DTYPES = ("float32", "float64")
BITS_8_SHARE = 0.25
"""8-bit optimizer states beside 32-bit ones (Dettmers et al. 2022, arXiv:2110.02861)."""


@dataclass(frozen=True)
class Advice:
    """kind: what it is about. text: whole sentences."""

    kind: Kind
    text: str


def advise(solution: Solution) -> tuple[Advice, ...]:
    """All that applies, the most useful first; nothing where the step fits without a plan.

    Cost: two schedules of the chain of blocks are made and judged, each linear in the graph.
    """
    if solution.baseline.peak_bytes <= solution.request.available_bytes:
        return ()
    return tuple(
        Advice(kind, text) for kind, finder in _FINDERS.items() for text in finder(solution)
    )


def _state(solution: Solution) -> Iterator[str]:
    """Parameters, their gradients and the optimizer's state fill the budget."""
    graph, available_bytes = solution.graph, solution.request.available_bytes
    by_kind = {"parameter": 0, "gradient": 0, "optimizer_state": 0}
    to_the_end = _read_at_the_end(graph)
    for tensor in graph.tensors:
        made = tensor.name in graph.producer
        if tensor.alias_of is None and tensor.kind in by_kind:
            by_kind[tensor.kind] += tensor.size_bytes * (not made or tensor.name in to_the_end)
    state_bytes = sum(by_kind.values())
    if state_bytes < STATE_SHARE * available_bytes:
        return
    words = f"{_percent(state_bytes / available_bytes)} of what may be used"
    text = (
        f"Parameters, gradients and optimizer state come to {format_size(state_bytes)}, {words}; "
        "recomputation frees none of it. "
    )
    sharding = sharding_of(graph.meta.environment)
    if sharding is None:
        text += "Sharding them over k devices (FSDP, ZeRO) divides them by k"
    else:
        text += f"More than {sharding.n_ranks} ranks have smaller shards of them each"
    if by_kind["optimizer_state"]:
        less = BITS_8_SHARE * by_kind["optimizer_state"]
        text += (
            f"; 8-bit optimizer states take a quarter of 32-bit ones, {format_size(less)} for "
            f"{format_size(by_kind['optimizer_state'])}"
        )
    trained = by_kind["gradient"] + by_kind["optimizer_state"]
    if trained:
        text += (
            f"; training adapters alone (LoRA) does without nearly all of the "
            f"{format_size(trained)} of gradients and states"
        )
    yield text + "."


def _read_at_the_end(graph: Graph) -> frozenset[str]:
    """Storages that the optimizer reads or that are outputs: of the gradients, those of weights."""
    reads = (name for n in graph.later_nodes if n.phase == "optimizer" for name in n.inputs)
    return frozenset(map(graph.root, (*reads, *graph.outputs)))


def _logits(solution: Solution) -> Iterator[str]:
    node, own_bytes = _widest(solution)
    if node is not None and _is_of_the_loss(solution.graph, node, own_bytes):
        yield (
            f"{_held(node, own_bytes)}: tensors as large as the logits. Computing head and loss in "
            "chunks of tokens (a chunked or fused cross-entropy) needs them for one chunk at a "
            "time; no schedule of whole operators can."
        )


def _one_op(solution: Solution) -> Iterator[str]:
    node, own_bytes = _widest(solution)
    if node is not None and not _is_of_the_loss(solution.graph, node, own_bytes):
        yield (
            f"{_held(node, own_bytes)}. No schedule can run it with less; splitting it, over the "
            "batch or the sequence, or a fused operator in its place can."
        )


def _held(node: Node, own_bytes: int) -> str:
    return f"At the peak {describe_op(node)} alone holds {format_size(own_bytes)}"


def _precision(solution: Solution) -> Iterator[str]:
    """Activations count, and they are in a wide dtype."""
    graph = solution.graph
    dtypes = graph.meta.parameter_bytes
    if graph.meta.environment.get("autocast", "unknown") is not None or not _are_wide(dtypes):
        return
    parts = memory_at(graph, baseline(graph), solution.baseline.peak_op)
    share = parts["activations"] / solution.baseline.peak_bytes
    if share < ACTIVATION_SHARE:
        return
    yield (
        f"Mixed precision is not in use: the parameters are {_main_dtype(dtypes)}, autocast is "
        f"off, and activations are {_percent(share)} of the peak without a plan. In 16 bits most "
        "of them take half the bytes, and matrix products run faster on most GPUs; --autocast "
        "bf16 plans with it."
    )


def _theory(solution: Solution) -> Iterator[str]:
    """What the usual rules cost on this graph, beside what was found."""
    graph, simulation = solution.graph, solution.simulation
    blocks = split_into_blocks(graph)
    if simulation is None or simulation.n_recomputed == 0 or blocks.n_blocks < 2:
        return
    plain_s = solution.baseline.time_s or 1.0
    forward_s = math.fsum(node.time_s for node in graph.forward_nodes)
    n_segments = max(2, round(math.sqrt(blocks.n_blocks)))
    parts = memory_at(graph, baseline(graph), solution.baseline.peak_op)
    share = parts["activations"] / (solution.baseline.peak_bytes or 1)
    words = "this plan"
    if solution.method in OP_LEVEL_METHODS:
        words += ", which decides op by op,"
    yield (
        f"Activations are {_percent(share)} of the peak without a plan. Cut wherever little "
        f"passes from one operator to the next, the step is a chain of {blocks.n_blocks} blocks. "
        "Theory: keeping one checkpoint a block, or √L of them, costs at most one more "
        f"forward pass, {format_share(forward_s / plain_s)}. Here, judged alike: "
        f"every block {_costs(solution, blocks)}; "
        f"√L, {counted(n_segments, 'segment')}, "
        f"{_costs(solution, split_into_blocks(graph, max_blocks=n_segments))}; "
        f"{words} {format_size(simulation.peak_bytes)} at {format_share(solution.overhead or 0.0)}."
    )


def _costs(solution: Solution, blocks: Blocks) -> str:
    """Peak and overhead of keeping these blocks' inputs and the last block whole."""
    graph = solution.graph
    simulation = simulate(graph, keep(graph, checkpoints(graph, blocks, n_whole=1)))
    over = simulation.time_s / (solution.baseline.time_s or 1.0) - 1.0 if simulation.time_s else 0.0
    fits = simulation.peak_bytes <= solution.request.available_bytes
    unfit = "" if fits else " (does not fit)"
    return f"{format_size(simulation.peak_bytes)} at {format_share(over)}{unfit}"


def _widest(solution: Solution) -> tuple[Node | None, int]:
    """The op at the plan's peak, or in the way of one, with its own bytes; None: it is not wide."""
    graph = solution.graph
    if solution.obstacle is not None:
        node = graph.node_by_name.get(solution.obstacle.op)
    elif solution.schedule is not None and solution.simulation is not None:
        node = node_at(graph, solution.schedule, solution.simulation)
    else:
        node = None
    if node is None or node.phase == "optimizer":
        return None, 0
    own_bytes = sum(_own_tensors(graph, node).values()) + node.workspace_bytes
    room_bytes = solution.request.available_bytes - graph.resident_bytes
    return (node, own_bytes) if own_bytes >= OP_SHARE * room_bytes else (None, 0)


def _own_tensors(graph: Graph, node: Node) -> dict[str, int]:
    """The storages that the step makes and the node reads or makes, with their bytes."""
    roots = {graph.root(name) for name in (*node.inputs, *node.outputs)}
    return {r: graph.tensor_by_name[r].size_bytes for r in roots if r in graph.producer}


def _is_of_the_loss(graph: Graph, node: Node, own_bytes: int) -> bool:
    """Whether it is an operator of a loss, or shares a large tensor with one."""
    if _operator(node) in LOSS_OPERATORS:
        return True
    own = _own_tensors(graph, node)
    large = {root for root, size in own.items() if size >= LARGE_SHARE * own_bytes}
    return any(
        _operator(other) in LOSS_OPERATORS
        and large.intersection(map(graph.root, (*other.inputs, *other.outputs)))
        for other in graph.nodes
    )


def _operator(node: Node) -> str:
    """`_log_softmax` of "aten._log_softmax.default"."""
    parts = node.op.split(".")
    return parts[1] if len(parts) > 1 else node.op


def _are_wide(bytes_by_dtype: object) -> bool:
    """Whether most bytes of the parameters are of 32 bits or more; False where it is not known."""
    return _main_dtype(bytes_by_dtype) in WIDE_DTYPES


def _main_dtype(bytes_by_dtype: object) -> str:
    """The dtype of most of the parameters' bytes, "" where it is not known."""
    if not isinstance(bytes_by_dtype, Mapping) or not bytes_by_dtype:
        return ""
    return str(max(bytes_by_dtype, key=lambda dtype: bytes_by_dtype[dtype]))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


_FINDERS: Mapping[Kind, Callable[[Solution], Iterator[str]]] = {
    "state": _state,
    "logits": _logits,
    "one_op": _one_op,
    "precision": _precision,
    "theory": _theory,
}
