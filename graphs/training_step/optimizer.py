"""What an optimizer takes: its state, and the memory and time of its step.

A twin of the optimizer (same class, same options) steps twice on fake parameters, and what it
allocates is followed storage by storage. So every optimizer whose step does not depend on the
numbers in its tensors is known without a table, and the user's own is never touched: none of its
hooks run, no scheduler hears of the step, and its parameters and state stay as they are.

On CUDA the foreach implementation is the default, which allocates about one more copy of the
parameters for AdamW; on the CPU a loop over parameters is, which allocates a few tensors as large
as the largest parameter.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphs import hardware
from graphs.calls import TraceError
from graphs.costs import CostModel, OpCall
from graphs.fsdp import shard_rows

_NOT_COPIED = (
    "state",
    "param_groups",
    "step",  # a scheduler's wrapper, which is bound to the user's optimizer
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Attributes of an optimizer that its twin has its own of."""

_READ_FROM_TENSORS = {True: 1000.0, False: 1000}
"""What a step reads out of a fake tensor, by whether it is a floating-point one: its step count.
Large, as in most of a training: RAdam and ASGD allocate more after their first few steps."""


@dataclass(frozen=True)
class OptimizerCost:
    """name: the class. state_bytes: resident on the device from the first step on.
    workspace_bytes: the most that a later step allocates beside it. time_s: seconds of a step."""

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
    n_ranks: int = 1,
) -> OptimizerCost:
    """Step a twin of the optimizer on fake parameters and gradients.

    optimizer: an optimizer of the model's parameters (real or on the meta device), or a function
        from the parameters that are trained to one. Parameters that take no gradient have no state.
    device: where the fake tensors stand. foreach: use the implementation that CUDA chooses, where
        the optimizer leaves the choice open (always on a CUDA device). n_ranks: each of so many
        devices steps its shard of the rows of each parameter.

    Raises TraceError for an optimizer that cannot step on fake tensors: one that takes a closure,
    or that looks at the numbers; and for one that has none of the model's parameters. One that has
    others beside them is warned of.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = _made(optimizer, [p for p in model.parameters() if p.requires_grad])
    name = type(optimizer).__name__
    _check_parameters(optimizer, model)
    foreach = foreach or device.type == "cuda"
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            twin = _twin(optimizer, mode, device, foreach=foreach, n_ranks=n_ranks)
            with _Follower(costs):
                _step(twin)  # makes the state
            with _Follower(costs) as follower:
                _step(twin)
            return OptimizerCost(
                name=name,
                state_bytes=_state_bytes(twin, device),
                workspace_bytes=follower.peak_bytes,
                time_s=follower.time_s,
            )
    except Exception as error:
        raise TraceError(
            f"the step of the optimizer {name} cannot be followed on fake tensors "
            f"({type(error).__name__}: {error}); plan without an optimizer and leave room for its "
            "state in the reserve"
        ) from error


def _made(make: Any, trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Raises TypeError for what is neither an optimizer nor a function that makes one."""
    made = make(trained) if callable(make) else make
    if isinstance(made, torch.optim.Optimizer):
        return made
    given = f"what optimizer(parameters) returned is a {type(made).__name__}"
    if made is make:
        given = f"optimizer is a {type(made).__name__}"
    raise TypeError(
        f"{given}; give the torch.optim.Optimizer that trains the model, or a function from its "
        "parameters to one (torch.optim.AdamW)"
    )


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """An optimizer made over another model, or over an earlier copy, would count other bytes."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    own = {id(p) for p in model.parameters()}
    n_own = sum(id(p) in own for p in held)
    if not held or not own or n_own == len(held):
        return
    name, title = type(optimizer).__name__, type(model).__name__
    if n_own == 0:
        raise TraceError(
            f"the optimizer {name} trains none of this {title}'s parameters: the "
            f"{len(held)} that it has are another model's, or a copy's. Make it from the "
            f"parameters of the model that is planned: {name}(model.parameters())"
        )
    warnings.warn(
        f"the optimizer {name} trains {n_own} parameters of this {title} and {len(held) - n_own} "
        "that are not its own; the state of these is counted in the step as well, and their bytes "
        "and gradients are not",
        stacklevel=3,
    )


def optimizer_figures(
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    model: nn.Module,
    *,
    device: torch.device,
    costs: CostModel,
    n_ranks: int = 1,
) -> dict[str, Any]:
    """`optimizer_costs` as plain figures, which travel with the schedule file.

    name, state_bytes, workspace_bytes, time_s: what `graphs.training_step.around.with_optimizer`
    takes. The implementation is that of the device whose costs are asked for. Raises TraceError.
    """
    cost = optimizer_costs(
        optimizer,
        model,
        device=device,
        costs=costs,
        foreach=hardware.is_cuda(costs.description),
        n_ranks=n_ranks,
    )
    return dataclasses.asdict(cost)


def together(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Several optimizers that step one after the other, as one (none: None)."""
    if not figures:
        return None
    return {
        "name": " + ".join(str(each["name"]) for each in figures),
        "state_bytes": sum(int(each["state_bytes"]) for each in figures),
        "workspace_bytes": max(int(each["workspace_bytes"]) for each in figures),
        "time_s": sum(float(each["time_s"]) for each in figures),
    }


