"""A training step as one rank of FSDP2 (`torch.distributed.fsdp.fully_shard`) sees it.

FSDP2 cuts each parameter along its first dimension into equal shards, one for each rank, and
gathers the parameters of a group of modules while they are needed. `sharded` writes that into a
traced step: parameters become shards, and nodes are put in that gather, drop and reduce, in the
order in which the hooks of torch 2.13 (`torch/distributed/fsdp/_fully_shard`) do it with their
default settings:

- *Forward.* Before a group's first operator its shards are gathered into one buffer, and copied
  from there into whole parameters. These are dropped after its last operator; the buffer stays
  until the next group has gathered its own, that of the last group to the end of the forward pass.
  The root keeps its whole parameters to the end of the backward pass.
- *Backward.* When the gradient of a group's output comes, its parameters are gathered again, unless
  that has begun: each group, when it starts, gathers the one that ran before it into a buffer, to
  be copied out when that one starts.
- *After a group's backward* its whole parameters are dropped, its gradients copied into one buffer
  and dropped, and reduced to a shard of them. That buffer stays until the next group reduces. A
  group none of whose inputs takes a gradient does this at the end of the backward pass, as the root
  does.
- What runs again in the backward pass, for a checkpoint inside of a group, finds the whole
  parameters there. A checkpoint around a whole group would call the group's hooks again; the nodes
  put in are not recomputable, so such a region is refused (`solver.regions`).

A schedule of single operators may run an operator again outside of its group's backward, which
FSDP2 cannot; then the whole parameters that it would need are not counted. What
`scheduler_runtime.export` puts into a model runs again inside alone.

Communication takes no time here: overlapped it takes little, and how little depends on the network.
Not modelled: MixedPrecisionPolicy and CPU offload, reshard_after_forward other than the default,
groups of several modules, `set_requires_gradient_sync(False)`, shard placements other than dim 0,
and what NCCL takes by itself, beside torch's allocator. What gloo allocates on the CPU is counted:
a copy of what it gathers, and one of what it reduces.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphs.graph import Graph, Node, Phase, Tensor, is_under
from graphs.sharding import Sharding, ShardingError, shard_rows, sharding_of, sharding_words

GLOO_SCALARS_BYTES = 12
"""gloo divides a sum by the number of ranks, which it makes a tensor of, in two types."""

ROOT = ""
"""The path of the model itself: the group of all parameters that no other group has."""


def sharded(graph: Graph, *, n_ranks: int, groups: Sequence[str], on_cpu: bool = False) -> Graph:
    """The step as one rank sees it; `graph` is as `graphs.trace` made it, without an optimizer.

    groups: paths of modules, in the model's order; the root is added. Those that have no
        parameters of their own, or do not run, change nothing.
    on_cpu: the step runs on the CPU, where gloo talks, and FSDP2 pads rows in a copy.

    Raises ShardingError: a group that runs several times or not in one piece, a parameter that is
    read outside of its group, a graph without the figures of its parameters.

    Cost: linear in the graph, times the number of groups.
    """
    if any(node.phase == "optimizer" for node in graph.nodes):
        raise ShardingError(
            "the graph has an optimizer's step: shard first, then add the optimizer"
        )
    if sharding_of(graph.meta) is not None:
        raise ShardingError(f"the graph is sharded already: {sharding_words(graph.meta)}")
    sharding = Sharding(n_ranks=n_ranks, groups=tuple(groups))
    return _Transform(graph, sharding, on_cpu).run()


@dataclass(frozen=True)
class _Parameter:
    """shard_bytes: of each rank, padding included. gradient: the tensor that holds its whole
    gradient, if it has one. is_even: whether its rows are a multiple of the number of ranks."""

    path: str
    tensor: str
    shard_bytes: int
    gradient: str | None
    is_even: bool


@dataclass(frozen=True)
class _Group:
    """The parameters that are gathered together; shard_bytes and reduced_bytes are of one rank.

    first, last: positions of its first and last forward node, and begins, ends: of its later ones
    (None: the backward pass does not come there). late: whether its gradients are reduced at the
    end of the backward pass.
    """

    path: str
    parameters: tuple[_Parameter, ...]
    first: int
    last: int
    begins: int | None
    ends: int | None
    late: bool

    @property
    def shard_bytes(self) -> int:
        return sum(parameter.shard_bytes for parameter in self.parameters)

    @property
    def reduced_bytes(self) -> int:
        return sum(p.shard_bytes for p in self.parameters if p.gradient is not None)


def _read_parameters(graph: Graph, n_ranks: int) -> list[_Parameter]:
    layout = graph.meta.get("parameter_layout")
    if not isinstance(layout, Mapping) or not layout:
        raise ShardingError(
            "the graph does not say which parameters it has, of which shapes; trace the model again"
        )
    found = []
    for path, entry in layout.items():
        shape = tuple(entry["shape"])
        if not shape:
            raise ShardingError(
                f"parameter {path!r} is a scalar, which FSDP2 does not take; give it the shape [1]"
            )
        n_elements = shard_rows(shape[0], n_ranks) * math.prod(shape[1:])
        found.append(
            _Parameter(
                path=path,
                tensor=entry["tensor"],
                shard_bytes=n_elements * entry["element_bytes"],
                gradient=entry["gradient"],
                is_even=shape[0] % n_ranks == 0,
            )
        )
    return found


class _Groups:
    """Finds out when each group's modules run, forward and backward."""

    def __init__(self, graph: Graph, parameters: Sequence[_Parameter], paths: Sequence[str]):
        self._graph = graph
        self._paths = (ROOT, *dict.fromkeys(path for path in paths if path))
        self._owned: dict[str, list[_Parameter]] = {path: [] for path in self._paths}
        for parameter in parameters:
            inside = [p for p in self._paths if is_under(parameter.path, p)]
            self._owned[max(inside, key=len)].append(parameter)
        self._forward = graph.forward_nodes
        self._later = graph.later_nodes
        self._position = {node.name: i for i, node in enumerate(self._later)}
        self._sums = set(graph.meta.get("gradient_sums", ()))
        self._with_gradient = self._requiring_gradient(parameters)

    def found(self) -> list[_Group]:
        """In the given order, the root first; only those that have parameters and run."""
        groups = [self._group(path) for path in self._paths if self._owned[path]]
        return [group for group in groups if group is not None]

    def _requiring_gradient(self, parameters: Sequence[_Parameter]) -> set[str]:
        """Trained parameters, and what the forward pass makes of them."""
        found = {p.tensor for p in parameters if p.gradient is not None}
        for node in self._forward:
            if not found.isdisjoint(node.inputs):
                found.update(node.outputs)
        return found

    def _group(self, path: str) -> _Group | None:
        owned = self._owned[path]
        if path == ROOT:
            n_later = len(self._later)
            first = next((i for i, n in enumerate(self._later) if n.phase == "backward"), n_later)
            return _Group(
                path, tuple(owned), 0, len(self._forward) - 1, first, n_later - 1, late=True
            )
        inside = [i for i, node in enumerate(self._forward) if is_under(node.module, path)]
        if not inside:
            return None
        self._check(path, inside)
        later = self._later_positions(path)
        made = {n for i in inside for n in self._forward[i].outputs}
        read = {n for i in inside for n in self._forward[i].inputs}
        own = {parameter.tensor for parameter in owned}
        return _Group(
            path=path,
            parameters=tuple(owned),
            first=inside[0],
            last=inside[-1],
            begins=later[0] if later else None,
            ends=self._after_sums(later) if later else None,
            late=not (read - made - own) & self._with_gradient,
        )

    def _check(self, path: str, inside: Sequence[int]) -> None:
        readers: dict[str, list[Node]] = {p.tensor: [] for p in self._owned[path]}
        for node in self._forward:
            for name in dict.fromkeys(node.inputs):
                if name in readers:
                    readers[name].append(node)
        in_pieces = inside[-1] - inside[0] + 1 != len(inside)
        if in_pieces or min(map(len, filter(None, readers.values())), default=1) > 1:
            raise ShardingError(
                f"module {path!r} runs several times in a step, which is not planned for a group "
                "of FSDP2; leave it out of the groups, so that it belongs to the model's own"
            )
        for parameter in self._owned[path]:
            for node in readers[parameter.tensor]:
                if not is_under(node.module, path):
                    raise ShardingError(
                        f"parameter {parameter.path!r} of group {path!r} is read by {node.name!r} "
                        f"in module {node.module!r}, where FSDP2 has only shards of it; leave "
                        f"{path!r} out of the groups, so that it belongs to the model's own"
                    )

    def _later_positions(self, path: str) -> list[int]:
        makers = {
            self._graph.producer[p.gradient].name
            for p in self._owned[path]
            if p.gradient in self._graph.producer
        }
        return [
            i
            for i, node in enumerate(self._later)
            if node.phase == "backward" and (is_under(node.module, path) or node.name in makers)
        ]

    def _after_sums(self, later: Sequence[int]) -> int:
        """Autograd adds up the gradients of a group's inputs before it leaves the group."""
        made = {name for i in later for name in self._later[i].outputs}
        end = later[-1]
        while end + 1 < len(self._later):
            node = self._later[end + 1]
            if node.name not in self._sums or made.isdisjoint(node.inputs):
                break
            made.update(node.outputs)
            end += 1
        return end


