"""Describe how a call differs from the one that a plan was made for, in the caller's terms.

Arguments are named as in the model's code, and buffers and parameters by their paths. Names of the
traced graph are used only if nothing else differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import nn

from graphs.graph import FROZEN, Graph, Node
from graphs.model_calls import (
    Call,
    buffer_forms,
    device_of,
    environment_of,
    input_forms,
    parameter_forms,
    signature_of,
)
from graphs.rewrites import PROGRAM_REWRITES, keeps_bits_here
from graphs.trace import CapturedStep
from scheduler_runtime.planned.plan import Plan
from solver.sizes_deadlines_progress import counted

FIELDS = ("device", "arguments", "shapes", "dtypes", "train", "autocast", "torch")
"""Fields of the environment, in the order in which they are compared."""


class PlanMismatchError(ValueError):
    """The module, its batch or its environment is not the planned one; says what differs.

    difference: the part of the message that says what differs; "" if it has no such part.
    """

    def __init__(self, message: str, *, difference: str = "") -> None:
        super().__init__(message)
        self.difference = difference


@dataclass(frozen=True)
class Resized:
    """How the shapes of a call's tensors differ from the planned ones, dimension by dimension.

    dimensions: the dimensions in which sizes differ.
    is_larger: whether any size is larger than planned.
    of_tokens: whether a tensor of integers differs in another dimension than the first, as token
        ids do in sequences of another length.
    """

    dimensions: frozenset[int]
    is_larger: bool
    of_tokens: bool

    @classmethod
    def of(
        cls,
        planned: Sequence[Sequence[int]],
        here: Sequence[Sequence[int]],
        dtypes: Sequence[str],
    ) -> Resized | None:
        """Compare shapes. None: a tensor has another number of dimensions than planned."""
        if [len(shape) for shape in planned] != [len(shape) for shape in here]:
            return None
        changes = [
            (dimension, new > old)
            for shapes in zip(planned, here, strict=True)
            for dimension, (old, new) in enumerate(zip(*shapes, strict=True))
            if new != old
        ]
        of_tokens = any(
            "int" in dtype and old[1:] != new[1:]
            for dtype, old, new in zip(dtypes, planned, here, strict=True)
        )
        dimensions = frozenset(each for each, _ in changes)
        return cls(dimensions, any(larger for _, larger in changes), of_tokens)


@dataclass(frozen=True)
class Difference:
    """The first difference between a call and the plan.

    words: the difference, for a message.
    of_values: whether only values differ that the module reads: the same step with another batch.
    resized: how the sizes of arguments differ, if nothing else does.
    remedy: a sentence on how to need fewer plans.
    """

    words: str
    of_values: bool = False
    resized: Resized | None = None
    remedy: str = ""

    @property
    def is_smaller(self) -> bool:
        """Whether only sizes differ, and none is larger. Such a call need not take less memory, so
        it is planned within the same budget."""
        return self.resized is not None and not self.resized.is_larger

    def __str__(self) -> str:
        return self.words


def difference(
    plan: Plan, call: Call, model: nn.Module, part: Graph | None = None
) -> Difference | None:
    """The first difference between a call and the plan; None: there is none.

    part: the graph of the module's part of the step, traced for this call. None: it could not be
        traced; then only what needs no trace is compared.
    """
    if part is not None and part.graph_id == plan.module_graph_id:
        return None
    here = {**environment_of(call, model), "device": device_of(model).type}
    differing = [f for f in FIELDS if f in plan.environment and plan.environment[f] != here[f]]
    of_state = _state_difference(plan, model)
    if differing:
        words = _field_difference(differing[0], plan.environment, here)
        resized = None
        if differing == ["shapes"] and of_state is None:
            resized = Resized.of(plan.environment["shapes"], here["shapes"], here["dtypes"])
        return Difference(words, resized=resized)
    found = of_state or _form_difference(plan.input_forms, call, here)
    if found is not None:
        return Difference(found)
    if part is not None:
        if (of_values := values_difference(plan, part, here["arguments"])) is not None:
            return of_values
        if (found := _opaque_difference(plan, part)) is not None:
            return Difference(found, of_values=True)
    if (found := _options_difference(plan.environment, here)) is not None:
        return Difference(found)
    if part is None:
        return None
    if (found := _rewrites_difference(plan, part)) is not None:
        return Difference(found)
    if plan.graph is None:
        return Difference(_operators_difference(plan.module_operators, part))
    return Difference(_graph_difference(plan.graph.module_part(), part))


def difference_of_bits(step: CapturedStep) -> Difference | None:
    """The difference if the rewritten step is not bitwise identical here; None: it is.

    Computing rows in chunks is tried on this device, once for each kind of operator, since the plan
    may come from another device or from a process with another number of threads.
    """
    if keeps_bits_here(step.captured):
        return None
    names = ", ".join(name for name in step.graph.meta.rewrites if name in PROGRAM_REWRITES)
    return Difference(
        f"the plan was made with {names}, and on this device, rows computed in chunks are not "
        "bitwise identical to all rows computed at once"
    )


def _field_difference(field: str, planned: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe how a field of the environment differs, with the names of the arguments."""
    if field == "arguments" or len(planned["shapes"]) != len(here["shapes"]):
        return _tensors_difference(here["arguments"], planned.get("arguments"))
    if field == "train" and isinstance(planned[field], bool):
        now, before = ("training" if mode[field] else "evaluation" for mode in (here, planned))
        return f"the module is in {now} mode, and was planned in {before} mode"
    if field not in ("shapes", "dtypes"):
        if planned[field] is None:
            return f"{field}: {here[field]}, planned without"
        now = "none" if here[field] is None else here[field]
        return f"{field}: {now}, planned for {planned[field]}"
    each = list(zip(here["arguments"], here[field], planned[field], strict=True))
    differing = [(name, new, old) for name, new, old in each if new != old]
    name, new, old = differing[0]
    what = "shape" if field == "shapes" else "dtype"
    return f"argument {name}{_and_more(differing)} has {what} {new}, planned for {old}"