def _step(optimizer: torch.optim.Optimizer) -> None:
    """The step of the class, past the hooks that every optimizer of the process may have."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's own wrapper, which calls the hooks
        step = step.__wrapped__
    step(optimizer)


def _twin(
    optimizer: torch.optim.Optimizer,
    mode: FakeTensorMode,
    device: torch.device,
    *,
    foreach: bool,
    n_ranks: int,
) -> torch.optim.Optimizer:
    """The same class with the same options for fake parameters that have gradients."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    fakes = {
        id(p): _fake(_shard(p, n_ranks), device)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    memo: dict[int, Any] = {id(optimizer): twin, **fakes}
    with FakeCopyMode(mode):
        groups = [
            {
                **_options(copy.deepcopy(_without(group, "params"), memo), foreach=foreach),
                "params": [fakes[id(p)] for p in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        own = copy.deepcopy(_without(optimizer.__dict__, *_NOT_COPIED), memo)
    state: dict[Any, Any] = defaultdict(dict)
    for parameter, kept in optimizer.state.items():  # some make their state when constructed
        key = fakes.get(id(parameter), parameter)
        n_parts = n_ranks if isinstance(parameter, torch.Tensor) else 1

        def of_shard(
            tensor: torch.Tensor, whole: Any = parameter, n_parts: int = n_parts
        ) -> torch.Tensor:
            like_parameter = n_parts > 1 and tensor.shape == whole.shape
            return _fake_state(_shard(tensor, n_parts) if like_parameter else tensor, device)

        state[key] = pytree.tree_map_only(torch.Tensor, of_shard, kept)
    twin.__setstate__({**own, "state": state, "param_groups": groups})
    return twin


def _without(items: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in items.items() if key not in keys}


def _options(options: dict[str, Any], *, foreach: bool) -> dict[str, Any]:
    """The options of a group; where they leave the implementation open, the one of the device.

    torch chooses foreach on CUDA unless the step is differentiable or the learning rate is a tensor
    without `capturable`.
    """
    is_open = options.get("foreach", False) is None and not options.get("fused")
    needs_loop = options.get("differentiable") or (
        isinstance(options.get("lr"), torch.Tensor) and not options.get("capturable")
    )
    if foreach and is_open and not needs_loop:
        options["foreach"] = True
    return options


def _shard(tensor: torch.Tensor, n_ranks: int) -> torch.Tensor:
    """On paper, what the first of so many devices has of the tensor's rows: none has more."""
    if n_ranks == 1 or tensor.dim() == 0:
        return tensor
    rows = shard_rows(tensor.shape[0], n_ranks)
    return torch.empty(
        (rows, *tensor.shape[1:]),
        dtype=tensor.dtype,
        device="meta",
        requires_grad=tensor.requires_grad,
    )


def _fake(parameter: torch.Tensor, device: torch.device) -> nn.Parameter:
    """A fake parameter like the given one, with a gradient if it takes one."""
    fake = nn.Parameter(_empty_like(parameter, device), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        fake.grad = _empty_like(parameter, device)
    return fake


def _fake_state(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Step counts stay on the host where they are there; the rest is where the parameters are."""
    stays = tensor.dim() == 0 and tensor.device.type == "cpu"
    return _empty_like(tensor, tensor.device if stays else device)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    storages = {
        item.untyped_storage()._cdata: item.untyped_storage().nbytes()
        for item in pytree.tree_leaves(list(optimizer.state.values()))
        if isinstance(item, torch.Tensor) and item.device.type == device.type
    }
    return sum(storages.values())


class _Follower(TorchDispatchMode):
    """Adds up what is allocated and not yet dropped, in bytes, and the seconds of each operator."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.time_s = 0.0
        self._taken_bytes = 0
        self._costs = costs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return dtype != torch.bool and _READ_FROM_TENSORS[dtype.is_floating_point]
        value = func(*args, **(kwargs or {}))
        call = OpCall(target=func, args=args, kwargs=kwargs or {}, value=value)
        known = {item.untyped_storage()._cdata for item in call.inputs()}
        for item in call.outputs():
            storage = item.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._take(storage)
        cost = self._costs.cost(call)
        self.time_s += cost.time_s
        self.peak_bytes = max(self.peak_bytes, self._taken_bytes + cost.workspace_bytes)
        return value

    def _take(self, storage: torch.UntypedStorage) -> None:
        n_bytes = storage.nbytes()
        self._taken_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self._taken_bytes)
        weakref.finalize(storage, self._drop, n_bytes).atexit = False

    def _drop(self, n_bytes: int) -> None:
        self._taken_bytes -= n_bytes
