"""What an optimizer takes: its state, and the memory of its step.

A twin of the optimizer (same class, same options) steps twice on fake parameters, and what it
allocates is followed storage by storage. So every torch optimizer is known without a table, and
the user's own is never touched. On CUDA the foreach implementation is the default, which allocates
about one more copy of the parameters for AdamW; on the CPU a loop over parameters is.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.costs import CostModel, OpCall


@dataclass(frozen=True)
class OptimizerCost:
    """name: the class. state_bytes: resident from the first step on. workspace_bytes: the most that
    a step allocates beside it. time_s: of a step."""

    name: str
    state_bytes: int
    workspace_bytes: int
    time_s: float


def optimizer_costs(
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    model: nn.Module,
    *,
    device: torch.device,
    costs: CostModel,
    foreach: bool = False,
) -> OptimizerCost:
    """Step a twin of the optimizer on fake parameters.

    optimizer: an optimizer of the model's parameters, or a function from parameters to one.
    device: where the fake tensors stand. foreach: use the implementation that CUDA chooses, where
    the optimizer leaves the choice open.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    with FakeTensorMode():
        twin = _twin(optimizer, device, foreach=foreach or device.type == "cuda")
        with _Follower(costs):
            twin.step()  # makes the state
        with _Follower(costs) as follower:
            twin.step()
        return OptimizerCost(
            name=type(optimizer).__name__,
            state_bytes=_state_bytes(twin, device),
            workspace_bytes=follower.peak_bytes,
            time_s=follower.time_s,
        )


def _twin(
    optimizer: torch.optim.Optimizer, device: torch.device, *, foreach: bool
) -> torch.optim.Optimizer:
    """The same class with the same options for fake parameters that have gradients."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        if foreach and options.get("foreach", False) is None and not options.get("fused"):
            options["foreach"] = True
        groups.append({**options, "params": [_fake(p, device) for p in group["params"]]})
    twin = object.__new__(type(optimizer))
    plain = {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups")}
    twin.__setstate__({**plain, "state": defaultdict(dict), "param_groups": groups})
    return twin


def _fake(parameter: torch.Tensor, device: torch.device) -> nn.Parameter:
    def new() -> torch.Tensor:
        return torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device
        )

    fake = nn.Parameter(new(), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        fake.grad = new()
    return fake


def _state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    storages = {
        item.untyped_storage()._cdata: item.untyped_storage().nbytes()
        for item in pytree.tree_leaves(list(optimizer.state.values()))
        if isinstance(item, torch.Tensor) and item.device.type == device.type
    }
    return sum(storages.values())


class _Follower(TorchDispatchMode):
    """Adds up what is allocated and not yet dropped, and the time of each operator."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.time_s = 0.0
        self._taken = 0
        self._costs = costs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # the step count: how much is allocated does not depend on it
        value = func(*args, **(kwargs or {}))
        call = OpCall(target=func, args=args, kwargs=kwargs or {}, value=value)
        known = {item.untyped_storage()._cdata for item in call.inputs()}
        for item in call.outputs():
            storage = item.untyped_storage()
            if storage._cdata not in known:
                self._take(storage)
        self.time_s += self._costs.cost(call).time_s
        return value

    def _take(self, storage: Any) -> None:
        n_bytes = storage.nbytes()
        self._taken += n_bytes
        self.peak_bytes = max(self.peak_bytes, self._taken)
        weakref.finalize(storage, self._drop, n_bytes)

    def _drop(self, n_bytes: int) -> None:
        self._taken -= n_bytes
