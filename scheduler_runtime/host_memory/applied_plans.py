"""The parameters and optimizer state that the applied plans keep in host memory."""

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
    """Make room in host memory for the parameters that the plans keep there (None: for none).

    cuda_graph: whether the step is to be recorded as CUDA graphs.

    Raises ValueError where the plans name different parameters, and for a recorded step.
    """
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
    """Move the optimizer's state to the host if the plans keep it there.

    parameters: those in host memory, as `hosted_parameters` returned them.
    owner: as in `keep_on_host`.

    Returns the optimizer, or None if its state stays on the device. Raises ValueError where the
    plans disagree, or no optimizer was given for a plan that keeps its state on the host.
    """
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
