"""How a plan's overhead depends on the shares of its peak rates that a card reaches.

In the roofline model every operator runs at a peak rate: matrix products at the rate of their
dtype, others at the memory bandwidth. Real kernels reach only a share of it. If the share were the
same for all operators, overheads would not change; they depend on the ratio of the two shares
(products / others). Published step times do not tell the two shares apart, but each one bounds
their ratio: neither share is above 1, and together they give the measured time. The widest bounds,
which are used for every card, come from a step of a Llama with 3 billion parameters on an A100
(`python -m benchmarks.published` computes them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from graphs.graph import Node
from graphs.hardware import is_cuda
from solver.schedule import Compute, Solution

LEAST_RATIO, LARGEST_RATIO = 0.69, 2.19
"""Bounds on the share of the peak rate that products reach, divided by that of other operators."""

_PRODUCTS = re.compile(
    r"aten\.(mm|addmm|bmm|baddbmm|addbmm|_grouped_mm|convolution|convolution_backward)\."
    r"|attention|linear_cross_entropy|head_loop"
)


def is_product(op: str) -> bool:
    """Whether an operator is a matrix product, a convolution or attention, whose cost is set by
    its FLOPs."""
    return _PRODUCTS.search(op) is not None


def overhead_range(solution: Solution) -> tuple[float, float] | None:
    """The smallest and the largest overhead of the plan between LEAST_RATIO and LARGEST_RATIO.

    None if there is no plan, if the costs are not those of a card's roofline, or if the plan may
    copy to the host: the times of copies do not simply add up.
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
    """Total seconds of products, and of other operators (`is_product`)."""
    products_s = others_s = 0.0
    for node in nodes:
        if is_product(node.op):
            products_s += node.time_s
        else:
            others_s += node.time_s
    return products_s, others_s
