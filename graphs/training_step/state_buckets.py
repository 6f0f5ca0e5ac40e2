"""Which optimizers can keep their state in host memory, and the buckets in which they then step.

Only optimizers whose step treats each parameter on its own can: stepped bucket by bucket, they do
the same arithmetic. Others are refused, since their step is not known; an optimizer that takes a
norm over all parameters would take it over a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import optim

BY_PARAMETER: tuple[type[optim.Optimizer], ...] = (
    *(optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW),
    *(optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)
ALIGNMENT_BYTES = 64
"""Alignment of the state tensors in a bucket: that of PyTorch's allocators on the CPU."""
N_BUCKETS = 64
"""About how many buckets there are, unless LEAST_BUCKET_BYTES makes it fewer."""
LEAST_BUCKET_BYTES = 4 * 2**20
"""Buckets may hold at least this much state, since smaller copies are slower than the link's rate
says."""

Figures = tuple[int, float]
"""Workspace in bytes, and seconds."""


def why_state_stays(optimizer: optim.Optimizer) -> str:
    """The reason why the state of this optimizer cannot leave the device; "" if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in BY_PARAMETER:
        return f"{name} is not one of torch's optimizers that step each parameter by itself"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} was made with differentiable=True"
    if any(hasattr(parameter, "device_mesh") for _, parameter in trained_parameters(optimizer)):
        return "its parameters are sharded"
    return ""


def trained_parameters(optimizer: optim.Optimizer) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """(group, parameter) for each parameter that the optimizer trains, in its own order."""
    return [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]


def movable_state(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for the tensors of a parameter's state that leave the device; scalars and
    sparse tensors stay."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.layout == torch.strided:
            yield name, value


def aligned(size_bytes: int) -> int:
    """The size rounded up to ALIGNMENT_BYTES."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bucket_figures(
    twin: optim.Optimizer, step: Callable[[], Figures], *, whole: Figures, state_bytes: int
) -> dict[str, Any]:
    """Divide the optimizer's state into buckets, and find what the step of each takes.

    Returns `buckets` and `kept_state_bytes` for the optimizer's description, which
    `graphs.host_state` reads; or `state_stays`, the reason why the state cannot leave the device.

    twin: an optimizer on fake parameters that has stepped once.
    step: steps the parameters in the twin's groups; returns workspace bytes and seconds.
    whole: these figures for all of its parameters.
    state_bytes: bytes of all its state.
    """
    pairs = trained_parameters(twin)
    sizes = [[v.nbytes for _, v in movable_state(twin.state[p])] for _, p in pairs]
    leaving_bytes = [sum(map(aligned, each)) for each in sizes]
    if not any(leaving_bytes):
        return {"state_stays": f"{type(twin).__name__} keeps no state that can leave the device"}
    most_bytes = max(sum(leaving_bytes) // N_BUCKETS, LEAST_BUCKET_BYTES, *leaving_bytes)
    # the figures of each parameter alone; equal ones in the same group are stepped only once
    figures: list[Figures] = []
    figures_by_key: dict[Any, Figures] = {}
    groups = twin.param_groups
    try:
        for group, parameter in pairs:
            key = id(group), parameter.shape, parameter.stride(), parameter.dtype
            if key not in figures_by_key:
                twin.param_groups = [{**group, "params": [parameter]}]
                figures_by_key[key] = step()
            figures.append(figures_by_key[key])
    finally:
        twin.param_groups = groups
    buckets: list[list[Any]] = []
    previous_bytes = 0
    for (group, _), size_bytes, (work_bytes, time_s) in zip(
        pairs, leaving_bytes, figures, strict=True
    ):
        if not buckets or buckets[-1][1] + size_bytes > most_bytes:
            buckets.append([0, 0, 0, 0.0])
            previous_bytes = 0
        # foreach steps all parameters of a bucket at once; a loop may, while it steps one, still
        # hold the temporaries of the one before
        in_turn_bytes = max(buckets[-1][2], previous_bytes + work_bytes)
        at_once_bytes = buckets[-1][2] + work_bytes
        buckets[-1][0] += 1
        buckets[-1][1] += size_bytes
        buckets[-1][2] = min(at_once_bytes if group.get("foreach") else in_turn_bytes, whole[0])
        buckets[-1][3] += time_s
        previous_bytes = work_bytes
    kept_bytes = state_bytes - sum(map(sum, sizes))
    return {"buckets": buckets, "kept_state_bytes": kept_bytes}
