"""A micro-batch's step in a stage of a pipeline whose parameters FSDP2 shards.

`torch.distributed.pipelining` (torch 2.13) keeps a sharded stage whole for a step of the optimizer:
`backward_maybe_with_nosync` reshards and reduces nothing after a backward pass, and
`perform_reduce_grad` does both for one group after another when no micro-batch is in flight any
more. With reshard_after_forward=False, which is what is planned,

- *the first forward pass* gathers each group before its first operator. None of the whole gradients
  is there then, nor the parameters of later groups: only what the buffers take beyond these is
  counted, since the nodes here stand for every micro-batch;
- *between* whole parameters and the sums of whole gradients are resident;
- *after the last backward pass* a group's whole parameters are freed, its sums copied into one
  buffer and freed, and reduce-scattered. What that takes beyond what the groups before it have
  freed is counted. These nodes belong to the optimizer's step, which runs once as they do.

What is gathered is waited for in the first micro-batch, and counted in each with its share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graphs.fsdp.groups import ROOT, Group
from graphs.fsdp.spec import Sharding, ShardingError
from graphs.fsdp.transform import GLOO_SCALARS_BYTES, Transform, check_unsharded
from graphs.graph import Graph, Tensor
from graphs.hardware import Link, all_gather_s, all_reduce_s, link_named, reduce_scatter_s
from graphs.pipeline import Pipeline


def of_stage(sharding: Sharding, pipeline: Pipeline) -> Sharding:
    """The sharding as a stage of a pipeline runs it.

    Raises ShardingError for one that gathers in each micro-batch, and for several stages on a rank.
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
    graph: Graph,
    *,
    n_ranks: int,
    n_microbatches: int,
    groups: Sequence[str],
    on_cpu: bool = False,
    **options: Any,
) -> Graph:
    """The step of one micro-batch as one rank runs it; `graph` is that of the whole stage, whose
    gradients accumulate, without an optimizer.

    The rest is as for `sharded`, but for what `of_stage` sets.

    Raises ShardingError as `sharded` does. Cost: linear in the graph, times the number of groups.
    """
    check_unsharded(graph)
    kept = {"reshard_after_forward": False, "accumulates_whole": True}
    sharding = Sharding(n_ranks=n_ranks, groups=tuple(groups), **{**options, **kept})
    return _StageTransform(graph, sharding, on_cpu, n_microbatches=n_microbatches).run()


@dataclass
class _StageTransform(Transform):
    """_absent_bytes: of what is resident here, that is not there at this moment of the first
    forward pass, or after the last backward pass."""

    n_microbatches: int = field(kw_only=True)
    _absent_bytes: int = 0

    @property
    def _link(self) -> Link | None:
        return None if self.sharding.link is None else link_named(self.sharding.link)

    def _forward(self) -> None:
        for group in self._groups:
            name = f"fsdp: whole parameters ({group.path})"
            self.tensors.append(Tensor(name, self._whole_bytes(group), "parameter"))
        added = (t.size_bytes for t in self.tensors if t.kind in ("parameter", "gradient"))
        self._absent_bytes = sum(added)
        held: tuple[str, ...] = ()  # the buffer that was gathered into last
        held_bytes = 0
        for position, node in enumerate(self.graph.forward_nodes):
            for group in self._groups:  # outer groups come first
                if group.first == position:
                    held = self._gather(group, held, held_bytes)
                    held_bytes = self._whole_bytes(group)
            self.nodes.append(node)
        if held:
            self._put("end of forward", ROOT, "forward", inputs=held)

    def _gather(self, group: Group, before: tuple[str, ...], before_bytes: int) -> tuple[str, ...]:
        """The buffer that is gathered into, and stays until the next group's is there."""
        whole_bytes = self._whole_bytes(group)
        taken_bytes = before_bytes + whole_bytes + group.cast_bytes
        taken_bytes += whole_bytes if self.on_cpu else 0
        taken_bytes -= self._absent_bytes
        held_before_bytes = max(0, before_bytes - self._absent_bytes)
        self._absent_bytes -= whole_bytes
        held_bytes = max(0, whole_bytes - self._absent_bytes)
        flat = self._tensor("gathered", group, "forward", held_bytes, "buffer")
        shards = tuple(parameter.tensor for parameter in group.parameters)
        workspace_bytes = max(0, taken_bytes - held_before_bytes - held_bytes)
        time_s = 0.0
        if self._link is not None:
            time_s = all_gather_s(whole_bytes, n_ranks=self.sharding.n_ranks, link=self._link)
        self._put(
            *("all gather", group.path, "forward"),
            inputs=(*shards, *before),
            outputs=(flat,),
            workspace_bytes=workspace_bytes,
            time_s=time_s / self.n_microbatches,
        )
        return (flat,)

    def _backward(self) -> None:
        for position, node in enumerate(self.graph.later_nodes):
            self._put_later(node)
            for group in reversed(self._groups):
                if group.ends == position and not group.late:
                    self._add_cast(group)
        for group in self._groups:
            self._add_cast(group)
        self._absent_bytes = 0
        for group in self._groups:
            self._reduce_after_last(group)

    def _add_cast(self, group: Group) -> None:
        """What autograd does not add, as it is of another dtype, at the end of the group."""
        for parameter in group.trained:
            is_left = parameter.path not in self._added
            if is_left and parameter.gradient not in self._added_when_read:
                self._add(parameter)

    def _reduce_after_last(self, group: Group) -> None:
        if not group.trained:
            self._absent_bytes += self._whole_bytes(group)
            return
        partial_bytes, partial_s = self._partial_sums(group)
        moments = [partial_bytes - self._absent_bytes]
        self._absent_bytes += self._whole_bytes(group)
        n_ranks, size_bytes = self.sharding.n_ranks, group.reduced_bytes
        flat_bytes = n_ranks * size_bytes
        padded_bytes = sum(p.reduced_bytes * n_ranks for p in group.trained if not p.is_even)
        padded_bytes = padded_bytes if self.on_cpu else 0
        moments.append(flat_bytes + padded_bytes - self._absent_bytes)
        sums = self._to_be_reduced(group.trained)
        self._absent_bytes += sum(t.size_bytes for t in self.tensors if t.name in sums)
        gloo_bytes = flat_bytes + GLOO_SCALARS_BYTES if self.on_cpu else 0
        cast_bytes = group.gradient_bytes if group.casts_gradients else 0
        moments.append(flat_bytes + size_bytes + max(gloo_bytes, cast_bytes) - self._absent_bytes)
        stays_bytes = group.gradient_bytes
        if group.casts_gradients and self.sharding.n_replicas > 1:
            stays_bytes += size_bytes
        self._absent_bytes -= stays_bytes
        reduction_s, n_replicas, link = 0.0, self.sharding.n_replicas, self._link
        if link is not None:  # nothing runs beside it
            reduction_s = reduce_scatter_s(flat_bytes, n_ranks=n_ranks, link=link)
            if n_replicas > 1:
                reduction_s += all_reduce_s(size_bytes, n_ranks=n_replicas, link=link)
        self._put(
            *("reduce scatter", group.path, "optimizer"),
            inputs=sums,
            workspace_bytes=max(0, *moments),
            time_s=reduction_s + partial_s,
        )

    def _whole_bytes(self, group: Group) -> int:
        return self.sharding.n_ranks * group.gathered_bytes
