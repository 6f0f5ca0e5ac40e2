"""A training step as one rank of DeepSpeed's ZeRO-3 runs it: the most that the engine can hold.

Which parameters are whole at a given moment depends on the engine's trace of earlier steps and is
not known beforehand, but its settings give a limit. According to the source of DeepSpeed 0.19.8
(`runtime/zero/stage3.py`, `partitioned_param_coordinator.py`), a rank, which owns 1 / N of each
parameter, holds:

- *whole parameters*: those kept because they are used again within `stage3_max_reuse_distance`
  elements, or fetched ahead while fewer than `stage3_max_live_parameters` are whole; besides, those
  of the modules that run, and all of at most `stage3_param_persistence_threshold` elements;
- *gathered parameters*: buffers that parameters are fetched into, until all in them have been used;
  on the CPU also gloo's copy of one buffer;
- the rank's part: its parameters, a float32 copy of them, the optimizer's state, and gradients in
  float32;
- a bucket of `reduce_bucket_size` elements: each gradient is copied into it and freed. While it is
  reduced, there is a copy of it, and on the CPU also gloo's. A gradient larger than the bucket
  stays until the next one comes.

Products with weights save the parameter, which is emptied after use, rather than its values
(`memory_efficient_linear`). The optimizer's step begins by freeing all whole parameters.

Everything except the copies of the bucket is counted for the whole step: this is an upper bound,
not a forecast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphs.zero.rank import Zero


def sharded_figures(
    zero: Zero,
    groups: Sequence[Sequence[int]],
    optimizer: Mapping[str, Any],
    *,
    frozen: Sequence[tuple[int, int]],
    fetched: int,
    element_bytes: int,
    on_cpu: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the engine holds in stage 3; returns the same as `zero_figures`.

    groups, optimizer, on_cpu: as for `zero_figures`.
    frozen: for each parameter that is not trained, its elements and the bytes of one element.
    fetched: the most parameter elements that a single module has, without its submodules.
    element_bytes: bytes of a trained parameter's element.
    """
    trained = [n for group in groups for n in group]
    sizes = [*((n, element_bytes) for n in trained), *frozen]
    persistence = zero.gathers["param_persistence_threshold"]
    persistent_bytes = sum(n * each for n, each in sizes if n <= persistence)

    # The settings count elements, all of which may be of the widest dtype.
    widest_bytes, total_bytes = max(each for _, each in sizes), sum(n * each for n, each in sizes)
    most_live = zero.gathers["max_live_parameters"]
    most_kept = max(most_live, zero.gathers["max_reuse_distance"]) + 2 * fetched
    whole_bytes = min(total_bytes, widest_bytes * most_kept + persistent_bytes)
    gathered_bytes = min(total_bytes, widest_bytes * (most_live + 2 * fetched))
    if on_cpu:
        most_copied = zero.gathers["prefetch_bucket_size"] + 2 * fetched
        gathered_bytes += min(total_bytes, widest_bytes * most_copied)

    parts = [sum(zero.shard(n) for n in group) for group in groups]
    bucket, largest = zero.bucket_elements, max(trained)
    n_unbucketed = largest if largest > bucket else 0
    n_reduced = min(sum(trained), max(bucket, largest)) + zero.n_ranks * len(trained)
    flat_bytes = zero.n_buckets * element_bytes * n_reduced * (2 if on_cpu else 1)
    flat_bytes += 4 * (n_reduced // zero.n_ranks + len(trained))
    freed_bytes = whole_bytes + gathered_bytes + element_bytes * n_unbucketed
    part, gradient_bytes = max(parts), 4 + (element_bytes if element_bytes < 4 else 0)
    moments_bytes = (
        8 * max(map(zero.shard, trained)),
        gradient_bytes * part,
        4 * part + int(optimizer["workspace_bytes"]),
    )
    figures = {
        "stage": 3,
        "n_ranks": zero.n_ranks,
        "whole_bytes": whole_bytes,
        "gathered_bytes": gathered_bytes,
        "own_bytes": 4 * sum(parts),
        "bucket_bytes": element_bytes * (bucket + n_unbucketed),
        "reduced_bytes": flat_bytes,
    }
    return figures, {
        "name": optimizer["name"],
        "state_bytes": int(optimizer["state_bytes"]) + 4 * sum(parts),
        "workspace_bytes": max(0, *(each - freed_bytes for each in moments_bytes)),
        "time_s": optimizer["time_s"],
        "state_stays": "DeepSpeed has it",
    }
