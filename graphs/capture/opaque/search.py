"""Which parts of a model cannot be traced, found by tracing.

A trace that fails names the module call in which it failed. That module becomes one piece, with
those of its class that are expected to fail as well (`graphs.capture.opaque.alike`), and the model
is traced again. A module that cannot be one piece (`NotOpaqueError` says why) leaves that to the
module that contains it; in the end the trace fails as it did at first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx, nn

from graphs.capture.opaque.alike import alike
from graphs.capture.opaque.forms import OpaqueCall, RandomSources
from graphs.capture.opaque.functions import is_function, outermost_function
from graphs.capture.opaque.methods import method_on_the_way, method_that_draws, paths_of
from graphs.capture.opaque.nodes import StandIn, saved_bytes, stand_ins
from graphs.capture.opaque.observe import AskedOf, NotOpaqueError, all_put_back, observe, run
from graphs.capture.own_failure import (
    frames_of,
    refuse_failure_on_values,
    refuse_own_failure,
    refuse_same_failure,
)
from graphs.capture.refuse import DrawError, HookError, has_refused_hook
from graphs.model_calls import Call, TraceError, device_of

MOST_TRACES = 12
"""Of one model; each adds a module, or replaces one by the module that contains it."""

MOST_RUNS = 4
"""Of an attempt: the layout of one part's gradients may change that of the next."""

MOST = 0.75
"""Of the bytes that a step keeps for backward."""

_R = TypeVar("_R")

Planned = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class OpaquePart:
    """A module that is planned as one piece.

    path: of the module.
    why: it cannot be traced.
    calls: those of one forward pass.
    """

    path: str
    why: str
    calls: tuple[OpaqueCall, ...]

    def described(self) -> dict[str, Any]:
        """As JSON: what another trace of the step needs to find the same graph."""
        return {
            "module": self.path,
            "why": self.why,
            "recomputable": all(call.recomputable for call in self.calls),
            "calls": [call.described() for call in self.calls],
        }


def with_opaque_parts(
    model: nn.Module,
    call: Call,
    device: torch.device | None,
    trace: Callable[[Sequence[StandIn]], _R],
    *,
    planned: Planned = (),
) -> tuple[_R, tuple[OpaquePart, ...]]:
    """What `trace` returns, given stand-ins for the modules that cannot be traced; and these.

    planned: `OpaquePart.described` of those of a plan, which are tried first.

    Raises FailsOnBatchError where the model itself fails; else the TraceError of the model as it is
    where no such modules are found, or where model and batch have no values on the device that is
    planned for.
    """
    if planned and _is_here(model, call, device):
        where = _devices(model, call).pop()
        with contextlib.suppress(Exception):  # of another model, say: then as without a plan
            whys = {each["module"]: each["why"] for each in planned}
            return _attempt(model, call, where, whys, trace, planned)
    try:
        return trace(()), ()
    except TraceError as error:
        card = device_of(model) if torch.cuda.is_available() else torch.device("cpu")
        with RandomSources.of(model, card).as_before():  # a forward pass may draw, or seed
            refuse_own_failure(model, call, error)
        if not _is_here(model, call, device):
            raise
        first = error
    where = _devices(model, call).pop()
    with all_put_back(model, where):
        refuse_failure_on_values(model, first, lambda: run(model, call))
    whys = _failing(model, call, where, first, {})
    if whys and where.type == "cpu" and torch._C._autograd._profiler_enabled():
        path, why = next(iter(whys.items()))
        raise TraceError(
            f"{path!r} cannot be traced ({why}) and would be planned as one piece, which is "
            "measured with PyTorch's profiler, and one is active already: plan before it starts "
            "(with one step, or plan_ahead)"
        ) from first
    for _ in range(MOST_TRACES):
        if not whys:
            raise first
        try:
            return _attempt(model, call, where, whys, trace)
        except NotOpaqueError as refused:
            _note(first, str(refused))
            whys = _enclosing(model, refused.path, whys)
        except TraceError as error:
            _note(first, error.why)
            whys = _failing(model, call, where, error, whys)
        except Exception as error:  # the model's code may raise anything
            refuse_same_failure(model, first, error)
            first.add_note(f"{type(error).__name__} when it was run: {error}")
            raise first from error
    _note(first, f"given up after {MOST_TRACES} more traces, each of which failed elsewhere")
    raise first


def _note(error: TraceError, text: str) -> None:
    """Add it once; of many modules that fail alike, all say the same."""
    if text not in (error.why, *getattr(error, "__notes__", ())):
        error.add_note(text)


