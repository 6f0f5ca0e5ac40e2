"""Finds the parts of a model that cannot be traced, by tracing.

If a trace fails, the error tells in which module's call. That module becomes an opaque part,
together with modules of its class that are expected to fail too (`graphs.capture.opaque.alike`),
and the model is traced again. If a module cannot be an opaque part (`NotOpaqueError` says why), the
module that contains it is tried instead. If all fails, the error of the first trace is raised.
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
"""How often one model is traced again. Each time a module is added, or replaced by the module that
contains it."""

MOST_RUNS = 4
"""How often the parts are observed and traced in one attempt: the layout of one part's gradients
may change that of the next part's."""

MOST = 0.75
"""Largest share of the bytes saved for backward that a part with several layers may keep."""

_R = TypeVar("_R")

Planned = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class OpaquePart:
    """A module, method or function that is planned as one piece.

    path: of the module, method or function.
    why: why it cannot be traced.
    calls: its calls in one forward pass.
    """

    path: str
    why: str
    calls: tuple[OpaqueCall, ...]

    def described(self) -> dict[str, Any]:
        """As JSON: what another trace of the step needs to make the same graph."""
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
    """Trace a model, with stand-ins for the parts that cannot be traced.

    Returns the result of `trace`, and the opaque parts.

    device: the device to plan for (None: that of the model).
    trace: stand-ins -> the traced result.
    planned: the opaque parts of a plan (`OpaquePart.described`), tried first.

    Raises FailsOnBatchError if the model itself fails. Raises the TraceError of the first trace if
    no suitable parts are found, or if model and batch have no values on the device to plan for.
    """
    if planned and _is_here(model, call, device):
        where = _devices(model, call).pop()
        # The plan may be for another model: if this fails, the parts are searched for as usual.
        with contextlib.suppress(Exception):
            whys = {each["module"]: each["why"] for each in planned}
            return _attempt(model, call, where, whys, trace, planned)
    try:
        return trace(()), ()
    except TraceError as error:
        card = device_of(model) if torch.cuda.is_available() else torch.device("cpu")
        with RandomSources.of(model, card).as_before():  # forward may draw numbers, or set a seed
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
    """Add a note to the error, unless it has the same already, as from a similar module."""
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
    """Observe these parts and trace the model with stand-ins for them.

    Which gradients the parts are asked for is only known after a trace, so both are repeated until
    the parts have been observed with the gradients that the trace asks for.

    whys: path of each part -> why it cannot be traced.
    """
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
        # In the last run, gradients may still arrive with other strides than observed.
        if found == given or (n_runs == MOST_RUNS and _needs(found) == _needs(given)):
            return result, tuple(
                OpaquePart(path, whys[path], tuple(calls)) for path, calls in observed.items()
            )
        if asked and _needs(found) != _needs(given):
            break
        asked = found
    raise TraceError("what needs a gradient differs from trace to trace")


def _needs(asked: AskedOf) -> dict[str, list[tuple[bool, ...]]]:
    """`asked` without the strides of tangents."""
    return {path: [(each.grad_enabled, *each.needs) for each in asked[path]] for path in asked}


def refuse_most(graph: fx.Graph, parts: Sequence[OpaquePart]) -> None:
    """Raise TraceError if a call of one part keeps most of the bytes saved for backward.

    This holds for parts that contain a ModuleList or Sequential of several modules: such a step is
    better planned by these submodules.
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
    """Whether the module contains a ModuleList or Sequential of more than one module."""
    rows = (m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential))
    return any(len(row) > 1 for row in rows)


def _failing(
    model: nn.Module, call: Call, device: torch.device, error: TraceError, whys: Mapping[str, str]
) -> dict[str, str]:
    """The parts to make opaque after a trace has failed; empty if the error names no part.

    whys: the present opaque parts -> why they cannot be traced.
    Returns the new ones, in the same form.
    """
    cause = error.__cause__
    if isinstance(cause, HookError):
        # Hooks need no further trace to be found: all modules with hooks become opaque at once.
        hooked = [p for p, m in model.named_modules() if p and has_refused_hook(m)]
        return _outermost({**whys, **dict.fromkeys(hooked, "it has hooks")})
    path = _place(model, error)
    if path is None and (function := outermost_function(model, error)) is not None:
        return {} if function in whys else {**whys, function: error.short}
    module = model if path is None else model.get_submodule(path)
    # A module that holds much of the model should not become opaque if one of its methods can.
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
    """The paths of the owner's method in which a trace has failed, in all modules of its class."""
    if isinstance(error.__cause__, DrawError):
        with all_put_back(model, device):
            name = method_that_draws(owner, lambda: run(model, call))
    else:
        name = method_on_the_way(owner, error)
    return [] if name is None else paths_of(model, owner, name)


def _enclosing(model: nn.Module, path: str, whys: Mapping[str, str]) -> dict[str, str]:
    """The opaque parts with the module that contains this one in its place.

    Empty if that is the model, or if the part is a function.
    """
    why = whys[path]
    while not is_function(path):
        path = path.rpartition(".")[0]
        if not path:
            return {}
        if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            return _outermost({**whys, path: why})
    return {}


def _outermost(whys: Mapping[str, str]) -> dict[str, str]:
    """The opaque parts without those that are inside of another."""
    return {
        path: why
        for path, why in whys.items()
        if is_function(path) or not any(path.startswith(f"{other}.") for other in whys)
    }


def _place(model: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost submodule in whose call the error was raised, or None."""
    paths = {module: path for path, module in model.named_modules() if path}
    if isinstance(error.__cause__, DrawError):  # raised after forward had ended
        return paths.get(error.__cause__.module)
    found = None
    for frame in frames_of(error):
        if frame.f_code.co_name == "_call_impl":
            found = paths.get(frame.f_locals.get("self"), found)
    return found


def _devices(model: nn.Module, call: Call) -> set[torch.device]:
    return {t.device for t in (*model.parameters(), *model.buffers(), *call.tensors)}


def _is_here(model: nn.Module, call: Call, device: torch.device | None) -> bool:
    """Whether model and batch are plain tensors with values, all on the device to plan for."""
    devices = _devices(model, call)
    here = next(iter(devices), None)
    if here is None or len(devices) > 1:
        return False
    if device is not None and (device.type, device.index or 0) != (here.type, here.index or 0):
        return False
    tensors = (*model.parameters(), *model.buffers(), *call.tensors)
    is_plain = all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors)
    return here.type in ("cpu", "cuda") and is_plain
