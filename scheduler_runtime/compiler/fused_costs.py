"""What operators cost once a compiler has fused them.

Products, convolutions and attention stay kernels of their own and cost what the model for plain
operators says. The others are limited by the bytes that they move; an elementwise one is computed
within a neighbour's kernel, where it reads and writes registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphs.costs import Cost, CostModel, OpCall, bytes_moved, flops_of
from graphs.hardware import Hardware

FUSED_SHARE = 0.1
"""Of the time that its bytes would take to move, what an elementwise operator costs.

Not 0: a long chain of them, made again for each reader, is not free; and between plans that are
otherwise equal the one that runs fewer again is better.
"""


class FusedCosts:
    """Costs of the operators of a compiled step.

    hardware: whose bandwidth counts. products: seconds and workspace of what has FLOPs.
    """

    def __init__(self, hardware: Hardware, *, products: CostModel) -> None:
        self.hardware = hardware
        self.products = products

    @property
    def description(self) -> Mapping[str, Any]:
        return {**self.products.description, "fused": True}

    def cost(self, call: OpCall) -> Cost:
        if call.is_view():
            return Cost(time_s=0.0)
        if flops_of(call):
            return self.products.cost(call)
        share = FUSED_SHARE if _is_elementwise(call) else 1.0
        return Cost(time_s=share * bytes_moved(call) / self.hardware.bytes_per_s)


def _is_elementwise(call: OpCall) -> bool:
    tags = getattr(call.target, "tags", ())
    return torch.Tag.pointwise in tags or getattr(call.target, "namespace", "") == "prims"
