"""A cost model for operators that a compiler fuses.

Matrix products, convolutions and attention remain separate kernels, with the costs of a given cost
model. All other operators are limited by the bytes that they move. Of these, elementwise operators
are fused into a neighbour's kernel, where they read and write registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphs.costs import Cost, CostModel, OpCall, bytes_moved, flops_of
from graphs.hardware import Hardware

FUSED_SHARE = 0.1
"""Cost of an elementwise operator, as a share of the time to move its bytes.

It is not 0, since recomputing a long chain of them for each reader is not free, and since of two
equal plans the one with fewer recomputed operators should win.
"""


class FusedCosts:
    """Costs of the operators of a compiled step.

    hardware: gives the memory bandwidth.
    products: the cost model of operators with FLOPs.
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
        is_elementwise = (
            torch.Tag.pointwise in getattr(call.target, "tags", ())
            or getattr(call.target, "namespace", "") == "prims"
        )
        share = FUSED_SHARE if is_elementwise else 1.0
        return Cost(time_s=share * bytes_moved(call) / self.hardware.bytes_per_s)
