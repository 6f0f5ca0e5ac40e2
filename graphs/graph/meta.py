"""Metadata of a graph: what it says about the model and the step that it was traced from."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Union, get_args, get_origin, get_type_hints

FROZEN = ", frozen"
"""The suffix of the form of a parameter that requires no gradient."""


@dataclass(frozen=True)
class GraphMeta:
    """Metadata of a graph; not part of its structure or of `graph_id`. Every field may be empty.

    model: the class of the module, or a title.
    scope: what one node stands for, if it is not one operator.
    rewrites: the rewrites that the graph was made with (`graphs.rewrites`); empty: the plain step.
    refused_rewrites: rewrites that were tried on the device and changed bits there.
    called_losses: calls of `F.cross_entropy` that run in row chunks, in steps of stock modules. For
        each: `call`, its number among the calls of the forward pass; whether it `keeps`
        log-softmax; `n_classes`; the `dtype` of the logits, and the one it is `computed_in`; the
        `module` around it.
    gradients: "fresh", or "accumulate" if new gradients are added to existing ones; for a
        pipeline's micro-batches "accumulate, inputs fresh"; further ones are in
        `graphs.training_step.accumulation`.
    parameters, buffers: path in the module -> tensor of the graph.
    inputs: argument of forward ("x", "batch['labels']") -> tensor of the graph.
    parameter_layout: for each parameter its shape, element_bytes, tensor, and gradient (or None).
    eager_overwrites: nodes that overwrite their first input in eager mode; "in_place" in files.
        Overwriting that a rewrite adds is in `Node.overwrites` instead.
    module_calls: path of a module -> how often forward calls it; not recorded in older files.
    gradient_sums: nodes that sum the gradients of one tensor.
    backward_functions: for each autograd function with several nodes, their names. Likewise for
        each forward operator that is traced as several nodes: those that read what the operator
        holds until it returns, and its last node.
    dropped: tensor made by such a function -> the last of the function's nodes during which eager
        mode holds it, if that is not the function's last node.
    saved_unread: node -> tensors that eager mode holds until this node has run, although no later
        node reads them: autograd up to a backward node, variables of forward up to a forward node.
    held_in_calls: the same if autograd saves nothing: forward node -> tensors that variables of
        forward hold until it has run, although no later forward node reads them. None: not known.
    dead_results: tensors that dead code makes in eager mode, such as a copy that is only put into a
        list: name -> the forward node `after` which it is made, and `size_bytes`. The two fields
        above name them, too.
    dead_calls: operator calls of dead code in eager mode, in order: for each the full name of the
        `operator`, the path of the `module` that makes the call, and the forward node `after` which
        it is made ("": before all of them).
    dead_gradients: tensors that eager mode makes for gradients that nobody reads, of leaves that
        forward makes (`x.detach().requires_grad_()`), in order: name -> the `operator`
        (None: it is a further result of `after`), the backward node `after` which it runs, and
        `size_bytes`. `saved_unread` names them, too, as tensors and as nodes.
    differentiated_modules: paths of modules that take part in gradients that forward takes itself,
        or that run inside transforms of torch.func; "" is the model.
    parameter_bytes: dtype -> bytes of all parameters of that dtype.
    dtypes: dtype -> the storages of that dtype, except those that exist before the step.
    parameter_forms, buffer_forms, input_forms: dtype and shape as text, compared by `apply`.
    device_bytes: names of resident tensors that no node reads; they count what a CUDA card holds
        during the step besides the step's tensors.
    costs: the description of the cost model.
    environment: what the traced graph depends on (`environment_of`), and the chosen loss,
        optimizer and sharding.
    own_checkpoints: whether the model calls torch.utils.checkpoint by itself.
    no_cache: whether the step leaves out a cache that the model would return for generation.
    unfilled_caches: paths of the modules whose config asks for such a cache, if it would not be
        filled (encoders).
    extra: all other keys of the file, and known keys whose value has another type.
    key_order: the keys of the file in their order, so that it is written back unchanged.
    """

    model: str = ""
    scope: str = ""
    rewrites: Sequence[str] = ()
    refused_rewrites: Sequence[str] = ()
    called_losses: Sequence[Mapping[str, Any]] = ()
    gradients: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    parameter_layout: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    eager_overwrites: Sequence[str] = ()
    module_calls: Mapping[str, int] = field(default_factory=dict)
    gradient_sums: Sequence[str] = ()
    backward_functions: Sequence[Sequence[str]] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    saved_unread: Mapping[str, Sequence[str]] = field(default_factory=dict)
    held_in_calls: Mapping[str, Sequence[str]] | None = None
    dead_results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dead_calls: Sequence[Mapping[str, str]] = ()
    dead_gradients: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    differentiated_modules: Sequence[str] = ()
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    parameter_forms: Mapping[str, str] = field(default_factory=dict)
    buffer_forms: Mapping[str, str] = field(default_factory=dict)
    input_forms: Sequence[str] = ()
    device_bytes: Sequence[str] = ()
    costs: Mapping[str, Any] | str = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    own_checkpoints: bool = False
    no_cache: bool = False
    unfilled_caches: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    key_order: Sequence[str] = field(default=(), repr=False, compare=False)

    @property
    def cost_model(self) -> Mapping[str, Any] | str:
        """The description of the cost model; older files call it "cost"."""
        return self.costs or str(self.extra.get("cost", ""))

    @cached_property
    def dtype_of(self) -> Mapping[str, str]:
        """Storage -> its dtype, for the storages in `dtypes`."""
        return {name: dtype for dtype, names in self.dtypes.items() for name in names}

    @property
    def device(self) -> str:
        """The type of device that the step was traced for, "cpu" or "cuda"; "" if not recorded."""
        found = self.environment.get("device")
        return found if isinstance(found, str) else ""

    @property
    def opaque_parts(self) -> tuple[Mapping[str, Any], ...]:
        """The modules that could not be traced and are planned as one piece each
        (`graphs.capture.opaque`)."""
        found = self.environment.get("opaque")
        return tuple(p for p in found if isinstance(p, dict)) if isinstance(found, list) else ()

    @property
    def leaving_modules(self) -> tuple[str, ...]:
        """Paths of the modules in whose attributes forward leaves tensors
        (`graphs.capture.left_behind`)."""
        found = self.environment.get("left")
        return tuple(str(path) for path, _ in found) if isinstance(found, list) else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how the step differs from what the model does by itself."""
        values_read_note = _values_read_note(self.environment)
        without_gradient = _without_gradient_note(self)
        texts = (
            (self.environment.get("train", True) is False, _IN_EVALUATION),
            (self.own_checkpoints, _HAS_CHECKPOINTS),
            (self.no_cache, _NO_CACHE),
            (self.refused_rewrites, _REFUSED_REWRITES),
            (values_read_note, values_read_note),
            (without_gradient, without_gradient),
        )
        found = tuple(text for applies, text in texts if applies)
        return (*found, *_opaque_notes(self.opaque_parts))

    def with_environment(self, **changes: Any) -> GraphMeta:
        return dataclasses.replace(self, environment={**self.environment, **changes})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GraphMeta:
        """Read the `meta` object of a graph file: known keys of the right type become fields."""
        known = {k: v for k, v in values.items() if k in _TYPES and _has_type(v, _TYPES[k])}
        extra = {key: value for key, value in values.items() if key not in known}
        fields = {_FIELD_OF.get(key, key): value for key, value in known.items()}
        return cls(**fields, extra=extra, key_order=tuple(values))

    def to_json(self) -> dict[str, Any]:
        """The `meta` object of a graph file: what `from_json` was given, with the changes since."""
        values = {key: getattr(self, _FIELD_OF.get(key, key)) for key in _TYPES}
        changed = {
            key: v
            for key, v in values.items()
            if v or (key in _NONE_MEANS_UNKNOWN and v is not None)
        }
        return {key: values.get(key) for key in self.key_order} | dict(self.extra) | changed


