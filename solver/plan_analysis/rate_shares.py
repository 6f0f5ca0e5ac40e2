"""How far a plan's overhead depends on which shares of its peak rates a card reaches.

By the roofline every operator runs at a peak rate: products at that of their dtype, others at the
memory's. Kernels reach a share of it. One share for all leaves overheads as they are; what changes
them is the ratio of the two shares. No published row tells the shares apart, but each bounds their
ratio: neither share is above 1, and together they give the measured time. The widest bounds are
those of a step of a Llama with 3 billion parameters on an A100 (`python -m benchmarks.published`
computes them), and are taken for every card.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from graphs.graph import Node
from graphs.hardware import is_cuda
from solver.schedule import Compute, Solution

LEAST_RATIO, LARGEST_RATIO = 0.69, 2.19
"""The share that products reach of their rate, over that of other operators."""

_PRODUCTS = re.compile(
    r"aten\.(mm|addmm|bmm|baddbmm|addbmm|_grouped_mm|convolution|convolution_backward)\."
    r"|attention|linear_cross_entropy|head_loop"
)


def is_product(op: str) -> bool:
    """Whether an operator is costed by its FLOPs: a product, a convolution or attention."""
    return _PRODUCTS.search(op) is not None


def overhead_range(solution: Solution) -> tuple[float, float] | None:
    """The least and the largest overhead of the plan for these ratios.

    None: no plan, costs that are not a card's rates, or copies, whose times do not add up.
    """
    schedule, costs = solution.schedule, solution.graph.meta.costs
    with_copies = solution.request.places is not None
    if schedule is None or with_copies or isinstance(costs, str):
        return None
    if costs.get("model") != "roofline" or not is_cuda(costs):
        return None
    nodes = solution.graph.node_by_name
    planned = split_s(nodes[op.node] for op in schedule.ops if isinstance(op, Compute))
    plain = split_s(solution.plain.nodes)
    if not sum(plain):
        return None
    ends = [
        (planned[0] + ratio * planned[1]) / (plain[0] + ratio * plain[1]) - 1.0
        for ratio in (LEAST_RATIO, LARGEST_RATIO)
    ]
    return min(ends), max(ends)


def split_s(nodes: Iterable[Node]) -> tuple[float, float]:
    """Seconds of products and of other operators."""
    products_s = others_s = 0.0
    for node in nodes:
        if is_product(node.op):
            products_s += node.time_s
        else:
            others_s += node.time_s
    return products_s, others_s
