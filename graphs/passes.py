"""A step that calls the model several times before one backward pass, as contrastive losses and DPO
do, or a discriminator on real and generated samples.

    solve(model, batch, budget="16GB", passes=2)

The passes are in flight like micro-batches of a pipeline: each holds what its forward pass saved
until its own backward pass; the plan decides how much that is (`Graph.n_in_flight`). Autograd holds
the sum of the gradients until the last pass has added its own (`Graph.accumulated`). The plan has
no influence on the following, which become resident tensors of the graph:

- for each pass but one: its inputs, and the random states that it keeps;
- for each pass but one, of a loss outside of the model: the most bytes of its tensors that are live
  at once, including the gradients of the model's outputs;
- if gradients exist before the step: these once more, since autograd sums the gradients of the
  passes in separate tensors.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphs.graph import RANDOM_STATE, Graph, Kind, Tensor

_PREFIX = "passes."


class PassesError(ValueError):
    """The given number of passes cannot be planned; the message says what would be right."""


@dataclass(frozen=True)
class Passes:
    """How many forward passes a step has.

    n: forward passes that wait for one common backward pass.
    accumulate: whether gradients exist before the step.

    Raises PassesError unless n is a whole number of at least 1.
    """

    n: int
    accumulate: bool = False

    @property
    def words(self) -> str:
        """For reports: "2 forward passes wait for one backward pass"."""
        return f"{self.n} forward passes wait for one backward pass"

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise PassesError(
                f"passes is {self.n!r}; give a whole number of at least 1, the forward passes "
                "before one backward pass"
            )


def passes_of(environment: Mapping[str, Any]) -> Passes:
    """The passes recorded in the environment of a graph or plan; one pass if none are recorded.

    Raises PassesError for a malformed record.
    """
    found = environment.get("passes")
    if found is None:
        return Passes(1)
    if not isinstance(found, Mapping) or not {"n"} <= found.keys() <= {"n", "accumulate"}:
        raise PassesError(f"passes is {found!r:.80}; expected the fields of Passes")
    return Passes(**found)


def with_passes(
    graph: Graph, passes: Passes, *, others_bytes: int = 0, loss_bytes: int | None = None
) -> Graph:
    """The step of one pass, plus the other passes in flight and the memory they take.

    graph: the step of one pass, traced with gradients `OF_PASSES`. Returned unchanged if there is
        only one pass.
    others_bytes: as in `Graph`.
    loss_bytes: bytes that a loss outside of the model takes for each other pass (None: as many as
        for this one).
    """
    if passes.n == 1:
        return graph
    added = tuple(
        Tensor(f"{_PREFIX}{name}", size_bytes, kind)
        for name, size_bytes, kind in _added_tensors(graph, passes, loss_bytes)
        if size_bytes
    )
    meta = graph.meta.with_environment(passes=dataclasses.asdict(passes))
    return dataclasses.replace(
        graph,
        tensors=(*graph.tensors, *added),
        meta=meta,
        n_in_flight=passes.n,
        others_bytes=others_bytes,
    )


def _added_tensors(
    graph: Graph, passes: Passes, loss_bytes: int | None
) -> Iterator[tuple[str, int, Kind]]:
    """Name, bytes and kind of each resident tensor that stands for the other passes."""
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
    """The most bytes that are live at once of what the nodes of the loss outside of the model make.

    What a backward node reads later, and outputs of the graph, stay live to the end of the loss.
    """
    outside = [node for node in graph.later_nodes if node.phase == "outside"]
    last = {name: at for at, node in enumerate(outside) for name in (*node.inputs, *node.outputs)}
    read_later = {
        name for node in graph.later_nodes if node.phase == "backward" for name in node.inputs
    }
    change: Counter[int] = Counter()  # position -> bytes that become live there, less those freed
    for at, node in enumerate(outside):
        for name in node.outputs:
            tensor = graph.tensor_by_name[name]
            if tensor.alias_of is None:
                change[at] += tensor.size_bytes
                if name not in read_later and name not in graph.outputs:
                    change[last[name] + 1] -= tensor.size_bytes
    live_bytes = peak_bytes = 0
    for at in range(len(outside)):
        live_bytes += change[at]
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes
