"""Which rewrites there are, and which are planned for the user's word. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphs.graph import Graph

if TYPE_CHECKING:
    from graphs.capture import Capture, Layout

Variant = tuple[str, ...]
"""Names of rewrites, in the order of REWRITES; () is the plain step."""

Rewrite = Callable[["Capture", "Layout", Callable[[Any], Any]], "Layout"]
"""A pass: (captured, layout, cost of an fx node) -> the layout with its changes, a new object.

What is captured is shared by all variants and must not be changed.
"""

PROGRAM_REWRITES = ("chunked_loss", "chunked_loss_backward")
"""Each is the name of a module in this folder, whose function `rewrite_program` changes a Capture
before it becomes a layout; a variant has one of them at most."""

REWRITES: tuple[str, ...] = (*PROGRAM_REWRITES, "in_place")
"""Each of the others is the name of a module whose function `rewrite` is the pass."""

WORDS = ("bitwise", "allclose", "none")
"""What a plan may do to the results: keep every bit; change last bits (sums in another order); and
"none": nothing is rewritten."""


@dataclass(frozen=True)
class Variants:
    """One training step as several programs that have the same results.

    plain: the step as the framework runs it without a plan.
    planned: the programs to plan; at least one, and `plain` may be among them.
    """

    plain: Graph
    planned: tuple[Graph, ...]

    @classmethod
    def of(cls, step: Graph | Variants) -> Variants:
        """A graph alone is its only variant."""
        return step if isinstance(step, Variants) else cls(_not_in_place(step), (step,))


def _not_in_place(graph: Graph) -> Graph:
    """The step in which every output has memory of its own; the graph itself if it is that step."""
    if not any(node.overwrites for node in graph.nodes):
        return graph
    owner: dict[str, str] = {}  # overwritten storage -> the tensor that is there now
    alias: dict[str, str | None] = {tensor.name: tensor.alias_of for tensor in graph.tensors}
    for node in graph.nodes:
        for name in node.outputs:
            root = graph.root(name)
            if node.overwrites is not None:
                owner[root], alias[name] = name, None
            elif root in owner:
                alias[name] = owner[root]
    rewrites = [name for name in graph.meta.rewrites if name != "in_place"]
    return replace(
        graph,
        nodes=tuple(replace(node, overwrites=None) for node in graph.nodes),
        tensors=tuple(replace(tensor, alias_of=alias[tensor.name]) for tensor in graph.tensors),
        meta=replace(graph.meta, rewrites=rewrites),
    )


def check_word(word: str) -> str:
    """The word itself; raises ValueError for any other than WORDS."""
    if word not in WORDS:
        raise ValueError(
            f"rewrites is {word!r}; 'bitwise' (every bit of the results stays), 'allclose' (last "
            "bits may change) or 'none'"
        )
    return word


def variants_of(word: str, *, sharded: bool = False) -> tuple[Variant, ...]:
    """The variants to plan for a word of WORDS.

    There is no rewrite that changes last bits yet: "allclose" is "bitwise".
    sharded: the step of one rank of FSDP2, which stock checkpointing runs: the plain step alone.
    """
    if check_word(word) == "none" or sharded:
        return ((),)
    in_place = ("in_place",)
    chunked = (("chunked_loss_backward", *in_place), ("chunked_loss", *in_place))
    return ((), in_place, *chunked)


def offered(
    traced: Sequence[tuple[Graph, Capture]],
    planned: Sequence[Variant],
    *,
    runs_here: bool = False,
) -> Variants:
    """The step and those variants of it that keep all bits on the device, each once.

    traced: graph and program of the plain step, then of others. Where the device that is planned
    for is not here, nothing is tried, unless the step will run here all the same (runs_here).
    """
    from graphs.rewrites.probe import keeps_bits  # here: it takes torch

    costs = {} if runs_here else traced[0][0].meta.costs
    tried = {
        tuple(graph.meta.rewrites): keeps_bits(program.graph, costs) for graph, program in traced
    }
    failed = {name for variant, keeps in tried.items() if not keeps for name in variant}
    refused = sorted(failed.intersection(PROGRAM_REWRITES))
    graphs = [
        replace(graph, meta=replace(graph.meta, refused_rewrites=refused)) for graph, _ in traced
    ]
    found = {  # a rewrite that finds nothing to change makes no other graph
        graph.graph_id: graph
        for graph in reversed(graphs)
        if (variant := tuple(graph.meta.rewrites)) in planned and tried[variant]
    }
    return Variants(graphs[0], tuple(reversed(found.values())))


def keeps_bits_here(program: Capture) -> bool:
    """Whether a program in row chunks has all bits of the plain step on this device; tried once."""
    from graphs.rewrites.probe import keeps_bits  # here: it takes torch

    return keeps_bits(program.graph, {})


def program_with(captured: Capture, rewrites: Sequence[str]) -> Capture:
    """The program after those of PROGRAM_REWRITES; the one that is given does not change."""
    for name in PROGRAM_REWRITES:
        if name in rewrites:
            captured = captured.copy()
            importlib.import_module(f"graphs.rewrites.{name}").rewrite_program(captured)
    return captured


def rewritten(
    captured: Capture, layout: Layout, rewrites: Sequence[str], *, cost: Callable[[Any], Any]
) -> Layout:
    """The layout after these rewrites. Raises ValueError for one that does not exist."""
    unknown = [name for name in rewrites if name not in REWRITES]
    if unknown:
        known = ", ".join(REWRITES) or "none"
        raise ValueError(f"there is no rewrite {unknown[0]!r}; there are: {known}")
    for name in REWRITES:
        if name in rewrites and name not in PROGRAM_REWRITES:
            apply: Rewrite = importlib.import_module(f"graphs.rewrites.{name}").rewrite
            layout = apply(captured, layout, cost)
    return layout
