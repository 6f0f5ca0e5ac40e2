"""Advice that goes with a plan: where the memory goes, and what reduces it beyond recomputation.

Advice is given only if the baseline does not fit, and every sentence quotes figures of this graph.
Ops are recognized by operator (`aten._log_softmax.default`), dtypes by the metadata of the trace.
Nothing is guessed that a graph file does not record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from graphs.fsdp import sharding_of
from graphs.graph import Graph, Node
from graphs.hardware import is_collective
from graphs.host_state import host_parameters, optimizer_of, parameters_on_host
from graphs.pipeline import pipeline_of
from solver.chain import Blocks, checkpoints, computing_blocks, split_into_blocks
from solver.methods import METHODS
from solver.schedule import STATE, PeakMemory, Solution, keep, node_at, simulate
from solver.sizes_deadlines_progress import (
    IN_PYTHON,
    Reader,
    counted,
    describe_op,
    format_percent,
    format_share,
    format_size,
)

Kind = Literal["state", "logits", "one_op", "precision", "theory"]

ABOUT: Mapping[Kind, str] = {
    "state": "model state",
    "logits": "logits",
    "one_op": "one operator",
    "precision": "precision",
    "theory": "theory",
}
"""The subject of each kind of advice, as shown in reports."""

STATE_SHARE = 0.5
"""From this share of the budget on, parameters, gradients and optimizer state are the problem."""
OP_SHARE = 0.5
"""From this share of the non-resident budget on, the tensors of a single op are the problem."""
LARGE_SHARE = 0.2
"""A tensor from this share of an op's bytes on decides whether the op belongs to the loss."""
ACTIVATION_SHARE = 0.25
"""Below this share of the baseline peak, smaller activations would change little."""
LOSS_OPERATORS = (
    *("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"),
    *("nll_loss2d_forward", "nll_loss2d_backward", "cross_entropy_loss"),
)
"""Operators of a classification loss, whose tensors are as large as the logits."""
WIDE_DTYPES = ("float32", "float64")
WORTHWHILE_SHARE = 0.05
"""Advice that can save less than this share of the peak is not given."""
BITS_8_SHARE = 0.25
"""Bytes of 8-bit optimizer states as a share of 32-bit ones (Dettmers et al. 2022,
arXiv:2110.02861)."""


@dataclass(frozen=True)
class Advice:
    """One piece of advice. kind: its subject. text: one or more sentences."""

    kind: Kind
    text: str


def advise(solution: Solution, *, reader: Reader = IN_PYTHON) -> tuple[Advice, ...]:
    """Return all advice that applies, the most useful first; none if the baseline fits.

    reader: whether advice names command-line options or Python arguments.

    Cost: at most two simulations of the graph.
    """
    if solution.baseline.peak_bytes <= solution.request.available_bytes:
        return ()
    found: dict[Kind, Iterator[str]] = {
        "state": _state(solution, reader),
        "logits": _logits(solution, reader),
        "one_op": _one_op(solution),
        "precision": _precision(solution, reader),
        "theory": _theory(solution),
    }
    return tuple(Advice(kind, text) for kind, texts in found.items() for text in texts)


