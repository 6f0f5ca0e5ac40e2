"""A training step as one rank of DeepSpeed's ZeRO-3 runs it: the most that the engine can hold.

Which parameters are whole at a moment depends on its trace of earlier steps, which is not known
beforehand. What its settings allow is; as read in DeepSpeed 0.19.8 (`runtime/zero/stage3.py`,
`partitioned_param_coordinator.py`), for parameters of which a rank has 1 / N of each:

- *whole*: what is kept since it is used again within `stage3_max_reuse_distance` elements, or what
  is fetched ahead while there are fewer than `stage3_max_live_parameters`; beyond that the modules
  that run, and parameters of at most `stage3_param_persistence_threshold` elements;
- *gathered*: buffers that parameters are fetched into, until all in them have been used; on the CPU
  gloo's copy of one;
- the rank's part: its parameters, a copy of them in 32 bits, the optimizer's state, gradients in 32
  bits;
- a bucket of `reduce_bucket_size` elements, into which each gradient is copied and freed; while it
  is reduced, a copy of it, and on the CPU gloo's; a larger gradient stays until the next one comes;
- products with weights save the parameter, which is emptied after use, and not its values
  (`memory_efficient_linear`);
- the optimizer's step begins by giving up all whole parameters.

All but what is reduced is counted for the whole step: a bound, not a forecast.
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
    """As `zero_figures`, for stage 3.

    frozen: elements of each parameter that is not trained, and the bytes of one of them.
    fetched: elements of the parameters of the module that has most of its own.
    element_bytes: of a trained parameter.
    """
    trained = [n for group in groups for n in group]
    every = [*((n, element_bytes) for n in trained), *frozen]
    persistence = zero.gathers["param_persistence_threshold"]
    persistent_bytes = sum(n * each for n, each in every if n <= persistence)

    # The settings count elements, and any of them may be of the widest dtype.
    widest_bytes, total_bytes = max(each for _, each in every), sum(n * each for n, each in every)
    ahead = zero.gathers["max_live_parameters"]
    kept = max(ahead, zero.gathers["max_reuse_distance"]) + 2 * fetched
    whole_bytes = min(total_bytes, widest_bytes * kept + persistent_bytes)
    gathered_bytes = min(total_bytes, widest_bytes * (ahead + 2 * fetched))
    if on_cpu:
        copied = zero.gathers["prefetch_bucket_size"] + 2 * fetched
        gathered_bytes += min(total_bytes, widest_bytes * copied)

    parts = [sum(zero.shard(n) for n in group) for group in groups]
    bucket, largest = zero.bucket_elements, max(trained)
    larger = largest if largest > bucket else 0
    reduced = min(sum(trained), max(bucket, largest)) + zero.n_ranks * len(trained)
    flat_bytes = zero.n_buckets * element_bytes * reduced * (2 if on_cpu else 1)
    flat_bytes += 4 * (reduced // zero.n_ranks + len(trained))
    freed_bytes = whole_bytes + gathered_bytes + element_bytes * larger
    part, gradient_bytes = max(parts), 4 + (element_bytes if element_bytes < 4 else 0)
    moments = (
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
        "bucket_bytes": element_bytes * (bucket + larger),
        "reduced_bytes": flat_bytes,
    }
    return figures, {
        "name": optimizer["name"],
        "state_bytes": int(optimizer["state_bytes"]) + 4 * sum(parts),
        "workspace_bytes": max(0, *(each - freed_bytes for each in moments)),
        "time_s": optimizer["time_s"],
        "state_stays": "DeepSpeed has it",
    }