def _and_more(items: Sequence[object]) -> str:
    """How many there are besides the first, for messages."""
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _tensors_difference(here: Sequence[str], planned: Sequence[str] | None) -> str:
    """Describe how the names of the call's tensors differ (planned: None: not in an older file)."""
    given = ", ".join(here) or "none"
    if planned is None:
        return f"this call passes the tensors {given}, and the planned call passed others"
    named = [f"argument {name} is a tensor in this call only" for name in here]
    named = [text for text, name in zip(named, here, strict=True) if name not in planned]
    named += [f"argument {name} was a tensor when planned" for name in planned if name not in here]
    first = named[0] if named else "the tensors come in another order"
    return f"{first}: this call passes {given}, planned for {', '.join(planned) or 'none'}"


_OF_ROWS = (
    "Remedy: choose the same number of rows in each step, or compute all of them and leave some "
    "out in the loss (ignore_index of cross_entropy, a mask that it is multiplied by)"
)
_SHAPE = re.compile(r"\((\d+),(?: \d+)*\)")


def values_difference(plan: Plan, part: Graph, names: Sequence[str]) -> Difference | None:
    """The first difference in the values that forward reads from tensors; None: there is none.

    names: names of the call's tensors.
    """
    planned = plan.environment.get("values_read")
    here = part.meta.environment["values_read"]
    if planned is None or planned == here:
        return None

    def holders(read: Mapping[str, Any]) -> str:
        titles = {
            "input": lambda k: f"argument {names[k]}",
            "buffer": lambda k: f"buffer {k!r}",
            "random": lambda k: f"the random generator of the {k}",
        }
        of = [titles[kind](key) for kind, key in read["of"]]
        return ", ".join(of) or "a tensor that the module holds"

    for each in here:  # a value that was another one, or was not read, when planning
        if each in planned:
            continue
        words = f"{holders(each)} has other values than when planned: forward "
        if (rows := _SHAPE.fullmatch(each["seen"])) is not None:
            words += f"chooses {rows[1]} rows by them (a boolean mask, nonzero)"
            return Difference(words, of_values=True, remedy=_OF_ROWS)
        return Difference(f"{words}reads {each['seen']}", of_values=True)
    left_out = next((each for each in planned if each not in here), None)
    if left_out is None:  # the same values, in another order or another number of times
        pairs = zip_longest(here, planned)
        each = next(now or before for now, before in pairs if now != before)
        words = f"{holders(each)} has other values than when planned: forward reads {each['seen']}"
        return Difference(f"{words} at another place", of_values=True)
    words = (
        f"forward read a value of {holders(left_out)} when the step was planned, and does not read "
        "it in this call"
    )
    return Difference(words, of_values=True)


def _opaque_difference(plan: Plan, part: Graph) -> str | None:
    """The first module that is planned as one piece and uses memory otherwise in this call."""
    planned, here = (each.get("opaque") for each in (plan.environment, part.meta.environment))
    if not isinstance(planned, list) or not isinstance(here, list):
        return None
    for new, old in zip(here, planned, strict=False):
        if new["module"] == old.get("module") and new != old:
            return (
                f"{new['module']!r}, which is planned as one piece, saves or reads other memory in "
                "this call than planned"
            )
    return None


