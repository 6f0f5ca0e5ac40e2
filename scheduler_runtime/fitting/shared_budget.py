"""The budget that all plans of a module share: that of its first plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from graphs.costs import CostModel
from graphs.model_calls import Call, device_of
from scheduler_runtime.fitting.options import Fitted, Options
from scheduler_runtime.surroundings import Buckets, budget_for, free_budget_bytes, host_for
from solver.schedule import Places, Request
from solver.solving import with_disk


class SharedBudget:
    """The budgets in `options`, converted to bytes at the first call."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._budget_bytes: int | None = None
        self._host: Places | None = None

    def request(
        self,
        part: nn.Module,
        whole: nn.Module,
        call: Call,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        buckets: Buckets | None,
        costs: CostModel,
        optimizer_state: str,
    ) -> Request:
        """The solver's request for a call.

        part: the planned module.
        whole: the module that contains it, or itself.
        optimizer_state: where the state may be, as in `Request`.
        """
        options = self._options
        budget: int | float | str = options.budget
        if self._budget_bytes is not None:
            budget = self._budget_bytes
        elif budget == "auto":
            bucket_bytes = 0 if buckets is None else buckets.separate_bytes
            budget = free_budget_bytes(
                whole, call, optimizers, device_of(part), bucket_bytes=bucket_bytes
            )
        self._budget_bytes, reserve_bytes = budget_for(part, budget, options.reserve)
        if options.host_budget is not None and self._host is None:
            host = host_for(part, options.host_budget, options.host_link, costs)
            self._host = with_disk(host, options.disk_budget, options.disk_rate)
        return Request(
            budget_bytes=self._budget_bytes,
            reserve_bytes=reserve_bytes,
            method=options.method,
            time_limit_s=options.time_limit_s,
            seed=options.seed,
            rewrites=options.rewrites,
            places=self._host,
            optimizer_state=optimizer_state,
        )


def where_state_may_be(options: Options, plans: Sequence[Fitted]) -> str:
    """Where the optimizer's state may be in the next plan, as in `Request`.

    Once an earlier plan has moved it to the host, it stays there. With "auto", it does not move if
    earlier plans copy to the host, since these may fill it."""
    if any(each.solution.graph.host_state_bytes for each in plans):
        return "host"
    requested = options.optimizer_state
    may_fill_host = any(
        each.solution.simulation is not None and each.solution.simulation.host_peak_bytes
        for each in plans
    )
    return "device" if requested == "auto" and may_fill_host else requested