def _state(solution: Solution, reader: Reader) -> Iterator[str]:
    """Advice if parameters, gradients and optimizer state take much of the budget, or if nothing
    fits because of the optimizer's step."""
    graph, available_bytes = solution.graph, solution.request.available_bytes
    run = solution.peaks[-1]
    bytes_of = run.bytes_at_the_end()
    state_bytes = sum(bytes_of[name] for name in STATE)
    if state_bytes < STATE_SHARE * available_bytes and not _ends_in_optimizer(solution):
        return
    share = format_percent(state_bytes / available_bytes, digits=1)
    text = (
        "At the end of the step parameters, gradients and optimizer state take "
        f"{format_size(state_bytes)}, {share} of the available memory, and recomputation frees "
        f"none of it. {_state_at_the_peak(run, state_bytes)} "
    )
    sharding = sharding_of(graph.meta.environment)
    if sharding is None and any(is_collective(node.op) for node in graph.nodes):
        text += (
            "These are the bytes of one rank of tensor parallelism; with more ranks, each rank "
            "holds fewer. Sharding over k groups of such ranks (FSDP2 on top) divides them by k"
        )
    elif sharding is None:
        text += "Sharding over k devices (FSDP, ZeRO) divides it by k"
    else:
        text += f"With more than {sharding.n_ranks} ranks each has a smaller shard"
    worth_bytes = WORTHWHILE_SHARE * run.total_bytes
    if bytes_of["optimizer"] >= worth_bytes and not graph.host_state_bytes:
        less = BITS_8_SHARE * bytes_of["optimizer"]
        text += (
            f"; 8-bit optimizer states take a quarter of 32-bit ones, {format_size(less)} instead "
            f"of {format_size(bytes_of['optimizer'])}"
        )
    trained = bytes_of["gradients"] + bytes_of["optimizer"]
    parameter_bytes, frozen_bytes = _total_and_frozen_bytes(graph)
    is_mostly_frozen = 2 * frozen_bytes > parameter_bytes
    if trained >= worth_bytes and not is_mostly_frozen:
        text += (
            "; training only adapters (LoRA) saves nearly all of the "
            f"{format_size(trained)} of gradients and optimizer state"
        )
    if is_mostly_frozen:
        text += _frozen_on_host(graph, frozen_bytes, worth_bytes, reader)
    else:
        text += _state_on_host(solution, bytes_of["optimizer"], worth_bytes, reader)
    yield text + "."


def _state_on_host(
    solution: Solution, optimizer_bytes: int, worth_bytes: float, reader: Reader
) -> str:
    """Suggest optimizer state, and parameters, in host memory; "" if that does not apply."""
    graph, request = solution.graph, solution.request
    optimizer = optimizer_of(graph.meta.environment)
    if not (_may_have_host(graph) and optimizer.get("buckets")) or optimizer.get("state_stays"):
        return ""
    host = None if request.places is None else request.places.host
    if host is not None and optimizer_bytes > host.capacity_bytes:
        return (
            f"; the optimizer's state ({format_size(optimizer_bytes)}) does not fit into the "
            f"{format_size(host.capacity_bytes)} of host memory"
        )
    if request.parameters != "device" or optimizer_bytes < worth_bytes:
        return ""
    if host_parameters(graph):
        what, how = "the optimizer's state and parameters", reader.on_host
    elif host is None:
        what, how = "the optimizer's state", reader.host
    else:
        return ""
    return f"; {how} keeps {what} in host memory between uses"


def _may_have_host(graph: Graph) -> bool:
    """Whether the step can be planned with host memory that is separate from the device's."""
    environment = graph.meta.environment
    return (
        graph.n_in_flight == 1
        and pipeline_of(environment) is None
        and sharding_of(environment) is None
        and not graph.meta.opaque_parts
        and not graph.meta.scope  # whole submodules
        and graph.meta.device != "cpu"
    )


def _total_and_frozen_bytes(graph: Graph) -> tuple[int, int]:
    """Bytes of all parameters, and of the frozen ones; (0, 0) if the graph does not record them."""
    layout = graph.meta.parameter_layout
    gradients = {str(each.get("tensor")): each.get("gradient") for each in layout.values()}
    sizes = {
        name: graph.tensor_by_name[name].size_bytes
        for name in gradients
        if name in graph.tensor_by_name
    }
    return sum(sizes.values()), sum(sizes[name] for name in sizes if gradients[name] is None)


def _frozen_on_host(graph: Graph, frozen_bytes: int, worth_bytes: float, reader: Reader) -> str:
    """Suggest frozen parameters in host memory; "" if that does not apply to this graph."""
    if not _may_have_host(graph) or parameters_on_host(graph.meta.environment):
        return ""
    can_leave = sum(graph.tensor_by_name[name].size_bytes for name in host_parameters(graph))
    if can_leave < worth_bytes:
        return ""
    return (
        f"; {format_size(frozen_bytes)} of parameters are frozen: with {reader.on_host}, up to "
        f"{format_size(can_leave)} of parameters are in host memory while no operator reads them"
    )


def _state_at_the_peak(run: PeakMemory, end_bytes: int) -> str:
    """The figures at the peak, as in the report's table, and why they differ from those at the end
    of the step."""
    peak_bytes = sum(run.bytes_of[name] for name in STATE)
    fewer = ", as not all gradients exist yet" if peak_bytes < end_bytes else ""
    return (
        f"At the peak of the {run.name}, {format_size(run.total_bytes)}, they take "
        f"{format_size(peak_bytes)} ({format_percent(run.share(*STATE), digits=1)}) besides "
        f"{format_size(run.bytes_of['activations'])} of activations "
        f"({format_percent(run.share('activations'), digits=1)}){fewer}."
    )


