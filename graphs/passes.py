"""A step in which the model is called several times before one backward pass, as in contrastive
losses, DPO, or a discriminator on real and generated samples.

    solve(model, batch, budget="16GB", passes=2)

The passes are in flight like micro-batches of a pipeline: until its own backward pass each holds
what its forward pass saved, which the plan decides (`Graph.n_in_flight`). Autograd holds the sum of
the gradients until the last pass has added its own (`Graph.accumulated`). What else is there,
whatever the plan, are resident tensors, for each pass but one:

- its inputs, and the states of its random numbers;
- of a loss outside of the model, the most that it makes at once: gradients of the outputs too;
- with gradients from before the step, these: the sum over the passes is another tensor.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphs.graph import RANDOM_STATE, Graph, Kind, Tensor

_BESIDE = "passes."


class PassesError(ValueError):
    """Not a number of passes that can be planned; says what would be right."""


@dataclass(frozen=True)
class Passes:
    """n: forward passes that wait for one backward pass together.

    accumulate: whether gradients exist before the step.

    Raises PassesError.
    """

    n: int
    accumulate: bool = False

    @property
    def words(self) -> str:
        """ "2 forward passes wait for one backward pass"."""
        return f"{self.n} forward passes wait for one backward pass"

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise PassesError(
                f"passes is {self.n!r}; give a whole number of at least 1, the forward passes "
                "before one backward pass"
            )


def passes_of(environment: Mapping[str, Any]) -> Passes:
    """Those of the environment of a graph or plan. Raises PassesError."""
    found = environment.get("passes")
    if found is None:
        return Passes(1)
    if not isinstance(found, Mapping) or not {"n"} <= found.keys() <= {"n", "accumulate"}:
        raise PassesError(f"passes is {found!r:.80}; expected the fields of Passes")
    return Passes(**found)


def with_passes(
    graph: Graph, passes: Passes, *, others_bytes: int = 0, loss_bytes: int | None = None
) -> Graph:
    """The whole step of one pass, with the others in flight and what stands beside them.

    graph: traced with gradients `OF_PASSES`; of a single pass it is returned unchanged.
    others_bytes: as in `Graph`.
    loss_bytes: what a loss outside makes for each of the others (None: as much as for this one).
    """
    if passes.n == 1:
        return graph
    beside = tuple(
        Tensor(f"{_BESIDE}{name}", size_bytes, kind)
        for name, size_bytes, kind in _beside(graph, passes, loss_bytes)
        if size_bytes
    )
    meta = graph.meta.with_environment(passes=dataclasses.asdict(passes))
    return dataclasses.replace(
        graph,
        tensors=(*graph.tensors, *beside),
        meta=meta,
        n_in_flight=passes.n,
        others_bytes=others_bytes,
    )


def _beside(
    graph: Graph, passes: Passes, loss_bytes: int | None
) -> Iterator[tuple[str, int, Kind]]:
    """Name, bytes and kind of what is resident beside the step of one pass."""
    n_others = passes.n - 1
    inputs = (t for t in graph.resident if t.kind == "input" and t.alias_of is None)
    yield "inputs", n_others * sum(tensor.size_bytes for tensor in inputs), "input"
    state = graph.tensor_by_name.get(RANDOM_STATE)
    if state is not None:
        yield "random_states", n_others * state.size_bytes, "buffer"
    if loss_bytes is None:
        loss_bytes = _loss_bytes(graph)
    yield "losses", n_others * loss_bytes, "output"
    if passes.accumulate:
        sizes = (graph.tensor_by_name[name].size_bytes for name in graph.accumulated)
        yield "existing_gradients", sum(sizes), "gradient"


def _loss_bytes(graph: Graph) -> int:
    """The most bytes of what nodes outside of the model make that are live at once."""
    outside = [node for node in graph.later_nodes if node.phase == "outside"]
    last = {name: at for at, node in enumerate(outside) for name in (*node.inputs, *node.outputs)}
    read_later = {
        name for node in graph.later_nodes if node.phase == "backward" for name in node.inputs
    }
    change: Counter[int] = Counter()
    for at, node in enumerate(outside):
        for name in node.outputs:
            tensor = graph.tensor_by_name[name]
            if tensor.alias_of is None:
                change[at] += tensor.size_bytes
                if name not in read_later and name not in graph.outputs:
                    change[last[name] + 1] -= tensor.size_bytes
    now = most = 0
    for at in range(len(outside)):
        now += change[at]
        most = max(most, now)
    return most
