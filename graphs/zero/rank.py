"""A training step as one rank of DeepSpeed's ZeRO-1 or ZeRO-2 runs it: what the engine holds
besides the model. ZeRO-3 is in `graphs.zero.sharded`. Imports no torch.

    solve(model, batch, budget="16GB", optimizer=optimizer, zero=Zero(stage=2, n_ranks=8))

This is how DeepSpeed 0.19.8 works according to its source (`runtime/zero/stage_1_and_2.py`). Take a
group of the optimizer whose trained parameters have P elements, padded to a multiple of 2 N for N
ranks:

- *Parameters* are views of one flat tensor. The rank owns a part of P / N elements, and has a
  float32 copy of it (even if the parameters are float32), which the optimizer steps with its state
  and a float32 gradient.
- *Buckets* have `reduce_bucket_size` elements regardless of the size of the model. There is one, or
  with `overlap_comm` two, from the first gradient to the end of the backward pass. They are counted
  for the whole step; for the optimizer's step only what it takes beyond them is added.
- *Stage 2*, or `overlap_comm`: each gradient is copied into the bucket and freed. A full bucket is
  copied for the reduction. From that copy, the rank keeps the gradients of all parameters that have
  an element in its part. It keeps them whole, even if another rank owns the rest of a parameter.
- *Stage 1*: all of this happens after the backward pass, which leaves whole gradients.
- *The optimizer's step* holds, one after the other: the kept gradients, and one of them in 64 bits
  for the norm; the kept gradients, a flat copy of the rank's part of them, and that copy in float32
  if it is not yet; the float32 gradient and what the optimizer itself takes; and, on the CPU,
  gloo's copy of the parameters, which are all gathered at once (`allgather_bucket_size` has no
  effect if torch has `all_gather_into_tensor`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from graphs.files import read_json
from graphs.graph import Graph, Tensor

DEFAULT_BUCKET_ELEMENTS = 500_000_000
"""The default of `reduce_bucket_size`."""
_SUPPORTED_OPTIONS: Mapping[str, Any] = {
    "contiguous_gradients": True,
    "round_robin_gradients": False,
    "parameter_alignment": False,
    "legacy_stage1": False,
    "offload_optimizer": None,
    "offload_param": None,
    "cpu_offload": None,
    "cpu_offload_param": None,
    "zenflow": None,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "mics_shard_size": -1,
    "memory_efficient_linear": True,
}
"""Option in `zero_optimization` -> the only value that is supported; others take other memory."""
_GATHER_DEFAULTS = {
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "prefetch_bucket_size": 50_000_000,
    "param_persistence_threshold": 100_000,
}
_WIDEST_BYTES = 16
"""Bytes per element of the widest dtype, complex128."""
_UNSUPPORTED_SECTIONS = ("fp16", "torch_autocast", "amp")
TAKES = "gradient taken"
"""The op of nodes that copy a gradient into a bucket, after which the gradient is freed."""
_OWN_GRADIENTS, _BUCKETS = "zero: gradients of the rank's part", "zero: buckets"


class ZeroError(ValueError):
    """The step cannot be planned for ZeRO as asked; the message says why."""


@dataclass(frozen=True)
class Zero:
    """How DeepSpeed's ZeRO is used.

    stage: 1, 2 or 3 (`graphs.zero.sharded`); None: the stage in the config.
    n_ranks: number of data-parallel processes.
    config: DeepSpeed's config, as given to `deepspeed.initialize`, or the path of its file; None:
        the defaults.

    Raises ZeroError for settings that cannot be planned; FormatError if the file is not JSON.
    """

    stage: int | None = None
    n_ranks: int = field(kw_only=True)
    config: Mapping[str, Any] | str | Path | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        config: Any = self.config
        if isinstance(config, str | Path):
            config = read_json(Path(config))
        config = {} if config is None else config
        options = config.get("zero_optimization", {}) if isinstance(config, Mapping) else None
        if not isinstance(options, Mapping):
            raise ZeroError(
                f"config is {config!r:.80}; give DeepSpeed's, a dict with zero_optimization"
            )
        object.__setattr__(self, "config", dict(config))
        stage = options.get("stage", self.stage)
        if self.stage not in (None, stage):
            raise ZeroError(f"stage is {self.stage}, but {stage} in the config; give only one")
        object.__setattr__(self, "stage", stage)
        if isinstance(self.n_ranks, bool) or not isinstance(self.n_ranks, int) or self.n_ranks < 2:
            raise ZeroError(f"n_ranks is {self.n_ranks!r}; expected a whole number of at least 2")
        if isinstance(stage, bool) or stage not in (1, 2, 3):
            raise ZeroError(f"stage is {stage!r}; expected 1, 2 or 3")
        self._check_settings(config, options)

    def _check_settings(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Raise ZeroError for settings that cannot be planned."""
        for name, supported in _SUPPORTED_OPTIONS.items():
            if options.get(name, supported) not in (supported, None):
                raise ZeroError(f"zero_optimization.{name} is not supported; leave it out")
        for name in _UNSUPPORTED_SECTIONS:
            if self._is_enabled(name):
                raise ZeroError(f"{name} is not supported; train in float32, or with bf16")
        bf16_options = config.get("bf16", {})
        if unsupported := sorted(set(bf16_options) - {"enabled", "check_grad_overflow"}):
            raise ZeroError(f"bf16.{unsupported[0]} is not supported; leave it out")
        if config.get("gradient_accumulation_steps", 1) != 1:
            raise ZeroError(
                "gradient_accumulation_steps is not supported; set it to 1, and add the bytes of "
                "the accumulated gradients to the reserve"
            )
        sizes = {"reduce_bucket_size": self.bucket_elements, **self.gathers}
        for name, n_elements in sizes.items():
            least = 1 if name == "reduce_bucket_size" else 0
            if isinstance(n_elements, bool) or not isinstance(n_elements, int):
                raise ZeroError(f"{name} is {n_elements!r}; expected a number of elements")
            if n_elements < least:
                raise ZeroError(f"{name} is {n_elements}; expected at least {least}")

    def _is_enabled(self, section: str) -> bool:
        assert isinstance(self.config, Mapping)
        found = self.config.get(section, {})
        return isinstance(found, Mapping) and found.get("enabled") is True

    def _option(self, *names: str, default: Any) -> Any:
        """The value of the first of these names that zero_optimization has. Floats become integers,
        since sizes are often written as 5e8."""
        assert isinstance(self.config, Mapping)
        options: Mapping[str, Any] = self.config.get("zero_optimization", {})
        found = next((options[name] for name in names if name in options), default)
        return int(found) if isinstance(found, float) else found

    def check_dtype(self, name: str) -> None:
        """Raise ZeroError if the engine would cast parameters of this dtype, or accumulate or
        communicate their gradients in another dtype.

        name: the dtype of the trained parameters, such as "float32".
        """
        assert isinstance(self.config, Mapping)
        requested = {
            "bf16.enabled": "bfloat16" if self._is_enabled("bf16") else None,
            "data_types.grad_accum_dtype": self.config.get("data_types", {}).get(
                "grad_accum_dtype"
            ),
            "communication_data_type": self.config.get("communication_data_type"),
        }
        short_names = {"bfloat16": "bf16", "float32": "fp32"}
        if name not in short_names:
            raise ZeroError(
                f"parameters in {name} are not supported; use float32, or bfloat16 with bf16"
            )
        for option, value in requested.items():
            if value not in (None, name, short_names[name]):
                raise ZeroError(
                    f"{option} asks for {value}, but the parameters are in {name}; give the model "
                    "in the dtype in which the engine trains it, and no other in the config"
                )
        if name == "bfloat16" and "bf16" not in self.config:
            raise ZeroError('for parameters in bfloat16 the config needs "bf16": {"enabled": true}')

    @property
    def bucket_elements(self) -> int:
        return self._option("reduce_bucket_size", default=DEFAULT_BUCKET_ELEMENTS)  # type: ignore[no-any-return]

    @property
    def gathers(self) -> Mapping[str, int]:
        """The settings of stage 3 that limit how many parameters are whole at once, in elements."""
        return {
            name: self._option(f"stage3_{name}", name, default=default)
            for name, default in _GATHER_DEFAULTS.items()
        }

    @property
    def n_buckets(self) -> int:
        return 2 if self._option("overlap_comm", default=False) else 1

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are freed during the backward pass."""
        return self.stage in (2, 3) or self.n_buckets == 2

    def shard(self, n_elements: int) -> int:
        """Elements of a rank's part of one parameter of `n_elements`, in stage 3."""
        return -(-n_elements // self.n_ranks)

    def part(self, sizes: Sequence[int]) -> int:
        """Elements of a rank's part of a group, in stages 1 and 2.

        sizes: elements of each trained parameter of the group.
        """
        return 2 * -(-sum(sizes) // (2 * self.n_ranks))


def with_zero(graph: Graph, figures: Mapping[str, Any] | None) -> Graph:
    """The module's step, plus what the engine holds; the optimizer is added afterwards.

    graph: if the engine frees gradients during the backward pass, traced with gradients `TAKEN`.
    figures: from `zero_figures` or `sharded_figures`; None: the graph is returned unchanged.
    """
    if figures is None:
        return graph
    reduced_bytes = int(figures["reduced_bytes"])
    nodes = tuple(
        dataclasses.replace(node, workspace_bytes=reduced_bytes) if node.op == TAKES else node
        for node in graph.nodes
    )
    engine_tensors = (
        Tensor(_OWN_GRADIENTS, int(figures["own_bytes"]), "gradient"),
        Tensor(_BUCKETS, int(figures["bucket_bytes"]), "buffer"),
    )
    if figures["stage"] == 3:
        graph = _with_rank_parts(graph, figures)
    return dataclasses.replace(
        graph,
        nodes=nodes,
        tensors=(*graph.tensors, *(tensor for tensor in engine_tensors if tensor.size_bytes)),
        meta=graph.meta.with_environment(zero=dict(figures)),
    )


def _with_rank_parts(graph: Graph, figures: Mapping[str, Any]) -> Graph:
    """For stage 3: parameters shrink to the rank's parts, and whole and gathered parameters are
    added as resident tensors."""
    n_ranks = int(figures["n_ranks"])
    layout = graph.meta.parameter_layout.values()
    element_bytes = {entry["tensor"]: int(entry["element_bytes"]) for entry in layout}

    def rank_part(tensor: Tensor) -> Tensor:
        if tensor.kind != "parameter" or tensor.name in graph.producer:
            return tensor
        # of unknown dtype: assume the widest, which rounds up the most
        each_bytes = element_bytes.get(tensor.name, _WIDEST_BYTES)
        return dataclasses.replace(
            tensor, size_bytes=each_bytes * -(-tensor.size_bytes // each_bytes // n_ranks)
        )

    added = (
        Tensor("zero: whole parameters", int(figures["whole_bytes"]), "parameter"),
        Tensor("zero: gathered parameters", int(figures["gathered_bytes"]), "buffer"),
    )
    return dataclasses.replace(graph, tensors=(*map(rank_part, graph.tensors), *added))


def zero_figures(
    zero: Zero,
    groups: Sequence[Sequence[int]],
    optimizer: Mapping[str, Any],
    *,
    element_bytes: int,
    on_cpu: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the engine holds in stage 1 or 2: the figures for `with_zero`, and those of the
    optimizer's step with what the engine takes in it, for `with_optimizer`.

    groups: for each group of the optimizer, the elements of each trained parameter, in its order.
    optimizer: figures of the optimizer's step on one flat float32 part per group.
    element_bytes: bytes of a parameter's element.
    on_cpu: whether the step runs on the CPU, where gloo communicates.
    """
    sizes = [n for group in groups for n in group]
    n_elements, largest, bucket = sum(sizes), max(sizes), zero.bucket_elements
    parts = [zero.part(group) for group in groups]
    # by rank: elements of the parameters of which the rank's part has at least one element
    own_elements = [0] * zero.n_ranks
    for group, part in zip(groups, parts, strict=True):
        for end, n in zip(accumulate(group), group, strict=True):
            if not n:
                continue  # a group without elements has parts of size 0
            for rank in range((end - n) // part, -(-end // part)):
                own_elements[rank] += n
    own_bytes = element_bytes * max(own_elements)
    bucket_bytes = zero.n_buckets * bucket * element_bytes
    is_one_bucket = n_elements <= bucket  # then it is reduced only at the end of the backward pass
    reduced_bytes = zero.n_buckets * element_bytes * min(n_elements, max(bucket, largest))
    held_bytes = 0 if is_one_bucket or not zero.frees_gradients else own_bytes
    counted_bytes = bucket_bytes + held_bytes
    # what each moment of the optimizer's step takes; the graph already counts counted_bytes of it
    moments_bytes = [own_bytes + 8 * min(largest, max(parts))]
    if not zero.frees_gradients:
        counted_bytes += n_elements * element_bytes
        # gradients are reduced after the backward pass: those in the bucket are freed, and the
        # rank's are copied from it
        copied_bytes = 0 if is_one_bucket else own_bytes
        copied_bytes += largest * element_bytes if largest > bucket else 0
        moments_bytes.append(counted_bytes + copied_bytes)
    else:
        moments_bytes.append(bucket_bytes + own_bytes)
    flat_bytes = element_bytes + (4 if element_bytes < 4 else 0)
    moments_bytes.append(own_bytes + max(parts) * flat_bytes)
    kept_bytes = own_bytes if len(parts) > 1 else 0  # until the last group has stepped
    moments_bytes.append(kept_bytes + 4 * max(parts) + int(optimizer["workspace_bytes"]))
    moments_bytes.append(zero.n_ranks * max(parts) * element_bytes if on_cpu else 0)
    padding = zero.n_ranks * sum(parts) - n_elements
    state_bytes = int(optimizer["state_bytes"]) + 4 * sum(parts) + padding * element_bytes
    figures = {
        "stage": zero.stage,
        "n_ranks": zero.n_ranks,
        "own_bytes": held_bytes,
        "bucket_bytes": bucket_bytes,
        "reduced_bytes": reduced_bytes,
    }
    return figures, {
        "name": optimizer["name"],
        "state_bytes": state_bytes,
        "workspace_bytes": max(0, *(each - counted_bytes for each in moments_bytes)),
        "time_s": optimizer["time_s"],
        "state_stays": "DeepSpeed has it",
    }


def zero_words(environment: Mapping[str, Any], *, sharded: bool = False) -> str:
    """For reports: "per rank of 8, ZeRO-2"; "" for a step without ZeRO.

    sharded: return "" for stages 1 and 2, too, in which each rank has whole parameters.
    """
    found = environment.get("zero")
    if not isinstance(found, Mapping) or (sharded and found.get("stage") != 3):
        return ""
    return f"per rank of {found.get('n_ranks')}, ZeRO-{found.get('stage')}"