def _opaque_notes(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Notes on modules that are planned as one piece, one note for each reason."""
    by_reason: dict[tuple[str, bool], list[str]] = {}
    for part in parts:
        reason = str(part.get("why")), part.get("recomputable") is not False
        by_reason.setdefault(reason, []).append(str(part.get("module")))
    for (why, recomputable), modules in by_reason.items():
        names = ", ".join(modules[:3])
        if len(modules) > 3:
            names += f" and {len(modules) - 3} more"
        how = (
            "saved or recomputed as a whole"
            if recomputable
            else "saved, since it has hooks, takes random numbers from the operating system, or "
            "gave other results when it ran again"
        )
        verb, it = ("are each", "each") if len(modules) > 1 else ("is", "it")
        yield (
            f"{names} {verb} planned as one piece: {it} runs in eager mode, and its results are "
            f"{how}, with memory as measured on this batch. Reason: {why}."
        )


_IN_EVALUATION = (
    "The model is in evaluation mode: dropout is off and batch norm uses its running statistics. "
    "Call model.train() before planning a training step."
)
_HAS_CHECKPOINTS = (
    "The model already uses torch.utils.checkpoint. The plan replaces those checkpoints, and the "
    "baseline is without them: as it is, the model takes less memory and more time than the "
    "baseline."
)
_NO_CACHE = (
    "config.use_cache is on. Planned training steps create no cache for generation, as "
    "transformers itself does with gradient checkpointing. Results are bitwise identical to "
    "training with it off; with it on, keys and values are laid out differently in memory, and "
    "last bits may differ."
)
_REFUSED_REWRITES = (
    "The loss is not planned in row chunks: on this device, the bits of a row depend on the "
    "rows that are computed with it."
)


def _values_read_note(environment: Mapping[str, Any]) -> str:
    """The note that another batch may lead to another step, because forward reads values. Empty if
    it reads none, or if a file records them in another form."""
    if not environment.get("values_read"):
        return ""
    try:
        names = dict(enumerate(environment.get("arguments") or ()))
        read = [(kind, key) for found in environment["values_read"] for kind, key in found["of"]]
        of_arguments = [str(names[key]) for kind, key in read if kind == "input" and key in names]
    except (KeyError, TypeError, ValueError):
        return ""
    of_buffers = [f"buffer {key!r}" for kind, key in read if kind == "buffer"]
    of = ", ".join(dict.fromkeys((*of_arguments, *of_buffers))) or "random numbers"
    return (
        f"forward reads values of {of} and chooses its operators by them. This plan is for the "
        "operators chosen for this batch; the first call that chooses others gets a plan of its "
        "own, within the same budget. It may need more memory, and its step fails if nothing fits: "
        "to see its minimum budget, also solve with such a batch."
    )


_FEW_PARAMETERS = 0.01
"""Share of the parameters' bytes below which no note says that some get no gradient."""


def _without_gradient_note(meta: GraphMeta) -> str:
    """The note that optimizer state is counted for parameters that get no gradient in this step.
    Empty if there are none or few, or no such state."""
    optimizer = meta.environment.get("optimizer")
    if not isinstance(optimizer, dict) or not optimizer.get("state_bytes"):
        return ""
    try:
        size_bytes = {
            name: math.prod(map(int, entry["shape"])) * int(entry["element_bytes"])
            for name, entry in meta.parameter_layout.items()
        }
    except (KeyError, TypeError, ValueError):
        return ""
    names = [
        name
        for name, entry in meta.parameter_layout.items()
        if entry.get("gradient") is None and not meta.parameter_forms.get(name, "").endswith(FROZEN)
    ]
    share = sum(size_bytes[name] for name in names) / (sum(size_bytes.values()) or 1)
    if share < _FEW_PARAMETERS:
        return ""
    largest = max(names, key=size_bytes.__getitem__)
    return (
        f"{100 * share:.0f} % of the parameters ({len(names)}, the largest is {largest!r}) get no "
        "gradient in this step, but optimizer state is counted for them, since another step may "
        "train them. If none does, set requires_grad=False on them: the plan then needs no room "
        "for it."
    )


_FIELD_OF = {"in_place": "eager_overwrites"}
"""Key in the file -> name of the field, where the two differ."""
_NONE_MEANS_UNKNOWN = ("held_in_calls",)
"""Fields for which None (not known) and empty differ, so that empty ones are written too."""
_KEY_OF = {field: key for key, field in _FIELD_OF.items()}

_TYPES = {
    _KEY_OF.get(name, name): kind
    for name, kind in get_type_hints(GraphMeta).items()
    if name not in ("extra", "key_order")
}


def _has_type(value: object, kind: Any) -> bool:
    """Whether a JSON value has the type of a field, down to its elements."""
    if kind is Any:
        return True
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, each) for each in arguments)
    if origin is Mapping:
        return isinstance(value, dict) and all(_has_type(v, arguments[1]) for v in value.values())
    if origin is Sequence:
        return isinstance(value, list) and all(_has_type(v, arguments[0]) for v in value)
    return isinstance(value, kind)
