"""What differs between a call and the plan that was made for another, in the caller's words.

Arguments, buffers and parameters have their names in the model's code and their paths; names of the
traced graph come last, where nothing else differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from graphs.calls import (
    HOLE,
    Call,
    buffer_forms,
    device_of,
    environment_of,
    input_forms,
    nested,
    parameter_forms,
    signature_of,
)
from graphs.graph import Graph
from graphs.rewrites import PROGRAM_REWRITES, keeps_bits_here
from graphs.trace import CapturedStep
from scheduler_runtime.planned.plan import Plan
from solver.common import counted

FIELDS = ("device", "shapes", "dtypes", "train", "autocast", "torch")
"""Of the environment, in the order in which they are compared."""


@dataclass(frozen=True)
class Difference:
    """The first thing in which a call differs from the plan.

    of_values: nothing but values that the module reads: the same step with another batch.
    """

    words: str
    of_values: bool = False

    def __str__(self) -> str:
        return self.words


def difference(
    plan: Plan, call: Call, model: nn.Module, part: Graph | None = None
) -> Difference | None:
    """The first thing in which a call differs from the plan; None: nothing does.

    part: the graph of the module's part of the step, traced for this call. None: it could not be
        traced; then only what can be compared without it is.
    """
    if part is not None and part.graph_id == plan.module_graph_id:
        return None
    found = _environment_difference(plan, call, model)
    if found is None and plan.graph is not None:
        found = _forms_difference(plan.graph, call, model)
    if found is not None or part is None:
        return None if found is None else Difference(found)
    if (found := _values_difference(plan, part, call, model)) is not None:
        return Difference(found, of_values=True)
    if (found := _opaque_difference(plan, part)) is not None:
        return Difference(found, of_values=True)
    if plan.graph is None:
        return Difference("the traced operators are not those of the plan")
    return Difference(_graph_difference(plan.graph.module_part(), part))


def difference_of_bits(step: CapturedStep) -> Difference | None:
    """That the rewritten step would have other bits here; tried on this device, and kept.

    A plan may come from another device, or from a process with another number of threads.
    """
    if keeps_bits_here(step.captured):
        return None
    names = ", ".join(name for name in step.graph.meta.rewrites if name in PROGRAM_REWRITES)
    return Difference(
        f"the plan was made with {names}, and on this device rows in chunks have other bits than "
        "all at once"
    )


def _environment_difference(plan: Plan, call: Call, model: nn.Module) -> str | None:
    planned = plan.environment
    here = {**environment_of(call, model), "device": device_of(model).type}
    for field in FIELDS:
        if field not in planned or planned[field] == here[field]:
            continue
        found = f"{field}: {here[field]}, planned for {planned[field]}"
        if field not in ("shapes", "dtypes"):
            return found
        names = _argument_names(call, model)
        if len(planned[field]) != len(here[field]):
            given = ", ".join(names) or "none"
            return f"{found} (this call has the tensors {given}; planned for {len(planned[field])})"
        pairs = zip(names, planned[field], here[field], strict=True)
        differ = [name for name, old, new in pairs if old != new]
        return f"{found} (argument{'s' if len(differ) > 1 else ''} {', '.join(differ)})"
    return None


def _argument_names(call: Call, model: nn.Module) -> list[str]:
    """What forward calls each tensor of the call: "x", "batch['labels']"."""
    signature = signature_of(model.forward)
    parameters = [] if signature is None else signature.parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each.name for each in parameters if each.kind in kinds]
    names = []
    for item, path in zip(call.rest, nested.paths(call.spec), strict=True):
        if item is not HOLE:
            continue
        kind, first, *inner = path
        if kind.idx == 1:  # among the keyword arguments
            name = str(getattr(first, "key", ""))
        elif first.idx < len(positional):
            name = positional[first.idx]
        else:
            name = f"number {first.idx + 1}"
        names.append(name + pytree.keystr(tuple(inner)))
    return names


def _values_difference(plan: Plan, part: Graph, call: Call, model: nn.Module) -> str | None:
    """The first value that forward read and that was another one, or unknown, when planning."""
    planned = plan.environment.get("values_read")
    here = part.meta.environment["values_read"]
    if planned is None or planned == here:
        return None
    names = _argument_names(call, model)
    for each in here:
        if each not in planned:
            of = [names[k] if kind == "input" else f"buffer {k!r}" for kind, k in each["of"]]
            return f"forward reads {each['seen']} from {', '.join(of)}, unlike in the planned step"
    return "forward reads fewer values of the batch than when it was planned"


def _opaque_difference(plan: Plan, part: Graph) -> str | None:
    """The first module that is planned as one piece and takes other memory here."""
    planned, here = (each.get("opaque") for each in (plan.environment, part.meta.environment))
    if not isinstance(planned, list) or not isinstance(here, list):
        return None
    for new, old in zip(here, planned, strict=False):
        if new["module"] == old.get("module") and new != old:
            return f"{new['module']!r}, which is planned as one piece, keeps other memory here"
    return None


def _forms_difference(planned: Graph, call: Call, model: nn.Module) -> str | None:
    """The first parameter, buffer or argument whose form is not as planned."""
    parameters = planned.meta.parameter_forms
    if parameters and (found := _other_parameters(parameters, parameter_forms(model))):
        return found
    buffers = planned.meta.buffer_forms
    for name, form in buffer_forms(model).items():
        if name in buffers and buffers[name] != form:
            return f"buffer {name!r} is {form}, planned for {buffers[name]}"
    inputs, here = planned.meta.input_forms, input_forms(call.tensors)
    if len(inputs) == len(here):
        for name, old, new in zip(_argument_names(call, model), inputs, here, strict=True):
            if old != new:
                remedy = "; call .contiguous() on it" if "expanded" in new else ""
                return f"argument {name} is {new}, planned for {old}{remedy}"
    return None


def _other_parameters(planned: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    extra = [name for name in here if name not in planned]
    missing = [name for name in planned if name not in here]
    for names, verb in ((extra, "is not in the plan"), (missing, "is in the plan only")):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            return (
                f"the model has {counted(len(here), 'parameter')}, planned for {len(planned)}: "
                f"{names[0]!r}{others} {verb}; is it another depth or another model?"
            )
    for name, form in here.items():
        if form != planned[name]:
            return f"parameter {name!r} is {form}, planned for {planned[name]}"
    return None


def _graph_difference(planned: Graph, here: Graph) -> str:
    """The first operator or tensor of the traced steps that differs."""
    for new, old in zip(here.nodes, planned.nodes, strict=False):
        if (new.name, new.op) != (old.name, old.op):
            return f"operator {new.name} ({new.op}) instead of {old.name} ({old.op})"
        if new.inputs != old.inputs:
            return f"operator {new.name} ({new.op}) reads other tensors than in the plan"
    titles = {
        tensor: f"{kind} {path!r}"
        for kind, paths in (("parameter", here.meta.parameters), ("buffer", here.meta.buffers))
        for path, tensor in paths.items()
    }
    for tensor in here.tensors:
        old_tensor = planned.tensor_by_name.get(tensor.name)
        if old_tensor is None or old_tensor.size_bytes != tensor.size_bytes:
            before = "not there" if old_tensor is None else f"{old_tensor.size_bytes} bytes"
            name = titles.get(tensor.name, f"tensor {tensor.name}")
            return f"{name} has {tensor.size_bytes} bytes, planned: {before}"
    return f"{counted(len(here.nodes), 'operator')}, planned for {len(planned.nodes)}"


def check_arguments(model: nn.Module, call: Call, *, forward: Callable[..., Any]) -> None:
    """Raises TypeError for arguments that forward does not take, as Python itself would."""
    args, kwargs = call.arguments(call.tensors)
    signature = signature_of(forward)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward{signature}: {error}") from None
