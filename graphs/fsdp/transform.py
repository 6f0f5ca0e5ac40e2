"""A training step as one rank of FSDP2 (`torch.distributed.fsdp.fully_shard`) runs it.

FSDP2 splits each parameter along its first dimension into equal shards, one per rank, and gathers
the parameters of a group (those of a module) while they are needed. `sharded` adds that to a traced
step: parameters become shards, and nodes are inserted that gather, free and reduce, in the order of
the hooks of torch 2.13 (`torch/distributed/fsdp/_fully_shard`) with their default settings, and
where they differ (`accumulates_in_reduce_dtype`) in that of torch 2.15:

- *Forward.* Before a group's first operator its shards are all-gathered into one buffer, and copied
  from there into whole parameters, which are freed after its last operator. The buffer is freed
  when the next group has gathered its own, that of the last group at the end of the forward pass.
  The root keeps its whole parameters to the end of the backward pass.
- *Backward.* When the gradient of a group's output arrives, its parameters are gathered again,
  unless they have been prefetched: each group, when it starts, prefetches the group that ran before
  it in the forward pass into a buffer, which is copied out when that group starts.
- *After a group's backward* its whole parameters are freed, its gradients copied into one buffer
  and freed, and reduce-scattered to a shard. That buffer is freed when the next group reduces. A
  group none of whose inputs gets a gradient does this at the end of the backward pass, as the root
  does.
- *Whole gradients that accumulate* (`Sharding.accumulates_whole`). Before the last backward pass
  nothing is reduced; in the last one, each group's sum is freed once it is reduced. One graph
  stands for both kinds of passes: at each moment it takes as much as the larger of the two.
- *Mixed precision.* With a policy, the traced step computes in its param_dtype (`graphs.trace`):
  shards are cast before they are gathered, gradients are reduced in its reduce_dtype, and their
  shards are cast to the parameters' dtype.
- *Checkpoints.* When a checkpoint inside of a group recomputes, the group's parameters are whole. A
  checkpoint around a whole group would call the group's hooks again; the inserted nodes are not
  recomputable, so such a region is refused (`solver.module_checkpointing.regions`).

A schedule of single operators may recompute an operator outside of its group's backward, which
FSDP2 cannot do; the whole parameters that it would need are then not counted. Exported plans
(`to_torch_checkpoint`) recompute only inside of groups.

If a module is distributed over tensor-parallel ranks, FSDP2 shards the part of each parameter that
a rank has. Gradients that DTensor leaves as partial sums are summed over these ranks before they
are copied into the buffer.

With `Sharding.link`, the time that a rank waits for communication is counted
(`graphs.fsdp.communication`); without it, communication takes no time. Not modelled: CPU offload,
reshard_after_forward as a number of ranks, groups of several modules, shard placements other than
dim 0, and memory that NCCL allocates outside of torch's allocator. What gloo allocates on the CPU
is counted: a copy of what it gathers, and one of what it reduces.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graphs.fsdp.cast_gradients import with_cast_gradients
from graphs.fsdp.communication import with_waits
from graphs.fsdp.groups import ROOT, Group, GroupFinder, ShardedParameter, read_parameters
from graphs.fsdp.spec import (
    Sharding,
    ShardingError,
    accumulates_in_reduce_dtype,
    check_unsharded,
)
from graphs.graph import Graph, Node, Phase, Tensor
from graphs.hardware import Link, all_reduce_s, link_named

GLOO_SCALARS_BYTES = 12
"""gloo divides a sum by the number of ranks, for which it allocates scalars in two dtypes."""


def sharded(graph: Graph, sharding: Sharding, *, on_cpu: bool = False) -> Graph:
    """The step as one rank of FSDP2 runs it.

    graph: a traced step without an optimizer.
    sharding: with its groups named, in the model's order; the root is added. Groups without
        parameters of their own, and those that do not run, have no effect.
    on_cpu: whether the step runs on the CPU, where gloo communicates and FSDP2 pads rows in a copy.

    Raises ShardingError for a group that runs several times or not in one piece, a parameter that
    is read outside of its group, and a graph without `parameter_layout`.

    Cost: linear in the graph, times the number of groups.
    """
    check_unsharded(graph)
    transform = Transform(graph, sharding, on_cpu)
    step, link = transform.run(), transform.link
    return step if link is None else with_waits(step, sharding, link)


@dataclass
class Transform:
    """Goes through the step as FSDP2's hooks do, and inserts nodes for what they allocate.

    nodes, tensors: those of the new graph so far (tensors: only the added ones).
    _gather_buffer: path of a group -> the buffer that it was gathered into, until it is copied out.
    _whole: path of a group -> its whole parameters, while they exist.
    _last_gathered: the last buffer of the forward pass.
    _last_reduced: the last buffer that gradients were copied into.
    _all_reduced: with replicas, reduced buffers that are not the gradients themselves, which are
        held to the end of the backward pass.
    _sums: path of a parameter -> the sum of its whole gradients, if these accumulate.
    _added_when_read: whole gradient -> its parameter, if autograd itself adds it to the sum.
    _added: paths of the parameters whose gradients have been added to their sums.
    _freed_bytes: bytes of the sums that the last backward pass has reduced, less what it holds in
        their place.
    _by_forward_end: the groups in the order in which their forward ended.
    _finished: paths of the groups whose backward has ended.
    """

    graph: Graph
    sharding: Sharding
    on_cpu: bool
    nodes: list[Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    _gather_buffer: dict[str, str] = field(default_factory=dict)
    _whole: dict[str, str] = field(default_factory=dict)
    _last_gathered: str | None = None
    _last_reduced: tuple[str, ...] = ()
    _all_reduced: list[str] = field(default_factory=list)
    _sums: dict[str, str] = field(default_factory=dict)
    _added_when_read: dict[str, ShardedParameter] = field(default_factory=dict)
    _freed_bytes: int = 0
    _added: set[str] = field(default_factory=set)
    _by_forward_end: list[Group] = field(default_factory=list)
    _finished: set[str] = field(default_factory=set)

    @property
    def link(self) -> Link | None:
        return None if self.sharding.link is None else link_named(self.sharding.link)

    def run(self) -> Graph:
        """The sharded step."""
        policy = self.sharding.mp_policy
        reduce_dtype = None if policy is None else policy.reduce_dtype
        parameters = read_parameters(self.graph, self.sharding.n_ranks, reduce_dtype=reduce_dtype)
        self._casts_in_autograd = accumulates_in_reduce_dtype(self.graph.meta.environment)
        if self._casts_in_autograd and not self.sharding.accumulates_whole:
            self.graph, parameters = with_cast_gradients(self.graph, parameters)
        graph = self.graph
        self._groups = GroupFinder(graph, parameters, self.sharding.groups or ()).groups()
        self._accumulated = {t.name for t in graph.resident if t.kind == "gradient"}
        if self.sharding.accumulates_whole and not self._accumulated:
            raise ShardingError(
                "accumulates_whole: no gradients exist when the step starts; "
                'give gradients="accumulate"'
            )
        if self.sharding.accumulates_whole:
            self._make_sums()
        self._forward()
        self._backward()
        whole_gradients = {p.gradient for p in parameters if p.gradient is not None}
        shard_bytes = {p.tensor: p.stored_bytes for p in parameters}
        reduced = [_gradient_name(g) for g in self._groups if g.trained]
        resized = tuple(
            dataclasses.replace(t, size_bytes=shard_bytes.get(t.name, t.size_bytes))
            for t in graph.tensors
            if t.name not in self._accumulated
        )
        paths = [group.path for group in self._groups if group.path != ROOT]
        described = {**dataclasses.asdict(self.sharding), "groups": paths}
        outputs = tuple(name for name in graph.outputs if name not in whole_gradients)
        return Graph(
            nodes=tuple(self.nodes),
            tensors=(*resized, *self.tensors),
            outputs=outputs if self._accumulated else (*outputs, *reduced),
            meta=graph.meta.with_environment(sharding=described),
        )

    def _forward(self) -> None:
        for position, node in enumerate(self.graph.forward_nodes):
            for group in self._groups:  # outer groups come first
                if group.first_forward == position:
                    before = () if self._last_gathered is None else (self._last_gathered,)
                    self._last_gathered = self._all_gather(group, "forward", before)
                    self._unshard(group, "forward", self._last_gathered)
            self.nodes.append(node)
            for group in reversed(self._groups):
                if group.last_forward == position:
                    self._by_forward_end.append(group)
                    if group.path != ROOT and self.sharding.reshard_after_forward is not False:
                        whole = self._whole.pop(group.path)
                        self._add_node("reshard", group.path, "forward", inputs=(whole,))
        if self._last_gathered is not None:
            self._add_node("end of forward", ROOT, "forward", inputs=(self._last_gathered,))

    def _backward(self) -> None:
        for position, node in enumerate(self.graph.later_nodes):
            for group in self._groups:
                if group.first_backward == position:
                    if group.path not in self._whole:
                        if group.path not in self._gather_buffer:
                            self._gather_buffer[group.path] = self._all_gather(group, "backward")
                        self._unshard(group, "backward", self._gather_buffer.pop(group.path))
                    # prefetch the group whose forward ended before this one's
                    before = self._by_forward_end[max(0, self._by_forward_end.index(group) - 1)]
                    if before.path not in self._whole and before.path not in self._gather_buffer:
                        self._gather_buffer[before.path] = self._all_gather(before, "backward")
            self._add_later_node(node)
            for group in reversed(self._groups):
                if group.last_backward == position and not group.is_reduced_at_end:
                    self._post_backward(group)
        for group in self._groups:
            if group.first_backward is not None and group.path not in self._finished:
                self._post_backward(group)
        # also frees buffers that were gathered for groups which no gradient reached
        if held := (*self._gather_buffer.values(), *self._all_reduced):
            self._add_node("end of backward", ROOT, "backward", inputs=held)

    def _add_later_node(self, node: Node) -> None:
        """Put a later node of the traced step. A node that accumulates a gradient is replaced: by
        one that adds the whole gradient to its sum if whole gradients accumulate, else by none."""
        if self._accumulated.isdisjoint(node.inputs) or node.outputs:
            self.nodes.append(node)
            return
        for name in node.inputs:
            parameter = self._added_when_read.get(name)
            if parameter is not None and parameter.path not in self._added:
                self._add_to_sum(parameter)

    def _make_sums(self) -> None:
        """Create the sums of whole gradients. Before torch 2.15, autograd itself adds gradients to
        their sums only if both have the same dtype."""
        for parameter in (p for group in self._groups for p in group.trained):
            assert parameter.gradient is not None
            whole_bytes = self.graph.tensor_by_name[parameter.gradient].size_bytes
            sum_bytes = whole_bytes * parameter.reduced_bytes // parameter.gathered_bytes
            name = self._sums[parameter.path] = f"fsdp: sum of gradients ({parameter.path})"
            # once it is reduced, the shard of the gradient takes its place
            size_bytes = max(sum_bytes, parameter.stored_bytes)
            self.tensors.append(Tensor(name, size_bytes, "gradient"))
            if sum_bytes == whole_bytes or self._casts_in_autograd:
                self._added_when_read[parameter.gradient] = parameter

    def _add_to_sum(self, parameter: ShardedParameter) -> None:
        """Put a node that adds the whole gradient to its sum."""
        assert parameter.gradient is not None
        sum_of = self._sums[parameter.path]
        # on the CPU, a gradient of another dtype is converted in a copy first; autograd makes one
        # on every device for a sum that is smaller
        is_cast = parameter.reduced_bytes != parameter.gathered_bytes
        copy_bytes = self.sharding.n_ranks * parameter.reduced_bytes if is_cast else 0
        is_smaller = self._casts_in_autograd and parameter.reduced_bytes < parameter.gathered_bytes
        by_device = (0, copy_bytes) if is_smaller else (copy_bytes, 0)
        read = (parameter.gradient, sum_of)
        self._add_node("add gradient", parameter.path, "backward", read, (), *by_device)
        self._added.add(parameter.path)

    def _gradients_to_reduce(self, trained: Sequence[ShardedParameter]) -> tuple[str, ...]:
        """The whole gradients of these parameters, or the sums that they have been added to."""
        return tuple(self._sums.get(p.path, p.gradient) for p in trained if p.gradient is not None)

    def _post_backward(self, group: Group) -> None:
        """What FSDP2 does after a group's backward: free whole parameters, reduce gradients."""
        self._finished.add(group.path)
        for parameter in group.trained:
            if parameter.path in self._sums and parameter.path not in self._added:
                self._add_to_sum(parameter)
        dropped = (self._whole.pop(group.path), *self._last_reduced)
        self._last_reduced = ()
        self._add_node("reshard", group.path, "backward", inputs=dropped)
        if group.trained:
            partial_bytes, partial_s = self._partial_sums(group)
            if partial_bytes:
                gradients = self._gradients_to_reduce([p for p in group.trained if p.n_sums > 1])
                self._add_node(
                    *("sum over tensor ranks", group.path, "backward", gradients),
                    workspace_bytes=partial_bytes,
                    time_s=partial_s,
                )
            if self._sums:
                self._reduce_sums(group)
            else:
                self._reduce(group)

    def _reduce(self, group: Group) -> None:
        n_ranks, size_bytes = self.sharding.n_ranks, group.reduced_bytes
        flat = self._add_tensor("to be reduced", group, "backward", n_ranks * size_bytes, "buffer")
        gradients = self._gradients_to_reduce(group.trained)
        padded_bytes = sum(p.made_bytes * n_ranks for p in group.trained if not p.is_even)
        self._add_node("copy in", group.path, "backward", gradients, (flat,), padded_bytes)
        self._last_reduced = (flat,)
        name = reduced = _gradient_name(group)
        self.tensors.append(Tensor(name, group.gradient_bytes, "gradient"))
        if group.casts_gradients:
            reduced = self._add_tensor("reduced", group, "backward", size_bytes, "buffer")
        copy_bytes = n_ranks * size_bytes + GLOO_SCALARS_BYTES
        self._add_node("reduce scatter", group.path, "backward", (flat,), (reduced,), copy_bytes)
        if self.sharding.n_replicas > 1:
            copy_bytes = size_bytes + GLOO_SCALARS_BYTES
            self._add_node("all reduce", group.path, "backward", (reduced,), (), copy_bytes)
            if group.casts_gradients or self._accumulated:
                self._all_reduced.append(reduced)
        if group.casts_gradients:
            # the buffer that they were reduced from is held until the next group reduces
            self._add_node("cast gradients", group.path, "backward", (reduced, flat), (name,))
        if self._accumulated:
            resident = f"{name}.accumulated"
            self.tensors.append(Tensor(resident, group.gradient_bytes, "gradient"))
            self._add_node("accumulate", group.path, "backward", (name, resident))

    def _reduce_sums(self, group: Group) -> None:
        """Reduce the sums of whole gradients.

        The sums stay resident in the graph, as in all backward passes but the last. What the last
        one takes counts only beyond the sums that it has freed, so that the larger of both counts.
        """
        n_ranks, size_bytes = self.sharding.n_ranks, group.reduced_bytes
        sums = self._gradients_to_reduce(group.trained)
        sums_bytes = sum(tensor.size_bytes for tensor in self.tensors if tensor.name in sums)
        whole_bytes, before_bytes = n_ranks * size_bytes, self._freed_bytes
        kept_bytes = group.gradient_bytes + (
            size_bytes if group.casts_gradients and self.sharding.n_replicas > 1 else 0
        )
        self._freed_bytes += sums_bytes - kept_bytes

        def beyond(n_bytes: int, freed_bytes: int) -> int:
            return max(0, n_bytes - freed_bytes)

        held_bytes = beyond(whole_bytes, self._freed_bytes)
        flat = self._add_tensor("to be reduced", group, "backward", held_bytes, "buffer")
        self._last_reduced = (flat,)
        padded_bytes = sum(p.reduced_bytes * n_ranks for p in group.trained if not p.is_even)
        peak_bytes = beyond(whole_bytes, before_bytes) - held_bytes
        self._add_node("copy in", group.path, "backward", sums, (flat,), padded_bytes, peak_bytes)
        gloo_bytes = whole_bytes + GLOO_SCALARS_BYTES if self.on_cpu else 0
        shard_bytes = max(size_bytes + gloo_bytes, size_bytes + group.gradient_bytes)
        peak_bytes = beyond(whole_bytes + shard_bytes, before_bytes + sums_bytes) - held_bytes
        read = (*sums, flat)
        self._add_node("reduce scatter", group.path, "backward", read, (), 0, max(0, peak_bytes))
        if self.sharding.n_replicas > 1:
            reduced = self._add_tensor("reduced", group, "backward", size_bytes, "buffer")
            self._add_node("all reduce", group.path, "backward", (flat,), (reduced,))

    def _partial_sums(self, group: Group) -> tuple[int, float]:
        """Bytes and seconds of summing, over tensor-parallel ranks, the group's gradients that
        DTensor has left as partial sums. FSDP2 replaces them one after another."""
        parts = [p for p in group.trained if p.n_sums > 1]
        sizes = [self.graph.tensor_by_name[p.gradient].size_bytes for p in parts if p.gradient]
        link = self.link
        if link is None or not parts:
            return max(sizes, default=0), 0.0
        each_s = (
            all_reduce_s(n_bytes, n_ranks=p.n_sums, link=link)
            for p, n_bytes in zip(parts, sizes, strict=True)
        )
        return max(sizes), math.fsum(each_s)

    def _all_gather(self, group: Group, phase: Phase, before: tuple[str, ...] = ()) -> str:
        """Put a node that gathers the group's shards into a buffer, and return the buffer.

        before: buffers that are held until then.
        """
        n_bytes = self.sharding.n_ranks * group.gathered_bytes
        flat = self._add_tensor("gathered", group, phase, n_bytes, "buffer")
        shards = tuple(parameter.tensor for parameter in group.parameters)
        read = (*shards, *before)
        self._add_node("all gather", group.path, phase, read, (flat,), n_bytes, group.cast_bytes)
        return flat

    def _unshard(self, group: Group, phase: Phase, flat: str) -> None:
        """Put a node that copies whole parameters out of the buffer `flat`."""
        n_bytes = self.sharding.n_ranks * group.gathered_bytes
        whole = self._add_tensor("whole parameters", group, phase, n_bytes, "parameter")
        self._add_node("copy out", group.path, phase, (flat,), (whole,))
        self._whole[group.path] = whole

    def _add_tensor(self, what: str, group: Group, phase: Phase, size_bytes: int, kind: Any) -> str:
        """Add a tensor and return its name."""
        name = f"fsdp: {what}, {phase} ({group.path})"
        self.tensors.append(Tensor(name, size_bytes, kind))
        return name

    def _add_node(
        self,
        what: str,
        path: str,
        phase: Phase,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...] = (),
        cpu_bytes: int = 0,
        workspace_bytes: int = 0,
        time_s: float = 0.0,
    ) -> None:
        """Put a node that does `what`, for the group or parameter at `path`; not recomputable.

        cpu_bytes: workspace that it takes only on the CPU.
        """
        workspace_bytes += cpu_bytes if self.on_cpu else 0
        name, op = f"fsdp: {what}, {phase} ({path})", f"fsdp.{what.replace(' ', '_')}"
        module = path.rpartition(".")[0]  # around the group's module, as its hooks are
        self.nodes.append(
            Node(name, op, inputs, outputs, time_s, workspace_bytes, phase, False, module)
        )


def _gradient_name(group: Group) -> str:
    return f"fsdp: shards of gradients ({group.path})"