def _options_difference(planned: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first argument that is not a tensor and has another value."""
    old, new = planned.get("options"), here["options"]
    if not isinstance(old, dict):
        return None
    for name in dict.fromkeys([*new, *old]):
        if new.get(name) != old.get(name):
            now, before = new.get(name, "left out"), old.get(name, "its default")
            return f"argument {name} is {now}, planned for {before}"
    return None


def _rewrites_difference(plan: Plan, part: Graph) -> str | None:
    """A difference if the plan rewrites the loss, but the loss of this step cannot be rewritten."""
    names = [name for name in plan.rewrites if name in PROGRAM_REWRITES]
    in_chunks = any(node.op.startswith(("row_chunks(", "head_loop(")) for node in part.nodes)
    if not names or in_chunks:
        return None
    return (
        f"the plan was made with {', '.join(names)}, and this step has no loss that can be "
        "computed in row chunks"
    )


def _state_difference(plan: Plan, model: nn.Module) -> str | None:
    """The first parameter or buffer whose form is not as planned."""
    parameters, here = plan.parameter_forms, parameter_forms(model)
    # A file may be for a module with the same parameters under other names, such as a pipeline
    # stage.
    renamed = plan.graph is None and [*parameters.values()] == [*here.values()]
    if parameters and not renamed and (found := _parameters_difference(parameters, here)):
        return found
    buffers = plan.buffer_forms
    for name, form in buffer_forms(model).items():
        if name in buffers and buffers[name] != form:
            return f"buffer {name!r} is {form}, planned for {buffers[name]}"
    return None


def _form_difference(planned: Sequence[str], call: Call, here: Mapping[str, Any]) -> str | None:
    """The first argument of the same shape and dtype whose form is not as planned."""
    forms = input_forms(call.tensors)
    if len(planned) == len(forms):
        for name, old, new in zip(here["arguments"], planned, forms, strict=True):
            if old != new:
                remedy = "; call .contiguous() on it" if "expanded" in new else ""
                return f"argument {name} is {new}, planned for {old}{remedy}"
    return None


def _parameters_difference(planned: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    extra = [name for name in here if name not in planned]
    missing = [name for name in planned if name not in here]
    for names, verb in ((extra, "is not in the plan"), (missing, "is in the plan only")):
        if names:
            return (
                f"the model has {counted(len(here), 'parameter')}, planned for {len(planned)}: "
                f"{names[0]!r}{_and_more(names)} {verb} (another depth or another model?)"
            )
    for name, form in here.items():
        if (old := planned[name]) != form:
            if form.removesuffix(FROZEN) == old.removesuffix(FROZEN):
                form, old = (each if FROZEN in each else f"{each}, trained" for each in (form, old))
            return f"parameter {name!r} is {form}, planned for {old}"
    return None


def _graph_difference(planned: Graph, here: Graph) -> str:
    """The first operator or tensor of the traced steps that differs."""
    for new, old in zip(here.nodes, planned.nodes, strict=False):
        if (new.name, new.op) != (old.name, old.op):
            found = f"operator {new.name} ({new.op}) instead of {old.name} ({old.op})"
            return found + _computed_from(here, new)
        if new.inputs != old.inputs:
            found = f"operator {new.name} ({new.op}) reads other tensors than in the plan"
            return found + _computed_from(here, new)
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


def _operators_difference(planned: Sequence[str], here: Graph) -> str:
    """The first operator that differs from a schedule file, which has only operators' names."""
    for new, old in zip(here.nodes, planned, strict=False):
        if new.name != old:
            found = f"operator {new.name} ({new.op}) instead of {old}"
            return found + _computed_from(here, new)
    if len(here.nodes) > len(planned):
        new = here.nodes[len(planned)]
        found = f"operator {new.name} ({new.op}) is not in the plan"
        return found + _computed_from(here, new)
    if len(here.nodes) < len(planned):
        return (
            f"this call runs only the first {len(here.nodes)} of "
            f"{counted(len(planned), 'planned operator')}; the plan goes on with "
            f"{planned[len(here.nodes)]}"
        )
    return (
        f"this call's {counted(len(planned), 'operator')} have the planned names but differ in "
        "kind, size or inputs; a schedule file does not record which (or the file was edited, its "
        "rewrites for instance); plan in this process to see the difference"
    )


def _computed_from(graph: Graph, node: Node) -> str:
    """The arguments of forward that the operator is computed from, for messages."""
    pending, sources = list(node.inputs), set[str]()
    while pending:
        name = pending.pop()
        if name not in sources:
            sources.add(name)
            maker = graph.producer.get(name)
            pending += [graph.root(name), *(maker.inputs if maker else ())]
    names = [argument for argument, tensor in graph.meta.inputs.items() if tensor in sources]
    return f", computed from {', '.join(names)}" if names else ""


def check_arguments(model: nn.Module, call: Call, *, forward: Callable[..., Any]) -> None:
    """Raise TypeError for arguments that forward does not take, as Python itself would."""
    args, kwargs = call.arguments(call.tensors)
    signature = signature_of(forward)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward{signature}: {error}") from None
