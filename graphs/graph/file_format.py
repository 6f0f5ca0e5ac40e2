"""The file format graph/2: converts a graph to a plain dictionary and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from graphs.files import Record
from graphs.graph.lookups import Lookups
from graphs.graph.meta import GraphMeta
from graphs.graph.parts import KINDS, PHASES, Node, Tensor

FORMAT, OLDER_FORMATS = "graph/2", ("graph/1",)


def to_json(graph: Lookups) -> dict[str, Any]:
    """The graph as a plain dictionary of format graph/2."""
    optional: dict[str, tuple[Any, Any]] = {
        "n_in_flight": (graph.n_in_flight, 1),
        "host_state_bytes": (graph.host_state_bytes, 0),
        "accumulated": (list(graph.accumulated), []),
        "others_bytes": (graph.others_bytes, 0),
        "in_turn": (graph.in_turn, False),
    }
    return {
        "format": FORMAT,
        "meta": graph.meta.to_json(),
        **{name: value for name, (value, default) in optional.items() if value != default},
        "outputs": list(graph.outputs),
        # Tensor and Node have the fields of the format, in its order
        "tensors": [_tensor_to_json(tensor) for tensor in graph.tensors],
        "nodes": [
            {**vars(node), "inputs": list(node.inputs), "outputs": list(node.outputs)}
            for node in graph.nodes
        ],
    }


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    fields = dict(vars(tensor))
    if tensor.copyable:  # the default is not written
        del fields["copyable"]
    return fields


def read_fields(value: object, *, source: str) -> dict[str, Any]:
    """Read the fields of a graph from a dictionary of format graph/2. Unknown fields are ignored,
    except those of a tensor or node that look like a misspelt one.

    Format graph/1 is read too: it has neither `overwrites` nor, in its meta, `rewrites`.

    source: where the dictionary comes from, for error messages.

    Raises FormatError.
    """
    record = Record(value, where=source)
    record.expect_format(FORMAT, *OLDER_FORMATS)
    for kind, items in ((Tensor, record.records("tensors")), (Node, record.records("nodes"))):
        names = [field.name for field in dataclasses.fields(kind)]
        for item in items:
            item.expect_no_misspelling(names)
    tensors = tuple(
        Tensor(
            name=item.string("name"),
            size_bytes=item.integer("size_bytes"),
            kind=item.choice("kind", KINDS),  # type: ignore[arg-type]
            alias_of=item.string("alias_of", default=None),
            copyable=item.boolean("copyable", default=True),
        )
        for item in record.records("tensors")
    )
    if record.string("format") in OLDER_FORMATS:
        meta = Record(record.mapping("meta", default={}), where=f"{source}: meta")
        meta.expect_none_of("rewrites", newer=FORMAT)
        for item in record.records("nodes"):
            item.expect_none_of("overwrites", newer=FORMAT)
    nodes = tuple(
        Node(
            name=item.string("name"),
            op=item.string("op"),
            inputs=item.strings("inputs"),
            outputs=item.strings("outputs"),
            time_s=item.number("time_s"),
            workspace_bytes=item.integer("workspace_bytes", default=0),
            phase=item.choice("phase", PHASES),  # type: ignore[arg-type]
            recomputable=item.boolean("recomputable", default=True),
            module=item.string("module", default=""),
            overwrites=item.string("overwrites", default=None),
        )
        for item in record.records("nodes")
    )
    return {
        "nodes": nodes,
        "tensors": tensors,
        "outputs": record.strings("outputs"),
        "meta": GraphMeta.from_json(record.mapping("meta", default={})),
        "n_in_flight": record.integer("n_in_flight", default=1),
        "host_state_bytes": record.integer("host_state_bytes", default=0),
        "accumulated": record.strings("accumulated", default=[]),
        "others_bytes": record.integer("others_bytes", default=0),
        "in_turn": record.boolean("in_turn", default=False),
    }
