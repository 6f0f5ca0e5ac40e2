"""The cost of an optimizer: its state, and the memory and time of its step.

A twin of the optimizer (same class, same options) steps twice on fake parameters, and its
allocations are tracked storage by storage. This covers every optimizer whose step does not depend
on tensor values, without a table. The user's optimizer is not touched: none of its hooks run, no
scheduler sees the step, and its parameters and state are unchanged.

On CUDA the default is the foreach implementation, which for AdamW allocates about one more copy of
the parameters. On the CPU it is a loop over the parameters, which allocates a few tensors as large
as the largest parameter.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from graphs import hardware
from graphs.capture import failures_not_logged
from graphs.costs import Cost, CostModel, OpCall, Tracker
from graphs.fsdp import shard_rows
from graphs.graph import warn
from graphs.model_calls import TraceError, local_part, storage_key, strided_like
from graphs.training_step.given_optimizer import GivenOptimizer, read_optimizer
from graphs.training_step.state_buckets import (
    Figures,
    bucket_figures,
    trained_parameters,
    why_state_stays,
)

_HOOKED = ("step", "state_dict", "load_state_dict")
_HOOKS = [f"_optimizer_{method}_{when}_hooks" for method in _HOOKED for when in ("pre", "post")]
_NOT_COPIED = ("state", "param_groups", "step", *_HOOKS)
"""Attributes that are not copied to the twin; "step" is a scheduler's wrapper, bound to the user's
optimizer."""

_VALUES_READ = {True: 1e6, False: 10**6}
"""The value that a step reads from a fake tensor (its step count): for floating-point tensors, and
for others. It is large, as in most of training: RAdam allocates more from its sixth step on, ASGD
from the step after `t0`, which by default is the millionth."""


def optimizer_costs(
    optimizer: GivenOptimizer,
    model: nn.Module,
    *,
    device: torch.device,
    costs: CostModel,
    n_ranks: int = 1,
    parts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Step a twin of the optimizer on fake parameters and gradients.

    Returns what `with_optimizer` takes and schedule files store:

    name: of the optimizer's class.
    state_bytes: resident from the first step on.
    workspace_bytes: the peak that a later step allocates besides.
    time_s: seconds of a step.
    state_stays: why the state cannot be in host memory. If it can, there are instead what
        `bucket_figures` returns, and `trains`: the names of the trained parameters in the
        optimizer's order ("" for a parameter of another model).

    The parameters of this function:

    optimizer: an optimizer of the model's parameters (real or on the meta device). Parameters that
        require no gradient have no state.
    device: of the fake tensors. On a CUDA device, and if `costs` are those of one, the foreach
        implementation is used unless the optimizer itself chooses.
    n_ranks: number of devices, each of which steps its shard of the rows of each parameter.
    parts: for each group, the number of elements of the single flat float32 parameter that takes
        the place of the group's parameters; None: the groups keep their parameters.

    Raises TraceError for an optimizer that cannot step on fake tensors, for instance because it
    reads values, and for one that has none of the model's parameters. Warns if it has parameters of
    another model, too.
    """
    optimizer = read_optimizer(optimizer, model)
    name = type(optimizer).__name__
    check_parameters(optimizer, model)
    foreach = device.type == "cuda" or hardware.is_cuda(costs.description)
    try:
        with (
            failures_not_logged(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            torch.no_grad(),
        ):
            twin = _twin(optimizer, mode, device, foreach=foreach, n_ranks=n_ranks)
            if parts is not None:  # each group gets a single flat parameter, without state
                twin.state.clear()
                for group, n_elements in zip(twin.param_groups, parts, strict=True):
                    flat = torch.empty(n_elements, dtype=torch.float32, device="meta")
                    group["params"] = [_fake_like(flat, device, is_trained=True)]
            numbers = WeakIdKeyDictionary()
            with _StepTracker(lambda _call: Cost(0.0), numbers):  # the first step creates the
                _step(twin)  # state; it is not measured

            def step() -> Figures:
                with _StepTracker(costs.cost, numbers) as tracker:
                    _step(twin)
                return tracker.peak_bytes, tracker.time_s

            all_figures = step()
            trained = [p for group in twin.param_groups for p in group["params"]]
            counted = {storage_key(t) for p in trained for t in (p, p.grad) if t is not None}
            storages = {
                storage_key(item): item.untyped_storage().nbytes()
                for item in state_tensors(twin)
                # an object in the state may refer to its parameter
                if item.device.type == device.type and storage_key(item) not in counted
            }
            state_bytes = sum(storages.values())
            figures_of_all = {
                "name": name,
                "state_bytes": state_bytes,
                "workspace_bytes": all_figures[0],
                "time_s": all_figures[1],
            }
            reason = (
                "it is sharded" if n_ranks > 1 or parts is not None else why_state_stays(optimizer)
            )
            if reason:
                return {**figures_of_all, "state_stays": reason}
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            trains = [
                names.get(id(parameter), "") for _, parameter in trained_parameters(optimizer)
            ]
            figures = bucket_figures(twin, step, whole=all_figures, state_bytes=state_bytes)
            return figures_of_all | figures | {"trains": trains}
    except Exception as error:
        if words := _changed_dtype_message(optimizer):
            raise TraceError(words) from error
        raise TraceError(
            f"the optimizer {name} cannot step on fake tensors "
            f"({type(error).__name__}: {error}); plan without an optimizer and leave room for its "
            "state in the reserve"
        ) from error


def _changed_dtype_message(optimizer: torch.optim.Optimizer) -> str:
    """The error message for parameters that have changed their dtype since the optimizer created
    their state; "" if none has.

    Called only if the optimizer cannot step, since some optimizers keep state in 32 bits for
    parameters in 16.
    """
    for parameter, state in optimizer.state.items():
        for item in state.values() if isinstance(parameter, torch.Tensor) else ():
            is_like = isinstance(item, torch.Tensor) and item.shape == parameter.shape
            if is_like and item.is_floating_point() and item.dtype != parameter.dtype:
                name, of_state, here = (
                    str(each).removeprefix("torch.")
                    for each in (type(optimizer).__name__, item.dtype, parameter.dtype)
                )
                return (
                    f"the optimizer {name} has a state in {of_state} for parameters in {here}, and "
                    "cannot step: has the model been cast since? Continue training with a new "
                    "optimizer; for a plan of fit, remove(model) first and fit(model, "
                    "optimizer=...) again"
                )
    return ""


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise TraceError if the optimizer has only parameters of another model or of a copy; warn if
    it has some of this model and some others."""
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    model_ids = {id(p) for p in model.parameters()}
    n_own = sum(id(p) in model_ids for p in optimized)
    if not optimized or not model_ids or n_own == len(optimized):
        return
    name, title = type(optimizer).__name__, type(model).__name__
    if n_own == 0:
        raise TraceError(
            f"the optimizer {name} has none of this {title}'s parameters; its {len(optimized)} are "
            f"those of another model or of a copy. Create it for the model that is planned: "
            f"{name}(model.parameters())"
        )
    warn(
        f"the optimizer {name} has {n_own} parameters of this {title} and {len(optimized) - n_own} "
        "others; the state of the others is counted, but not their bytes and gradients"
    )


def without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A new optimizer of the same class, parameters and options, as before its first step."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    memo: dict[int, Any] = {id(parameter): parameter for parameter in parameters}
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = other
    attributes = copy.deepcopy(_without(optimizer.__dict__, *_NOT_COPIED), memo)
    groups = copy.deepcopy(optimizer.param_groups, memo)
    other.__setstate__({**attributes, "state": defaultdict(dict), "param_groups": groups})
    return other


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state, also those in attributes of objects in it (the
    preconditioners of Shampoo). Some may share storage."""
    waiting: list[Any] = list(optimizer.state.values())
    seen: set[int] = set()
    while waiting:
        for item in pytree.tree_leaves(waiting.pop()):
            if isinstance(item, torch.Tensor):
                yield item
            elif id(item) not in seen and not isinstance(item, type | nn.Module):
                seen.add(id(item))
                waiting.append(list(getattr(item, "__dict__", {}).values()))


def combined_figures(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The figures of several optimizers that step one after the other, as one; None if there are
    none.

    Only a single optimizer can have its state on the host, so other figures are left out.
    """
    if len(figures) < 2:
        return dict(figures[0]) if figures else None
    return {
        "name": " + ".join(str(each["name"]) for each in figures),
        "state_bytes": sum(int(each["state_bytes"]) for each in figures),
        "workspace_bytes": max(int(each["workspace_bytes"]) for each in figures),
        "time_s": sum(float(each["time_s"]) for each in figures),
    }


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Call the class's step, without the hooks that are registered for all optimizers."""
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
    """An optimizer of the same class and options on fake parameters with gradients."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    fakes = {
        id(p): _fake_like(_shard(local_part(p), n_ranks), device, is_trained=p.requires_grad)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    memo: dict[int, Any] = {id(optimizer): twin, **fakes}
    with FakeCopyMode(mode):
        groups = [
            {
                **_with_foreach(copy.deepcopy(_without(group, "params"), memo), foreach=foreach),
                "params": [fakes[id(p)] for p in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        attributes = copy.deepcopy(_without(optimizer.__dict__, *_NOT_COPIED), memo)
    state: dict[Any, Any] = defaultdict(dict)
    for parameter, kept in optimizer.state.items():  # some create their state when constructed
        shape = getattr(parameter, "shape", None)

        def fake_state(item: Any, shape: Any = shape) -> Any:
            if not isinstance(item, torch.Tensor):  # an object may hold tensors, and be changed
                with FakeCopyMode(mode):
                    return copy.deepcopy(item, memo)
            part = local_part(_shard(item, n_ranks) if item.shape == shape else item)
            # step counts on the host stay there
            stays_on_host = item.dim() == 0 and item.device.type == "cpu"
            return strided_like(part, item.device if stays_on_host else device)

        key = fakes.get(id(parameter), parameter)
        # What cannot be copied (a lock, a generator) is created by the first step, as in a new one.
        # A user's object may raise anything.
        with contextlib.suppress(Exception):
            state[key] = pytree.tree_map(fake_state, kept)
    twin.__setstate__({**attributes, "state": state, "param_groups": groups})
    return twin


def _without(items: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in items.items() if key not in keys}


def _with_foreach(options: dict[str, Any], *, foreach: bool) -> dict[str, Any]:
    """The options of a group, with foreach set if CUDA would choose it and they leave it open.

    On CUDA, torch chooses foreach unless the step is differentiable, or the learning rate is a
    tensor without `capturable`.
    """
    leaves_foreach_open = options.get("foreach", False) is None and not options.get("fused")
    needs_loop = options.get("differentiable") or (
        isinstance(options.get("lr"), torch.Tensor) and not options.get("capturable")
    )
    if foreach and leaves_foreach_open and not needs_loop:
        options["foreach"] = True
    return options


def _shard(tensor: torch.Tensor, n_ranks: int) -> torch.Tensor:
    """A meta tensor with the rows of the first of `n_ranks` devices, which has the most rows."""
    if n_ranks == 1 or tensor.dim() == 0:
        return tensor
    shape = (shard_rows(tensor.shape[0], n_ranks), *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _fake_like(parameter: torch.Tensor, device: torch.device, *, is_trained: bool) -> nn.Parameter:
    """A fake parameter like the given one.

    is_trained: whether it requires a gradient, and has one.
    """
    fake = nn.Parameter(strided_like(parameter, device), requires_grad=is_trained)
    if is_trained:
        fake.grad = strided_like(parameter, device)
    return fake


class _StepTracker(Tracker):
    """A Tracker that supplies values where the optimizer's step reads them from fake tensors.

    numbers: scalar of the state -> the number that a step has copied into it and a later one reads
        (ASGD's `mu`, which is 1 until averaging begins).
    """

    def __init__(self, cost: Callable[[OpCall], Cost], numbers: WeakIdKeyDictionary) -> None:
        super().__init__(cost)
        self._numbers = numbers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            unknown = dtype != torch.bool and _VALUES_READ[dtype.is_floating_point]
            return self._numbers.get(args[0], unknown)
        value = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable:
            for tensor in pytree.tree_leaves(args):
                if isinstance(tensor, torch.Tensor):
                    self._numbers.pop(tensor, None)
            source = getattr(args[1], "constant", None) if len(args) > 1 else None
            if func is torch.ops.aten.copy_.default and args[0].dim() == 0 and source is not None:
                self._numbers[args[0]] = source.item()
        return value
