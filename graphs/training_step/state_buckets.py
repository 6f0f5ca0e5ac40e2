"""Which optimizers can keep their state in host memory, and in which buckets they step then.

Only those whose step treats each parameter by itself: stepped bucket by bucket they do the same
arithmetic. What others do is not known; an optimizer that takes a norm over all parameters would
take it over a bucket.
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
"""Of each tensor of state in its bucket, as that of PyTorch's allocators on the CPU."""
N_BUCKETS = 64
LEAST_BUCKET_BYTES = 4 * 2**20
"""Of state: smaller copies take longer than the link's rate says."""

Figures = tuple[int, float]
"""Workspace in bytes, and seconds."""


def why_state_stays(optimizer: optim.Optimizer) -> str:
    """Why the state of this optimizer cannot leave the device; "": it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in BY_PARAMETER:
        return f"{name} is not one of torch's optimizers that step each parameter by itself"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} was made with differentiable=True"
    if any(hasattr(parameter, "device_mesh") for _, parameter in trained(optimizer)):
        return "its parameters are sharded"
    return ""


def trained(optimizer: optim.Optimizer) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """The parameters that it steps, in its order, each with its group."""
    return [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]


def of_buckets(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a parameter's state that leave the device, by name; scalars and sparse
    ones stay."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.layout == torch.strided:
            yield name, value


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bucket_figures(
    twin: optim.Optimizer, step: Callable[[], Figures], *, whole: Figures, state_bytes: int
) -> dict[str, Any]:
    """What `graphs.host_state` takes from an optimizer's description: `buckets` and
    `kept_state_bytes`; where the state stays, `state_stays`: why.

    twin: has stepped once. step: steps what is in its groups. whole: of all its parameters.
    state_bytes: of all its state.
    """
    pairs = trained(twin)
    sizes = [[v.nbytes for _, v in of_buckets(twin.state[p])] for _, p in pairs]
    left_bytes = [sum(map(aligned, each)) for each in sizes]
    if not any(left_bytes):
        return {"state_stays": f"{type(twin).__name__} keeps no state that can leave the device"}
    most_bytes = max(sum(left_bytes) // N_BUCKETS, LEAST_BUCKET_BYTES, *left_bytes)
    # of each parameter alone; those of one shape in one group take the same
    figures: list[Figures] = []
    known: dict[Any, Figures] = {}
    groups = twin.param_groups
    try:
        for group, parameter in pairs:
            key = id(group), parameter.shape, parameter.stride(), parameter.dtype
            if key not in known:
                twin.param_groups = [{**group, "params": [parameter]}]
                known[key] = step()
            figures.append(known[key])
    finally:
        twin.param_groups = groups
    buckets: list[list[Any]] = []
    before_bytes = 0
    for (group, _), size_bytes, (work_bytes, time_s) in zip(
        pairs, left_bytes, figures, strict=True
    ):
        if not buckets or buckets[-1][1] + size_bytes > most_bytes:
            buckets.append([0, 0, 0, 0.0])
            before_bytes = 0
        # a loop over the parameters may still hold what it took for the one before
        in_turn = max(buckets[-1][2], before_bytes + work_bytes)
        at_once = buckets[-1][2] + work_bytes
        buckets[-1][0] += 1
        buckets[-1][1] += size_bytes
        buckets[-1][2] = min(at_once if group.get("foreach") else in_turn, whole[0])
        buckets[-1][3] += time_s
        before_bytes = work_bytes
    kept_bytes = state_bytes - sum(map(sum, sizes))
    return {"buckets": buckets, "kept_state_bytes": kept_bytes}