def _logits(solution: Solution, reader: Reader) -> Iterator[str]:
    """Advice if the widest op belongs to the loss: compute the loss in chunks."""
    node, size = _widest_op(solution)
    if node is not None and _is_loss_op(solution.graph, node):
        in_chunks = _how_to_chunk_loss(solution, reader)
        yield (
            f"At the peak, {describe_op(node)} alone requires {size}, tensors as large as the "
            "logits. Computing the head and the loss together in chunks of tokens (a fused linear "
            f"cross-entropy) requires the logits of one chunk at a time{in_chunks}."
        )


def _how_to_chunk_loss(solution: Solution, reader: Reader) -> str:
    """How to get the loss in chunks: by a rewrite of the plan or, under FSDP2, whose steps run the
    model's own code, by a change of the model."""
    if sharding_of(solution.graph.meta.environment) is not None:
        return (
            "; torch.nn.functional.linear_cross_entropy (PyTorch 2.13) with "
            "LinearCrossEntropyOptions(batch_chunk_size=...) does so in the model's forward, and "
            "changes last bits"
        )
    if solution.request.rewrites == "allclose":
        return (
            "; the plan may do so for losses that it recognizes (docs/rewrites.md), and does not "
            "do so here"
        )
    return (
        f"; a plan of the model with {reader.last_bits} does so where it can, for one "
        "cross-entropy of one linear head, and changes last bits"
    )


def _one_op(solution: Solution) -> Iterator[str]:
    """Advice if the widest op does not belong to the loss: make this op smaller."""
    node, size = _widest_op(solution)
    if node is not None and not _is_loss_op(solution.graph, node):
        yield (
            f"At the peak, {describe_op(node)} alone requires {size}. No schedule can run this "
            f"operator with less; {_how_to_shrink(node)}."
        )


def _how_to_shrink(node: Node) -> str:
    """How the model can run the operator with less memory."""
    packet = node.op.removeprefix("aten.").partition(".")[0]
    if "attention" in packet:
        return "its fused kernel is used already: run it for a part of the batch or of the heads"
    if "convolution" in packet:
        return "run it for a part of the batch, or on smaller images or fewer channels"
    return "split it over the batch or the sequence, or use a fused one"


def _precision(solution: Solution, reader: Reader) -> Iterator[str]:
    """Advice if activations take much of the peak and are in a wide dtype: use 16 bits."""
    graph = solution.graph
    bytes_of = graph.meta.parameter_bytes
    main_dtype = max(bytes_of, key=lambda dtype: bytes_of[dtype], default="")
    autocast = graph.meta.environment.get("autocast", "unknown")
    if autocast is not None or main_dtype not in WIDE_DTYPES:
        return
    share = solution.peaks[0].share("activations")
    if share < ACTIVATION_SHARE or _ends_in_optimizer(solution) or _room_bytes(solution) <= 0:
        return
    yield (
        f"Mixed precision is off: the parameters are {main_dtype} and activations are "
        f"{format_percent(share, digits=1)} of the baseline peak. In 16 bits most of them take "
        f"half the bytes, and matrix products run faster on most GPUs; {reader.in_16_bits}."
    )


def _ends_in_optimizer(solution: Solution) -> bool:
    """Whether nothing fits because of the optimizer's step, in which there are no activations."""
    op = "" if solution.obstacle is None else solution.obstacle.op
    node = solution.graph.node_by_name.get(op)
    return node is not None and node.phase == "optimizer"


