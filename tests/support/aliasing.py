"""Tiny random graphs in which nodes make several tensors and tensors share storages.

`random_dag` (`tests.support.synthetic_graphs`) makes such nodes only now and then, and only small
whole sizes. Here half of the nodes make two or three outputs. An output may share the storage of
another output or of an older tensor, whether the node reads that or not, and at no cost like a view
or at a cost like an op that overwrites it. Sizes and times within a graph may differ by orders of
magnitude.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from graphs.graph import Graph, Node, Phase, Tensor

SIZES_BYTES: Sequence[Sequence[int]] = (
    (0, 1, 2, 3, 5, 7),
    (0, 4, 8, 16, 100),
    (0, 1, 1000, 1001, 10**6, 10**6 + 3, 123_456_789, 10**9),
    (1, 2, 5, 10**12, 10**12 + 1, 3 * 10**12 - 1, 2**50, 2**58),
)
TIMES_S: Sequence[Sequence[float]] = (
    (0.0, 1.0, 1.0, 2.0, 3.0, 5.0),
    (1e-6, 3.3e-5, 2e-4, 2.145e-4, 1e-3),
    (0.0, 1e-9, 1e-6, 1.0, 1000.0),
)
MOST_TENSORS = 9
"""How many tensors nodes may make: brute force then needs up to 2**9 states per node."""


def aliasing_dag(seed: int) -> Graph:
    """A graph of three to nine nodes; the same seed gives the same graph."""
    rng = random.Random(f"aliasing {seed}")
    sizes_bytes, times_s = rng.choice(SIZES_BYTES), rng.choice(TIMES_S)
    n_forward, n_later = rng.randint(2, 6), rng.randint(1, 4)
    tensors = [Tensor("p", rng.choice(sizes_bytes[:3]), "parameter")]
    nodes: list[Node] = []
    for i in range(n_forward + n_later):
        made: list[Tensor] = []
        for j in range(rng.choice((1, 1, 2, 2, 3))):
            if len(tensors) + len(made) <= MOST_TENSORS:
                made.append(_tensor(rng, f"t{i}.{j}", tensors, made, sizes_bytes))
        if not made:
            break
        inputs = _inputs(rng, tensors, made)
        phase: Phase = "forward" if i < n_forward else "backward"
        nodes.append(
            Node(
                name=f"n{i}",
                op="op",
                inputs=inputs,
                outputs=tuple(tensor.name for tensor in made),
                time_s=0.0 if _is_view(made) and rng.random() < 0.7 else rng.choice(times_s),
                workspace_bytes=rng.choice((0, 0, 0, *sizes_bytes)),
                phase=phase,
                recomputable=rng.random() < 0.9,
            )
        )
        tensors += made
    names = [name for node in nodes for name in node.outputs]
    outputs = {name for name in names if rng.random() < 0.2} | {names[-1]}
    return Graph(tuple(nodes), tuple(tensors), tuple(sorted(outputs)))


def _tensor(
    rng: random.Random,
    name: str,
    older: Sequence[Tensor],
    siblings: Sequence[Tensor],
    sizes_bytes: Sequence[int],
) -> Tensor:
    """A tensor with its own storage, or an alias: of a sibling if there is one, else of an older
    tensor."""
    if rng.random() < 0.3:
        of = rng.choice(siblings or older)
        return Tensor(name, of.size_bytes, alias_of=of.alias_of or of.name)
    return Tensor(name, rng.choice(sizes_bytes))


def _is_view(made: Sequence[Tensor]) -> bool:
    own = {tensor.name for tensor in made}
    return all(t.alias_of is not None and t.alias_of not in own for t in made)


def _inputs(
    rng: random.Random, tensors: Sequence[Tensor], made: Sequence[Tensor]
) -> tuple[str, ...]:
    """Up to three tensors, mostly recent ones, and in most cases those on the storages of which the
    outputs are aliases."""
    chosen = rng.choices(tensors[-4:], k=rng.randint(0, 2)) + rng.choices(tensors)
    roots = {tensor.alias_of for tensor in made} - {tensor.name for tensor in made}
    chosen += [t for t in tensors if (t.alias_of or t.name) in roots and rng.random() < 0.8]
    return tuple(dict.fromkeys(tensor.name for tensor in chosen))
