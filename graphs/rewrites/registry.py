"""The variants of a step, and the functions that make them. Imports torch only in these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphs.graph import Graph
from graphs.host_state import with_state_on_device
from graphs.rewrites.names import PROGRAM_REWRITES, REWRITES, Variant

if TYPE_CHECKING:
    from graphs.capture import Capture, KeptCapture, Layout


class StockVariants:
    """Further variants, which a step of stock modules can have; made on first access.

    Copying or pickling gives an object without variants.
    """

    def __init__(self, make: Callable[[], tuple[Graph, ...]]) -> None:
        self._make = make

    @functools.cached_property
    def graphs(self) -> tuple[Graph, ...]:
        return self._make()

    def __reduce__(self) -> tuple[Any, ...]:
        return StockVariants, (tuple,)


@dataclass(frozen=True)
class Variants:
    """One training step as several programs with the same results.

    plain: the step as the framework runs it without a plan.
    planned: the programs to plan; at least one, and `plain` may be among them.
    kept: the traced program, for `apply` in this process (None: `apply` traces again).
    stock: variants of stock modules, for exports in this process (None: there are none besides the
        planned ones, or they are not known).
    """

    plain: Graph
    planned: tuple[Graph, ...]
    kept: KeptCapture | None = field(default=None, repr=False, compare=False)
    stock: StockVariants | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, step: Graph | Variants) -> Variants:
        """The variants of a step. A single graph is the only one to plan; its plain step is the
        same without in-place rewrites and with the optimizer's state on the device."""
        if isinstance(step, Variants):
            return step
        return cls(with_state_on_device(_without_overwrites(step)), (step,))


def _without_overwrites(graph: Graph) -> Graph:
    """The step without `Node.overwrites`: each output that overwrote an input gets memory of its
    own. The graph itself if no node overwrites."""
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
    rewrites = [name for name in graph.meta.rewrites if name not in ("in_place", "loss_in_place")]
    return replace(
        graph,
        nodes=tuple(replace(node, overwrites=None) for node in graph.nodes),
        tensors=tuple(replace(tensor, alias_of=alias[tensor.name]) for tensor in graph.tensors),
        meta=replace(graph.meta, rewrites=rewrites),
    )


def allowed_variants(
    traced: Sequence[tuple[Graph, Capture]],
    planned: Sequence[Variant],
    *,
    runs_here: bool = False,
) -> Variants:
    """The plain step, and those of the traced variants that may be planned: those that keep all
    bits on the device, each once.

    traced: graph and program of the plain step, then of the other variants.
    planned: the variants that the user's word allows.
    runs_here: whether the step will run on this machine even if it was traced for another device.
        Otherwise, if the device is not here, nothing is tried and all variants are offered.
    """
    from graphs.rewrites.probe import keeps_bits  # here: it takes torch

    costs = {} if runs_here else traced[0][0].meta.costs
    keeps_by_variant = {
        tuple(graph.meta.rewrites): keeps_bits(program.graph, costs) for graph, program in traced
    }
    failed = {name for variant, keeps in keeps_by_variant.items() if not keeps for name in variant}
    refused = sorted(failed.intersection(PROGRAM_REWRITES))
    graphs = [
        replace(graph, meta=replace(graph.meta, refused_rewrites=refused)) for graph, _ in traced
    ]
    # by graph_id, since a variant whose rewrites find nothing to change has the same graph
    allowed = {
        graph.graph_id: graph
        for graph in reversed(graphs)
        if (variant := tuple(graph.meta.rewrites)) in planned and keeps_by_variant[variant]
    }
    return Variants(graphs[0], tuple(reversed(allowed.values())))


def keeps_bits_here(program: Capture) -> bool:
    """Whether a program with row chunks gives all bits of the plain step on this device, as tried
    once."""
    from graphs.rewrites.probe import keeps_bits  # here: it takes torch

    return keeps_bits(program.graph, {})


def program_with(captured: Capture, rewrites: Sequence[str]) -> Capture:
    """The program after those of the rewrites that are in PROGRAM_REWRITES: a new one, or the same
    object if nothing changes."""
    from graphs.rewrites.passes import PROGRAM_PASSES  # here: it takes torch

    for name, rewrite in PROGRAM_PASSES.items():
        if name in rewrites:
            changed = captured.copy()
            captured = changed if rewrite(changed) else captured
    return captured


def with_writes_in_place(captured: Capture, rewrites: Sequence[str]) -> Capture:
    """The program with the writes into parts of tensors that "in_place" can do in place: a new one,
    or the same object if nothing changes."""
    from graphs.rewrites.scratch import with_direct_writes  # here: it takes torch

    return with_direct_writes(captured) if "in_place" in rewrites else captured


def losses_in_chunks(layout: Layout) -> list[dict[str, Any]]:
    """`GraphMeta.called_losses` of a rewritten step."""
    from graphs.rewrites.called_losses import loss_descriptions  # here: it takes torch

    return loss_descriptions(layout)


def rewritten(layout: Layout, rewrites: Sequence[str]) -> Layout:
    """The layout after those of the rewrites that change layouts. Raises ValueError for an unknown
    rewrite."""
    from graphs.rewrites.passes import LAYOUT_PASSES  # here: it takes torch

    unknown = [name for name in rewrites if name not in REWRITES]
    if unknown:
        raise ValueError(f"there is no rewrite {unknown[0]!r}; there are: {', '.join(REWRITES)}")
    for name, rewrite in LAYOUT_PASSES.items():
        layout = rewrite(layout) if name in rewrites else layout
    return layout