def _theory(solution: Solution) -> Iterator[str]:
    """What textbook checkpointing (every block, √L segments) costs on this graph."""
    graph, simulation = solution.graph, solution.simulation
    blocks = computing_blocks(solution.plain)
    if simulation is None or simulation.n_recomputed == 0 or blocks.n_blocks < 2:
        return
    plain_s = solution.baseline.time_s or 1.0
    forward_s = math.fsum(node.time_s for node in graph.forward_nodes)
    n_segments = max(2, round(math.sqrt(blocks.n_blocks)))
    segments = split_into_blocks(solution.plain, max_blocks=n_segments)
    share = solution.peaks[0].share("activations")
    method = METHODS.get(solution.method)
    where = "here on the step without rewrites" if graph.meta.rewrites else "here"
    is_op_by_op = method is not None and method.op_by_op and not graph.meta.scope
    plan = "this plan, op by op," if is_op_by_op else "this plan"
    # If most blocks are single ops, checkpointing every block would keep nearly everything and save
    # next to nothing, so leave it out.
    single = sum(len(names) == 1 for names in blocks.forward)
    of_layers = 2 * single < blocks.n_blocks
    ways, every_block = "√L segments", ""
    if of_layers:
        ways = f"every block, or {ways},"
        every_block = f"every block {_cost_text(solution, split_into_blocks(solution.plain))}; "
    yield (
        f"Activations are {format_percent(share, digits=1)} of the baseline peak. Split where few "
        f"activations cross, the step is a chain of {blocks.n_blocks} blocks. In theory, "
        f"checkpointing {ways} costs at most one more forward pass, "
        f"{format_share(forward_s / plain_s)}. Simulated {where}: {every_block}"
        f"√L, {counted(n_segments, 'segment')} (method sqrt fits their number to the budget "
        f"instead), {_cost_text(solution, segments)}; "
        f"{plan} {format_size(simulation.peak_bytes)} at {format_share(solution.overhead or 0.0)}."
        + (_OF_THE_GRAPH if graph.meta.differentiated_modules else "")
    )


_OF_THE_GRAPH = (
    " These are blocks of the graph. As forward takes gradients itself, torch.utils.checkpoint "
    "around modules saves less: it keeps what it recomputes for them."
)


def _cost_text(solution: Solution, blocks: Blocks) -> str:
    """Peak and overhead of saving the inputs of these blocks and everything in the last one."""
    graph = solution.plain
    simulation = simulate(graph, keep(graph, checkpoints(graph, blocks, n_whole=1)))
    overhead = (
        simulation.time_s / (solution.baseline.time_s or 1.0) - 1.0 if simulation.time_s else 0.0
    )
    fits = simulation.peak_bytes <= solution.request.available_bytes
    unfit = "" if fits else " (does not fit)"
    return f"{format_size(simulation.peak_bytes)} at {format_share(overhead)}{unfit}"


def _widest_op(solution: Solution) -> tuple[Node | None, str]:
    """The bottleneck op, or the peak op of a plan, with the size of its tensors; None if small."""
    graph, node = solution.graph, None
    if solution.obstacle is not None:
        node = graph.node_by_name.get(solution.obstacle.op)
    elif solution.schedule is not None and solution.simulation is not None:
        node = node_at(graph, solution.schedule, solution.simulation)
    if node is None or node.phase == "optimizer":
        return None, ""
    own_bytes = _own_bytes(graph, node)
    room_bytes = _room_bytes(solution)
    is_wide = room_bytes > 0 and own_bytes >= OP_SHARE * room_bytes
    return (node, format_size(own_bytes)) if is_wide else (None, "")


def _room_bytes(solution: Solution) -> int:
    """Bytes of the budget beyond the resident ones; if negative, no smaller operator can help."""
    return solution.request.available_bytes - solution.graph.resident_bytes


def _own_tensors(graph: Graph, node: Node) -> dict[str, int]:
    """The non-resident storages that the node reads or writes, with their bytes."""
    roots = {graph.root(name) for name in (*node.inputs, *node.outputs)}
    return {r: graph.tensor_by_name[r].size_bytes for r in roots if r in graph.producer}


def _own_bytes(graph: Graph, node: Node) -> int:
    """The non-resident bytes that the node needs by itself: what it reads, writes and workspace."""
    return sum(_own_tensors(graph, node).values()) + node.workspace_bytes


def _is_loss_op(graph: Graph, node: Node) -> bool:
    """Whether the op is an operator of a loss, or shares a large tensor with one."""
    least_bytes = LARGE_SHARE * _own_bytes(graph, node)
    large = {root for root, size in _own_tensors(graph, node).items() if size >= least_bytes}
    return any(
        (other.op.split(".")[1:2] or [other.op])[0] in LOSS_OPERATORS  # of aten.OPERATOR.default
        and (other == node or large & set(map(graph.root, (*other.inputs, *other.outputs))))
        for other in graph.nodes
    )
