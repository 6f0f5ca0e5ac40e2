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

from graphs.capture.opaque.alike import paths_failing_alike
from graphs.capture.opaque.forms import OpaqueCall, RandomSources
from graphs.capture.opaque.functions import is_function, outermost_function
from graphs.capture.opaque.methods import failing_method, method_paths, method_that_draws
from graphs.capture.opaque.nodes import StandIn, replaced_by_stand_ins, saved_bytes
from graphs.capture.opaque.observe import NotOpaqueError, Requests, observe
from graphs.capture.opaque.real_forward import buffers_restored, model_restored, run_forward
from graphs.capture.own_failure import (
    frames_of,
    refuse_failure_on_values,
    refuse_own_failure,
    refuse_same_failure,
)
from graphs.capture.refuse import DrawError, HookError, SideEffectError, has_refused_hook
from graphs.model_calls import Call, TraceError, device_of

MOST_TRACES = 12
"""How often one model is traced again. Each time a module is added, or replaced by the module that
contains it."""

MOST_RUNS = 4
"""How often the parts are observed and traced in one attempt: the layout of one part's gradients
may change that of the next part's."""

MOST_SAVED_SHARE = 0.75
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
    if planned and _has_values_on(model, call, device):
        model_device = _devices_of(model, call).pop()
        # The plan may be for another model: if this fails, the parts are searched for as usual.
        with contextlib.suppress(Exception):
            reasons = {each["module"]: each["why"] for each in planned}
            return _observe_and_trace(model, call, model_device, reasons, trace, planned)
    try:
        return trace(()), ()
    except TraceError as error:
        card = device_of(model) if torch.cuda.is_available() else torch.device("cpu")
        random = RandomSources.of(model, card)
        # forward may draw numbers, set a seed, or change a buffer that it finds in a list
        with random.states_restored(), buffers_restored(model):
            refuse_own_failure(model, call, error)
        if not _has_values_on(model, call, device):
            raise
        first_error = error
    model_device = _devices_of(model, call).pop()
    with model_restored(model, model_device):
        refuse_failure_on_values(model, first_error, lambda: run_forward(model, call))
    reasons = _parts_after_failure(model, call, model_device, first_error, {})
    for _ in range(MOST_TRACES):
        if not reasons:
            raise first_error
        try:
            return _observe_and_trace(model, call, model_device, reasons, trace)
        except NotOpaqueError as refused:
            _add_note(first_error, str(refused))
            reasons = _with_enclosing_module(model, refused.path, reasons)
        except TraceError as error:
            _add_note(first_error, error.why)
            reasons = _parts_after_failure(model, call, model_device, error, reasons)
        except Exception as error:  # the model's code may raise anything
            refuse_same_failure(model, first_error, error)
            first_error.add_note(f"{type(error).__name__} when it was run: {error}")
            raise first_error from error
    _add_note(
        first_error, f"given up after {MOST_TRACES} more traces, each of which failed elsewhere"
    )
    raise first_error


def _add_note(error: TraceError, text: str) -> None:
    """Add a note to the error, unless it has the same already, as from a similar module."""
    if text not in (error.why, *getattr(error, "__notes__", ())):
        error.add_note(text)


def _observe_and_trace(
    model: nn.Module,
    call: Call,
    device: torch.device,
    reasons: Mapping[str, str],
    trace: Callable[[Sequence[StandIn]], _R],
    planned: Planned = (),
) -> tuple[_R, tuple[OpaquePart, ...]]:
    """Observe these parts and trace the model with stand-ins for them.

    Which gradients the parts are asked for is only known after a trace, so both are repeated until
    the parts have been observed with the gradients that the trace asks for.

    reasons: path of each part -> why it cannot be traced.
    """
    requests: Requests = {}
    for n_runs in range(1, MOST_RUNS + 1):
        observed = observe(model, call, tuple(reasons), device=device, requests=requests)
        for each in planned:
            pairs = zip(observed[each["module"]], each["calls"], strict=True)
            observed[each["module"]] = [one.as_planned(other) for one, other in pairs]
        with replaced_by_stand_ins(model, observed) as stand_ins:
            result = trace(stand_ins)
            found = {each.path: each.requests_with_strides() for each in stand_ins}
        given = {path: tuple(c.island.request for c in calls) for path, calls in observed.items()}
        # In the last run, gradients may still arrive with other strides than observed.
        if found == given or (
            n_runs == MOST_RUNS and _without_strides(found) == _without_strides(given)
        ):
            return result, tuple(
                OpaquePart(path, reasons[path], tuple(calls)) for path, calls in observed.items()
            )
        if requests and _without_strides(found) != _without_strides(given):
            break
        requests = found
    raise TraceError("what needs a gradient differs from trace to trace")


def _without_strides(requests: Requests) -> dict[str, list[tuple[bool, ...]]]:
    """`requests` without the strides of tangents."""
    return {
        path: [(each.grad_enabled, *each.needs) for each in requests[path]] for path in requests
    }