@dataclass
class _Transform:
    """Walks through the step as FSDP2's hooks do, and writes down what they allocate.

    _flat: group -> the buffer that it was gathered into, not copied out yet. _whole: group -> its
    whole parameters. _gathered: the last buffer of the forward pass. _reduced: the last buffer that
    gradients were copied into. _order: the groups in the order in which their forward ended.
    """

    graph: Graph
    sharding: Sharding
    on_cpu: bool
    nodes: list[Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    _flat: dict[str, str] = field(default_factory=dict)
    _whole: dict[str, str] = field(default_factory=dict)
    _gathered: str | None = None
    _reduced: str | None = None
    _order: list[_Group] = field(default_factory=list)
    _done: set[str] = field(default_factory=set)

    def run(self) -> Graph:
        graph = self.graph
        parameters = _read_parameters(graph, self.sharding.n_ranks)
        self._groups = _Groups(graph, parameters, self.sharding.groups or ()).found()
        self._accumulated = {t.name for t in graph.resident if t.kind == "gradient"}
        self._forward()
        self._backward()
        whole_gradients = {p.gradient for p in parameters if p.gradient is not None}
        shard_bytes = {p.tensor: p.shard_bytes for p in parameters}
        reduced = [_gradient_name(g) for g in self._groups if g.reduced_bytes]
        resized = tuple(
            dataclasses.replace(t, size_bytes=shard_bytes.get(t.name, t.size_bytes))
            for t in graph.tensors
            if t.name not in self._accumulated
        )
        paths = [group.path for group in self._groups if group.path != ROOT]
        described = {"n_ranks": self.sharding.n_ranks, "groups": paths}
        environment = {**graph.meta.get("environment", {}), "sharding": described}
        outputs = tuple(name for name in graph.outputs if name not in whole_gradients)
        return Graph(
            nodes=tuple(self.nodes),
            tensors=(*resized, *self.tensors),
            outputs=outputs if self._accumulated else (*outputs, *reduced),
            meta={**graph.meta, "environment": environment},
        )

    def _forward(self) -> None:
        for position, node in enumerate(self.graph.forward_nodes):
            for group in self._groups:  # the outer ones come first
                if group.first == position:
                    self._pre_forward(group)
            self.nodes.append(node)
            for group in reversed(self._groups):
                if group.last == position:
                    self._post_forward(group)
        if self._gathered is not None:
            self._put("end of forward", ROOT, "forward", inputs=(self._gathered,))

    def _pre_forward(self, group: _Group) -> None:
        before = () if self._gathered is None else (self._gathered,)
        self._gathered = self._all_gather(group, "forward", before)
        self._unshard(group, "forward", self._gathered)

    def _post_forward(self, group: _Group) -> None:
        self._order.append(group)
        if group.path != ROOT:
            self._put("reshard", group.path, "forward", inputs=(self._whole.pop(group.path),))

    def _backward(self) -> None:
        for position, node in enumerate(self.graph.later_nodes):
            for group in self._groups:
                if group.begins == position:
                    self._pre_backward(group)
            if self._accumulated.isdisjoint(node.inputs) or node.outputs:
                self.nodes.append(node)
            for group in reversed(self._groups):
                if group.ends == position and not group.late:
                    self._post_backward(group)
        for group in self._groups:
            if group.begins is not None and group.path not in self._done:
                self._post_backward(group)
        if self._flat:  # gathered for a group that no gradient reached
            self._put("end of backward", ROOT, "backward", inputs=tuple(self._flat.values()))

    def _pre_backward(self, group: _Group) -> None:
        if group.path not in self._whole:
            if group.path not in self._flat:
                self._flat[group.path] = self._all_gather(group, "backward")
            self._unshard(group, "backward", self._flat.pop(group.path))
        index = self._order.index(group)
        if index > 0:
            before = self._order[index - 1]
            if before.path not in self._whole and before.path not in self._flat:
                self._flat[before.path] = self._all_gather(before, "backward")

    def _post_backward(self, group: _Group) -> None:
        self._done.add(group.path)
        dropped = (self._whole.pop(group.path), *([self._reduced] if self._reduced else []))
        self._reduced = None
        self._put("reshard", group.path, "backward", inputs=dropped)
        trained = [p for p in group.parameters if p.gradient is not None]
        if not trained:
            return
        n_ranks = self.sharding.n_ranks
        size_bytes = group.reduced_bytes
        padded_bytes = sum(p.shard_bytes * n_ranks for p in trained if not p.is_even)
        copied = self._tensor("to be reduced", group, "backward", n_ranks * size_bytes, "buffer")
        self._put(
            "copy in",
            group.path,
            "backward",
            inputs=tuple(p.gradient for p in trained if p.gradient is not None),
            outputs=(copied,),
            workspace_bytes=padded_bytes if self.on_cpu else 0,
        )
        self._reduce_scatter(group, copied)
        self._reduced = copied

    def _reduce_scatter(self, group: _Group, copied: str) -> None:
        name = _gradient_name(group)
        self.tensors.append(Tensor(name, group.reduced_bytes, "gradient"))
        copy_bytes = self.sharding.n_ranks * group.reduced_bytes + GLOO_SCALARS_BYTES
        self._put(
            "reduce scatter",
            group.path,
            "backward",
            inputs=(copied,),
            outputs=(name,),
            workspace_bytes=copy_bytes if self.on_cpu else 0,
        )
        if self._accumulated:
            resident = f"{name}.accumulated"
            self.tensors.append(Tensor(resident, group.reduced_bytes, "gradient"))
            self._put("accumulate", group.path, "backward", inputs=(name, resident))

    def _all_gather(self, group: _Group, phase: Phase, before: tuple[str, ...] = ()) -> str:
        n_bytes = self.sharding.n_ranks * group.shard_bytes
        flat = self._tensor("gathered", group, phase, n_bytes, "buffer")
        shards = tuple(parameter.tensor for parameter in group.parameters)
        self._put(
            "all gather",
            group.path,
            phase,
            inputs=(*shards, *before),
            outputs=(flat,),
            workspace_bytes=n_bytes if self.on_cpu else 0,
        )
        return flat

    def _unshard(self, group: _Group, phase: Phase, flat: str) -> None:
        n_bytes = self.sharding.n_ranks * group.shard_bytes
        whole = self._tensor("whole parameters", group, phase, n_bytes, "parameter")
        self._put("copy out", group.path, phase, inputs=(flat,), outputs=(whole,))
        self._whole[group.path] = whole

    def _tensor(self, what: str, group: _Group, phase: Phase, size_bytes: int, kind: Any) -> str:
        name = f"fsdp: {what}, {phase} ({group.path})"
        self.tensors.append(Tensor(name, size_bytes, kind))
        return name

    def _put(
        self,
        what: str,
        path: str,
        phase: Phase,
        *,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...] = (),
        workspace_bytes: int = 0,
    ) -> None:
        self.nodes.append(
            Node(
                name=f"fsdp: {what}, {phase} ({path})",
                op=f"fsdp.{what.replace(' ', '_')}",
                inputs=inputs,
                outputs=outputs,
                time_s=0.0,
                workspace_bytes=workspace_bytes,
                phase=phase,
                recomputable=False,
                module=path.rpartition(".")[0],  # around the group's module, as its hooks are
            )
        )


def _gradient_name(group: _Group) -> str:
    return f"fsdp: shards of gradients ({group.path})"
