"""The cost of each operator of a traced program, and the sums over all of them."""

from __future__ import annotations

from typing import Any

import torch

from graphs.costs.models import CostModel, Measured, hardware_of
from graphs.costs.operators import Cost, OpCall
from graphs.hardware import Hardware


class NodeCosts:
    """Gives the cost of each fx node; adds up measured times and, for comparison, the roofline's.

    costs: the cost model; None: every node costs nothing.
    """

    def __init__(self, costs: CostModel | None) -> None:
        self._costs = costs
        self._measured_s = 0.0
        self._roofline_s = 0.0

    def __call__(self, node: torch.fx.Node) -> Cost:
        if self._costs is None:
            return Cost(time_s=0.0)
        call = OpCall.from_node(node)
        cost = self._costs.cost(call)
        if isinstance(self._costs, Measured):
            self._measured_s += cost.time_s
            self._roofline_s += self._costs.roofline.cost(call).time_s
        return cost

    @property
    def hardware(self) -> Hardware | None:
        """The hardware that the costs are for; None if the model does not say."""
        return hardware_of(self._costs)

    @property
    def description(self) -> dict[str, Any]:
        """The cost model's description; for measured costs, also the sums over all operators."""
        if self._costs is None:
            return {}
        described = dict(self._costs.description)
        if isinstance(self._costs, Measured):
            described |= {"measured_s": self._measured_s, "roofline_s": self._roofline_s}
        return described