def refuse_dominant_part(graph: fx.Graph, parts: Sequence[OpaquePart]) -> None:
    """Raise TraceError if a call of one part keeps most of the bytes saved for backward.

    This holds for parts that contain a ModuleList or Sequential of several modules: such a step is
    better planned by these submodules.
    """
    total = saved_bytes(graph)
    for part in parts:
        has_layers = _has_layers(part.calls[0].island.module)
        if max(call.saved_bytes for call in part.calls) > MOST_SAVED_SHARE * total and has_layers:
            raise TraceError(
                f"{part.path!r} keeps most of what the step keeps, and cannot be traced: "
                f"{part.why}",
                runs_in_eager=True,
            )


def _has_layers(module: nn.Module) -> bool:
    """Whether the module contains a ModuleList or Sequential of more than one module."""
    lists = (m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential))
    return any(len(row) > 1 for row in lists)


def _parts_after_failure(
    model: nn.Module,
    call: Call,
    device: torch.device,
    error: TraceError,
    reasons: Mapping[str, str],
) -> dict[str, str]:
    """The parts to make opaque after a trace has failed; empty if the error names no part.

    reasons: the present opaque parts -> why they cannot be traced.
    Returns the new ones, in the same form.
    """
    cause = error.__cause__
    hooked = [p for p, m in model.named_modules() if p and has_refused_hook(m)]
    # Hooks need no further trace to be found: all modules with hooks become opaque at once. What
    # forward changes may be what the model's own hooks change.
    if isinstance(cause, HookError) or (
        isinstance(cause, SideEffectError) and not reasons and hooked
    ):
        return _outermost_parts({**reasons, **dict.fromkeys(hooked, "it has hooks")})
    path = _failing_module_path(model, error)
    if path is None and (function := outermost_function(model, error)) is not None:
        return {} if function in reasons else {**reasons, function: error.short}
    module = model if path is None else model.get_submodule(path)
    # A module that holds much of the model should not become opaque if one of its methods can.
    if (path is None or _has_layers(module)) and path not in reasons:
        methods = _failing_method_paths(model, call, device, error, module)
        if methods and not reasons.keys() & {*methods}:
            return _outermost_parts({**reasons, **dict.fromkeys(methods, error.short)})
    if path is None:
        return {}
    if path in reasons:
        return _with_enclosing_module(model, path, reasons)
    failed_before = [p for p, why in reasons.items() if why == error.short]
    paths = paths_failing_alike(model, call, device, path, failed_before)
    return _outermost_parts({**reasons, **dict.fromkeys(paths, error.short)})


def _failing_method_paths(
    model: nn.Module, call: Call, device: torch.device, error: TraceError, owner: nn.Module
) -> list[str]:
    """The paths of the owner's method in which a trace has failed, in all modules of its class."""
    if isinstance(error.__cause__, DrawError):
        with model_restored(model, device):
            name = method_that_draws(owner, lambda: run_forward(model, call))
    else:
        name = failing_method(owner, error)
    return [] if name is None else method_paths(model, owner, name)


def _with_enclosing_module(
    model: nn.Module, path: str, reasons: Mapping[str, str]
) -> dict[str, str]:
    """The opaque parts with the module that contains this one in its place.

    Empty if that is the model, or if the part is a function.
    """
    why = reasons[path]
    while not is_function(path):
        path = path.rpartition(".")[0]
        if not path:
            return {}
        if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            return _outermost_parts({**reasons, path: why})
    return {}


def _outermost_parts(reasons: Mapping[str, str]) -> dict[str, str]:
    """The opaque parts without those that are inside of another."""
    return {
        path: why
        for path, why in reasons.items()
        if is_function(path) or not any(path.startswith(f"{other}.") for other in reasons)
    }


def _failing_module_path(model: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost submodule in whose call the error was raised, or None."""
    paths = {module: path for path, module in model.named_modules() if path}
    if isinstance(error.__cause__, DrawError):  # raised after forward had ended
        return paths.get(error.__cause__.module)
    found = None
    for frame in frames_of(error):
        if frame.f_code.co_name == "_call_impl":
            found = paths.get(frame.f_locals.get("self"), found)
    return found


def _devices_of(model: nn.Module, call: Call) -> set[torch.device]:
    return {t.device for t in (*model.parameters(), *model.buffers(), *call.tensors)}


def _has_values_on(model: nn.Module, call: Call, device: torch.device | None) -> bool:
    """Whether model and batch are plain tensors with values, all on the device to plan for."""
    devices = _devices_of(model, call)
    here = next(iter(devices), None)
    if here is None or len(devices) > 1:
        return False
    if device is not None and (device.type, device.index or 0) != (here.type, here.index or 0):
        return False
    tensors = (*model.parameters(), *model.buffers(), *call.tensors)
    is_plain = all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors)
    return here.type in ("cpu", "cuda") and is_plain
