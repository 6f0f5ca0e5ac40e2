"""Reads from the model and its optimizer what DeepSpeed's engine holds for a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphs import hardware
from graphs.costs import CostModel
from graphs.training_step import GivenOptimizer, optimizer_costs, read_optimizer
from graphs.zero import Zero, ZeroError, sharded_figures, zero_figures


def engine_figures(
    zero: Zero,
    optimizer: GivenOptimizer | None,
    model: nn.Module,
    *,
    device: torch.device,
    costs: CostModel,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of the engine and of its optimizer step, as `zero_figures` returns them.

    Raises ZeroError if the engine would not run this model with this optimizer as planned.
    """
    if optimizer is None:
        raise ZeroError("the engine has the optimizer's state: give optimizer=")
    torch_optimizer = read_optimizer(optimizer, model)
    groups = [
        [p for p in group["params"] if p.requires_grad] for group in torch_optimizer.param_groups
    ]
    optimized = {id(p) for group in groups for p in group}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in optimized:
            raise ZeroError(
                f"{name} is trained, but not by the optimizer: give it to the optimizer, or "
                "requires_grad_(False)"
            )
    dtypes = {str(p.dtype).removeprefix("torch.") for group in groups for p in group}
    if not all(groups) or len(dtypes) != 1:
        raise ZeroError(
            f"the optimizer trains parameters in {', '.join(sorted(dtypes)) or 'no dtype'}, in "
            f"{len(groups)} groups; ZeRO needs one dtype for all of them, and at least one trained "
            "parameter in each group"
        )
    zero.check_dtype(*dtypes)
    sizes = [[p.numel() for p in group] for group in groups]
    is_sharded = zero.stage == 3
    parts = [sum(map(zero.shard, group)) if is_sharded else zero.part(group) for group in sizes]
    figures = optimizer_costs(torch_optimizer, model, device=device, costs=costs, parts=parts)
    engine_options: dict[str, Any] = {
        "element_bytes": groups[0][0].element_size(),
        "on_cpu": device.type == "cpu" and not hardware.is_cuda(costs.description),
    }
    if not is_sharded:
        return zero_figures(zero, sizes, figures, **engine_options)
    module_sizes = (sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    frozen_parameters = (p for p in model.parameters() if id(p) not in optimized)
    frozen = [(p.numel(), p.element_size()) for p in frozen_parameters]
    return sharded_figures(
        zero, sizes, figures, frozen=frozen, fetched=max(module_sizes), **engine_options
    )
