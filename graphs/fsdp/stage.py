"""The step of one micro-batch in a stage of a pipeline whose parameters FSDP2 shards.

`torch.distributed.pipelining` (torch 2.13) keeps a sharded stage whole until the optimizer steps:
`backward_maybe_with_nosync` neither reshards nor reduces after a backward pass, and
`perform_reduce_grad` does both for one group after another when no micro-batch is in flight any
more. Only reshard_after_forward=False is planned:

- *The first forward pass* gathers each group before its first operator. The nodes here stand for
  every micro-batch, so whole parameters and whole gradients are counted throughout. But in the
  first forward pass the gradients and the parameters of later groups do not exist yet, so buffers
  count only for what they take beyond the bytes of these.
- *In between*, whole parameters and the sums of whole gradients are resident.
- *After the last backward pass*, a group's whole parameters are freed; its sums are copied into one
  buffer, freed, and reduce-scattered. This counts for what it takes beyond the bytes that the
  groups before have freed. The root is the first group, with torch 2.15 the last. Its nodes have
  phase optimizer, since they run once per optimizer step.

A rank waits for the all-gathers only in the first micro-batch; each micro-batch counts its share of
that time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from graphs.fsdp.groups import ROOT, Group
from graphs.fsdp.spec import Sharding, ShardingError, check_unsharded
from graphs.fsdp.transform import GLOO_SCALARS_BYTES, Transform
from graphs.graph import Graph, Tensor
from graphs.hardware import all_gather_s, all_reduce_s, reduce_scatter_s
from graphs.pipeline import Pipeline


def sharding_in_stage(sharding: Sharding, pipeline: Pipeline) -> Sharding:
    """The sharding as a stage of a pipeline runs it.

    Raises ShardingError if it gathers in each micro-batch, or if there are several stages on a
    rank.
    """
    if pipeline.schedule == "interleaved":
        raise ShardingError(
            "sharded stages of schedule='interleaved': torch.distributed.pipelining gathers and "
            "frees whole stages between their passes, which is not planned; use '1f1b' or 'gpipe'"
        )
    if sharding.reshard_after_forward:
        raise ShardingError(
            "reshard_after_forward=True in a stage of a pipeline: torch.distributed.pipelining "
            "keeps whole what a backward pass has gathered, so that it frees little there; give "
            "reshard_after_forward=False (None, or a plain number of ranks, mean that)"
        )
    return dataclasses.replace(sharding, reshard_after_forward=False, accumulates_whole=True)


def sharded_stage(
    graph: Graph, sharding: Sharding, *, n_microbatches: int, on_cpu: bool = False
) -> Graph:
    """The step of one micro-batch of a stage, as one rank of FSDP2 runs it.

    graph: the unsharded stage's step, whose gradients accumulate, without an optimizer.
    sharding: as for `sharded`, and from `sharding_in_stage`.
    n_microbatches: micro-batches per optimizer step.
    on_cpu: as for `sharded`.

    Raises ShardingError as `sharded` does. Cost: linear in the graph, times the number of groups.
    """
    check_unsharded(graph)
    return _StageTransform(graph, sharding, on_cpu, n_microbatches=n_microbatches).run()


@dataclass
class _StageTransform(Transform):
    """Goes through the step of a stage.

    n_microbatches: micro-batches per optimizer step.
    _not_live_bytes: bytes of resident tensors that do not exist yet at this moment of the first
        forward pass, or not any more after the last backward pass.
    """

    n_microbatches: int = field(kw_only=True)
    _not_live_bytes: int = 0

    def _forward(self) -> None:
        for group in self._groups:
            name = f"fsdp: whole parameters ({group.path})"
            self.tensors.append(Tensor(name, self._whole_bytes(group), "parameter"))
        added = (t.size_bytes for t in self.tensors if t.kind in ("parameter", "gradient"))
        self._not_live_bytes = sum(added)
        held: tuple[str, ...] = ()  # the buffer of the last all-gather
        held_bytes = 0
        for position, node in enumerate(self.graph.forward_nodes):
            for group in self._groups:  # outer groups come first
                if group.first_forward == position:
                    held = self._gather(group, held, held_bytes)
                    held_bytes = self._whole_bytes(group)
            self.nodes.append(node)
        if held:
            self._add_node("end of forward", ROOT, "forward", inputs=held)

    def _gather(self, group: Group, before: tuple[str, ...], before_bytes: int) -> tuple[str, ...]:
        """Gather a group. Returns its buffer, which is held until the next group is gathered.

        before, before_bytes: the buffer of the group before, and its bytes.
        """
        # What the all-gather takes at its peak, and what is held before and after it, each beyond
        # the bytes that are counted as resident but do not exist yet. The difference is workspace.
        whole_bytes = self._whole_bytes(group)
        taken_bytes = before_bytes + whole_bytes + group.cast_bytes
        taken_bytes += whole_bytes if self.on_cpu else 0
        taken_bytes -= self._not_live_bytes
        held_before_bytes = max(0, before_bytes - self._not_live_bytes)
        self._not_live_bytes -= whole_bytes
        held_bytes = max(0, whole_bytes - self._not_live_bytes)
        flat = self._add_tensor("gathered", group, "forward", held_bytes, "buffer")
        shards = tuple(parameter.tensor for parameter in group.parameters)
        workspace_bytes = max(0, taken_bytes - held_before_bytes - held_bytes)
        time_s = 0.0
        if self.link is not None:
            time_s = all_gather_s(whole_bytes, n_ranks=self.sharding.n_ranks, link=self.link)
        self._add_node(
            *("all gather", group.path, "forward"),
            inputs=(*shards, *before),
            outputs=(flat,),
            workspace_bytes=workspace_bytes,
            time_s=time_s / self.n_microbatches,
        )
        return (flat,)

    def _backward(self) -> None:
        for position, node in enumerate(self.graph.later_nodes):
            self._add_later_node(node)
            for group in reversed(self._groups):
                if group.last_backward == position and not group.is_reduced_at_end:
                    self._add_cast_gradients(group)
        for group in self._groups:
            self._add_cast_gradients(group)
        self._not_live_bytes = 0
        for group in reversed(self._groups) if self._casts_in_autograd else self._groups:
            self._reduce_after_last_backward(group)

    def _add_cast_gradients(self, group: Group) -> None:
        """At the end of the group's backward pass, add those gradients to their sums that autograd
        does not add by itself, because their sums have another dtype."""
        for parameter in group.trained:
            is_left = parameter.path not in self._added
            if is_left and parameter.gradient not in self._added_when_read:
                self._add_to_sum(parameter)

    def _reduce_after_last_backward(self, group: Group) -> None:
        """Free the group's whole parameters and reduce its gradients after the last backward pass.

        The workspace of the node is the largest of three moments: tensor-parallel partial sums are
        added up, sums are copied into the buffer, and the buffer is reduced.
        """
        if not group.trained:
            self._not_live_bytes += self._whole_bytes(group)
            return
        partial_bytes, partial_s = self._partial_sums(group)
        moments = [partial_bytes - self._not_live_bytes]
        self._not_live_bytes += self._whole_bytes(group)
        n_ranks, size_bytes = self.sharding.n_ranks, group.reduced_bytes
        flat_bytes = n_ranks * size_bytes
        padded_bytes = sum(p.reduced_bytes * n_ranks for p in group.trained if not p.is_even)
        padded_bytes = padded_bytes if self.on_cpu else 0
        moments.append(flat_bytes + padded_bytes - self._not_live_bytes)
        sums = self._gradients_to_reduce(group.trained)
        self._not_live_bytes += sum(t.size_bytes for t in self.tensors if t.name in sums)
        gloo_bytes = flat_bytes + GLOO_SCALARS_BYTES if self.on_cpu else 0
        cast_bytes = group.gradient_bytes if group.casts_gradients else 0
        moments.append(flat_bytes + size_bytes + max(gloo_bytes, cast_bytes) - self._not_live_bytes)
        kept_bytes = group.gradient_bytes
        if group.casts_gradients and self.sharding.n_replicas > 1:
            kept_bytes += size_bytes
        self._not_live_bytes -= kept_bytes
        reduction_s, n_replicas, link = 0.0, self.sharding.n_replicas, self.link
        if link is not None:  # no operators run meanwhile, so all of it is waited for
            reduction_s = reduce_scatter_s(flat_bytes, n_ranks=n_ranks, link=link)
            if n_replicas > 1:
                reduction_s += all_reduce_s(size_bytes, n_ranks=n_replicas, link=link)
        self._add_node(
            *("reduce scatter", group.path, "optimizer"),
            inputs=sums,
            workspace_bytes=max(0, *moments),
            time_s=reduction_s + partial_s,
        )

    def _whole_bytes(self, group: Group) -> int:
        return self.sharding.n_ranks * group.gathered_bytes