def _attempt(
    model: nn.Module,
    call: Call,
    device: torch.device,
    whys: Mapping[str, str],
    trace: Callable[[Sequence[StandIn]], _R],
    planned: Planned = (),
) -> tuple[_R, tuple[OpaquePart, ...]]:
    asked: AskedOf = {}
    for n_runs in range(1, MOST_RUNS + 1):
        observed = observe(model, call, tuple(whys), device=device, asked=asked)
        for each in planned:
            pairs = zip(observed[each["module"]], each["calls"], strict=True)
            observed[each["module"]] = [one.as_planned(other) for one, other in pairs]
        with stand_ins(model, observed) as standing:
            result = trace(standing)
            found = {each.path: each.found() for each in standing}
        given = {path: tuple(c.island.asked for c in calls) for path, calls in observed.items()}
        if found == given or (n_runs == MOST_RUNS and _needs(found) == _needs(given)):
            return result, tuple(
                OpaquePart(path, whys[path], tuple(calls)) for path, calls in observed.items()
            )
        if asked and _needs(found) != _needs(given):
            break
        asked = found
    raise TraceError("what needs a gradient differs from trace to trace")


def _needs(asked: AskedOf) -> dict[str, list[tuple[bool, ...]]]:
    return {path: [(each.grad_enabled, *each.needs) for each in asked[path]] for path in asked}


def refuse_most(graph: fx.Graph, parts: Sequence[OpaquePart]) -> None:
    """Raise TraceError where one part with a row of submodules keeps most of what the step keeps.

    Such a step is better planned by those submodules.
    """
    total = saved_bytes(graph)
    for part in parts:
        has_row = _has_row(part.calls[0].island.module)
        if max(call.saved_bytes for call in part.calls) > MOST * total and has_row:
            raise TraceError(
                f"{part.path!r} keeps most of what the step keeps, and cannot be traced: "
                f"{part.why}",
                runs_in_eager=True,
            )


def _has_row(module: nn.Module) -> bool:
    """Whether there is a row of submodules in it."""
    rows = (m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential))
    return any(len(row) > 1 for row in rows)


def _failing(
    model: nn.Module, call: Call, device: torch.device, error: TraceError, whys: Mapping[str, str]
) -> dict[str, str]:
    """The modules that are one piece, after this failure; none: it has no place."""
    cause = error.__cause__
    if isinstance(cause, HookError):
        hooked = [p for p, m in model.named_modules() if p and has_refused_hook(m)]
        return _outermost({**whys, **dict.fromkeys(hooked, "it has hooks")})
    path = _place(model, error)
    if path is None and (function := outermost_function(model, error)) is not None:
        return {} if function in whys else {**whys, function: error.short}
    module = model if path is None else model.get_submodule(path)
    if (path is None or _has_row(module)) and path not in whys:
        methods = _methods(model, call, device, error, module)
        if methods and not whys.keys() & {*methods}:
            return _outermost({**whys, **dict.fromkeys(methods, error.short)})
    if path is None:
        return {}
    if path in whys:
        return _enclosing(model, path, whys)
    failed_before = [p for p, why in whys.items() if why == error.short]
    paths = alike(model, call, device, path, failed_before)
    return _outermost({**whys, **dict.fromkeys(paths, error.short)})


def _methods(
    model: nn.Module, call: Call, device: torch.device, error: TraceError, owner: nn.Module
) -> list[str]:
    """The paths of the method of the owner in which it failed, in all modules of its class."""
    if isinstance(error.__cause__, DrawError):
        with all_put_back(model, device):
            name = method_that_draws(owner, lambda: run(model, call))
    else:
        name = method_on_the_way(owner, error)
    return [] if name is None else paths_of(model, owner, name)


def _enclosing(model: nn.Module, path: str, whys: Mapping[str, str]) -> dict[str, str]:
    """With the module that contains this one instead; none: that is the model."""
    why = whys[path]
    while not is_function(path):
        path = path.rpartition(".")[0]
        if not path:
            return {}
        if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            return _outermost({**whys, path: why})
    return {}


def _outermost(whys: Mapping[str, str]) -> dict[str, str]:
    return {
        path: why
        for path, why in whys.items()
        if is_function(path) or not any(path.startswith(f"{other}.") for other in whys)
    }


def _place(model: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost module whose call the error comes from."""
    paths = {module: path for path, module in model.named_modules() if path}
    if isinstance(error.__cause__, DrawError):  # found when forward had ended
        return paths.get(error.__cause__.module)
    found = None
    for frame in frames_of(error):
        if frame.f_code.co_name == "_call_impl":
            found = paths.get(frame.f_locals.get("self"), found)
    return found


def _devices(model: nn.Module, call: Call) -> set[torch.device]:
    return {t.device for t in (*model.parameters(), *model.buffers(), *call.tensors)}


def _is_here(model: nn.Module, call: Call, device: torch.device | None) -> bool:
    """Whether model and batch are plain tensors with values, on the device that is planned for."""
    devices = _devices(model, call)
    here = next(iter(devices), None)
    if here is None or len(devices) > 1:
        return False
    if device is not None and (device.type, device.index or 0) != (here.type, here.index or 0):
        return False
    tensors = (*model.parameters(), *model.buffers(), *call.tensors)
    is_plain = all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors)
    return here.type in ("cpu", "cuda") and is_plain
