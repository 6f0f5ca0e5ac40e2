"""What of the plans that are applied lies in host memory: the optimizer's state and parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from scheduler_runtime.host_memory.optimizer_state import keep_on_host
from scheduler_runtime.host_memory.parameters import HostParameters
from scheduler_runtime.planned import Plan


def hosted_parameters(
    model: nn.Module, plans: Sequence[Plan], *, cuda_graph: bool
) -> HostParameters | None:
    """The parameters that the plans have in host memory; None: none."""
    of_plans = {tuple(plan.host_parameters) for plan in plans}
    if of_plans == {()}:
        return None
    if cuda_graph:
        raise ValueError(
            "a recorded step (cuda_graph=True) has its parameters at fixed addresses, and the plan "
            'has some in host memory; plan with parameters="device"'
        )
    if len(of_plans) > 1:
        raise ValueError(
            "the plans have different parameters in host memory; solve them all with "
            'parameters="host", or all with "device"'
        )
    (names,) = of_plans
    return HostParameters(model, names)


def hosted_optimizer(
    plans: Sequence[Plan],
    optimizer: torch.optim.Optimizer | None,
    parameters: HostParameters | None,
    *,
    owner: object,
) -> torch.optim.Optimizer | None:
    """The optimizer after its state has moved to the host; None where it stays on the device."""
    buckets = {plan.state_buckets for plan in plans}
    if len(buckets) > 1:
        raise ValueError(
            "the plans are for different steps: some have the optimizer's state on the host, or in "
            'other parts; solve them all with optimizer_state="host", or all with "device"'
        )
    (of_all,) = buckets
    if not of_all:
        return None
    if optimizer is None:
        raise ValueError(
            "the plan has the optimizer's state on the host: give the optimizer that trains the "
            "model, apply(model, plan, optimizer=optimizer), or solve with "
            'optimizer_state="device"'
        )
    keep_on_host(optimizer, of_all, parameters=parameters, owner=owner)
    return optimizer
