"""What differs between a call and the plan that was made for another, in the caller's words.

Arguments, buffers and parameters are called by their names in the model's code and by their paths;
names of the traced graph are told last, where nothing else tells the two apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from graphs.calls import HOLE, Call, environment_of, nested, signature_of
from graphs.graph import Graph
from graphs.trace import buffer_forms, input_forms, parameter_forms
from solver.common import counted

FIELDS = ("device", "shapes", "dtypes", "train", "autocast", "torch")
"""Of the environment, in the order in which they are compared."""


def environment_difference(
    planned: Mapping[str, Any], call: Call, model: nn.Module, *, device: str
) -> str:
    """The first field of the environment in which the call differs; "": none does."""
    here = {**environment_of(call, model), "device": device}
    for field in FIELDS:
        if field not in planned or planned[field] == here[field]:
            continue
        words = f"{field} is {here[field]}, planned was {planned[field]}"
        if field in ("shapes", "dtypes"):
            words += _which_argument(planned[field], here[field], call, model)
        return words
    return ""


def _which_argument(
    planned: Sequence[Any], here: Sequence[Any], call: Call, model: nn.Module
) -> str:
    names = argument_names(call, model)
    if len(planned) != len(here):
        given = ", ".join(names) or "none"
        return f" (the tensors of this call: {given}; planned were {len(planned)})"
    differ = [name for name, one, other in zip(names, planned, here, strict=True) if one != other]
    return f" (argument{'s' if len(differ) > 1 else ''} {', '.join(differ)})"


def argument_names(call: Call, model: nn.Module) -> list[str]:
    """What forward calls each tensor of the call: "x", "batch['labels']"."""
    positional = _positional_names(model)
    names = []
    for item, path in zip(call.rest, nested.paths(call.spec), strict=True):
        if item is not HOLE:
            continue
        kind, first, *inner = path
        name = str(getattr(first, "key", ""))
        if kind.idx == 0:
            name = next(
                (n for i, n in enumerate(positional) if i == first.idx), f"number {first.idx + 1}"
            )
        names.append(name + pytree.keystr(tuple(inner)))
    return names


def _positional_names(model: nn.Module) -> list[str]:
    signature = signature_of(model.forward)
    if signature is None:
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in signature.parameters.values() if each.kind in kinds]


def forms_difference(planned: Graph, call: Call, model: nn.Module) -> str:
    """The first parameter, buffer or argument that has another form than planned; "": none has."""
    forms = planned.meta.parameter_forms
    if forms and (words := other_parameters(forms, parameter_forms(model))):
        return words
    return next(_other_forms(planned, call, model), "")


def _other_forms(planned: Graph, call: Call, model: nn.Module) -> Iterator[str]:
    forms = planned.meta.buffer_forms
    for name, form in buffer_forms(model).items():
        if name in forms and forms[name] != form:
            yield f"buffer {name!r} is {form}, planned was {forms[name]}"
    inputs = planned.meta.input_forms
    here = input_forms(call.tensors)
    if len(inputs) == len(here):
        for name, old, new in zip(argument_names(call, model), inputs, here, strict=True):
            if old != new:
                yield f"argument {name} is {new}, planned was {old}{_way_out(new)}"


def _way_out(form: str) -> str:
    return "; .contiguous() makes a whole tensor of it" if "expanded" in form else ""


def other_parameters(planned: Mapping[str, str], here: Mapping[str, str]) -> str:
    """How the parameters differ from those that were planned, in words; "": they do not."""
    extra = [name for name in here if name not in planned]
    missing = [name for name in planned if name not in here]
    for names, verb in ((extra, "was not planned for"), (missing, "was planned for and is gone")):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            return (
                f"the model has {counted(len(here), 'parameter')}, planned were {len(planned)}: "
                f"{names[0]!r}{others} {verb}; is it another depth or another model?"
            )
    for name, form in here.items():
        if form != planned[name]:
            return f"parameter {name!r} is {form}, planned was {planned[name]}"
    return ""


def graph_difference(planned: Graph, here: Graph) -> str:
    """The first operator or tensor of the traced steps that differs."""
    for new, old in zip(here.nodes, planned.nodes, strict=False):
        if (new.name, new.op) != (old.name, old.op):
            return f"operator {new.name} ({new.op}) stands where {old.name} ({old.op}) did"
        if new.inputs != old.inputs:
            return f"operator {new.name} ({new.op}) reads other tensors than when it was planned"
    titles = _titles(here)
    for tensor in here.tensors:
        old_tensor = planned.tensor_by_name.get(tensor.name)
        if old_tensor is None or old_tensor.size_bytes != tensor.size_bytes:
            before = "not there" if old_tensor is None else f"{old_tensor.size_bytes} bytes"
            name = titles.get(tensor.name, f"tensor {tensor.name}")
            return f"{name} has {tensor.size_bytes} bytes, planned: {before}"
    return f"{counted(len(here.nodes), 'operator')}, planned were {len(planned.nodes)}"


def _titles(graph: Graph) -> dict[str, str]:
    """What people call the tensors of parameters and buffers."""
    return {
        tensor: f"{kind} {path!r}"
        for kind, paths in (("parameter", graph.meta.parameters), ("buffer", graph.meta.buffers))
        for path, tensor in paths.items()
    }


def check_arguments(model: nn.Module, call: Call, *, forward: Any) -> None:
    """Raises TypeError for a call that forward does not take, as Python itself would."""
    args, kwargs = call.arguments(call.tensors)
    signature = signature_of(forward)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward{signature}: {error}") from None
