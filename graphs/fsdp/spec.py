"""The settings of FSDP2, and how they are recorded in a graph or a plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphs.graph import Graph
from graphs.hardware import link_named

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""The dtypes that a policy can name -> bytes per element."""


class ShardingError(ValueError):
    """The step cannot be sharded as asked; the message says why."""


@dataclass(frozen=True)
class MixedPrecision:
    """The fields of `torch.distributed.fsdp.MixedPrecisionPolicy`, with dtypes given by name.

    param_dtype: dtype of the gathered parameters, and so of the computation; None: that of the
        shards.
    reduce_dtype: dtype in which gradients are reduced, or accumulated while they are not reduced;
        None: the dtype of the shards, and before torch 2.15 the one in which they are computed.
        Afterwards they are cast to the dtype of the shards.
    output_dtype: the dtype that the outputs of each group are cast to; None: they are not cast.
    cast_forward_inputs: whether the inputs of each group are cast to param_dtype.

    Raises ShardingError for an unknown dtype.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is None:
                continue
            plain = str(value).removeprefix("torch.")
            if plain not in ELEMENT_BYTES:
                raise ShardingError(
                    f"{name} is {value!r:.80}; expected None, or one of {', '.join(ELEMENT_BYTES)}"
                )
            object.__setattr__(self, name, plain)
        if not isinstance(self.cast_forward_inputs, bool):
            raise ShardingError(
                f"cast_forward_inputs is {self.cast_forward_inputs!r:.80}; expected a bool"
            )

    @classmethod
    def of(cls, policy: object) -> MixedPrecision:
        """The policy as a MixedPrecision.

        policy: a MixedPrecisionPolicy of PyTorch, a MixedPrecision, or a dict of its fields.

        Raises ShardingError for anything else, and for a policy that chooses dtypes per parameter.
        """
        names = [each.name for each in dataclasses.fields(cls)]
        if isinstance(policy, Mapping) and policy.keys() <= set(names):
            return cls(**policy)
        if not all(hasattr(policy, name) for name in names):
            raise ShardingError(
                f"mp_policy is {policy!r:.80}; expected a "
                "torch.distributed.fsdp.MixedPrecisionPolicy"
            )
        if getattr(policy, "param_dtype_override_fn", None) is not None:  # from torch 2.15 on
            raise ShardingError(
                "param_dtype_override_fn in mp_policy: dtypes that differ between the parameters "
                "of a group are not planned; leave it out"
            )
        return cls(**{name: getattr(policy, name) for name in names})


@dataclass(frozen=True)
class Sharding:
    """How FSDP2 is used.

    n_ranks: devices that a parameter is divided among.
    groups: paths of the modules that `fully_shard` is called on, in the model's order, before the
        model itself; None: the model's blocks (`graphs.fsdp.module_blocks.default_groups`).
    n_replicas: for hybrid sharding: how often the n_ranks devices are replicated, on a mesh of
        (n_replicas, n_ranks); each shard's gradient is summed over its replicas.
    reshard_after_forward: False: a group keeps its whole parameters from its forward to its
        backward pass, and gathers them only once. None: whichever gives the faster plan.
    link: the link between the devices, by its name in `graphs.hardware` ("nvlink4", "ib-ndr"). The
        time that a rank waits for communication over it is counted (`graphs.fsdp.communication`).
        None: the link of the card that is planned for; on the CPU, communication takes no time.
    mp_policy: the dtypes to compute and reduce in, a MixedPrecisionPolicy of PyTorch.
    accumulates_whole: whether gradients of several backward passes accumulate unsharded and are
        reduced only in the last one (`set_requires_gradient_sync(False)` for the others).

    Raises ShardingError for illegal values.
    """

    n_ranks: int
    groups: tuple[str, ...] | None = None
    n_replicas: int = 1
    reshard_after_forward: bool | None = True
    link: str | None = None
    mp_policy: MixedPrecision | None = None
    accumulates_whole: bool = False

    def __post_init__(self) -> None:
        for name, least in (("n_ranks", 2), ("n_replicas", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ShardingError(
                    f"{name} is {value!r}; expected a whole number of at least {least}"
                )
        if not isinstance(self.reshard_after_forward, bool | None):
            raise ShardingError(
                f"reshard_after_forward is {self.reshard_after_forward!r}; expected True, False or "
                "None"
            )
        if self.link is not None:
            if not isinstance(self.link, str):
                raise ShardingError(
                    f"link is {self.link!r:.80}; expected the name of a link, or None"
                )
            try:
                object.__setattr__(self, "link", link_named(self.link).name)
            except ValueError as error:
                raise ShardingError(str(error)) from error
        if not isinstance(self.accumulates_whole, bool):
            raise ShardingError(
                f"accumulates_whole is {self.accumulates_whole!r:.80}; expected a bool"
            )
        if self.mp_policy is not None:
            object.__setattr__(self, "mp_policy", MixedPrecision.of(self.mp_policy))
        if isinstance(self.groups, str):
            raise ShardingError(f"groups is {self.groups!r}; expected a sequence of module paths")
        if self.groups is not None:
            object.__setattr__(self, "groups", tuple(self.groups))


def accumulates_in_reduce_dtype(environment: Mapping[str, Any]) -> bool:
    """Whether the step's FSDP2 is that of torch 2.15 or newer (unknown: it is not).

    There, a parameter's gradient is cast to the dtype it is reduced in, or added to a sum in that
    dtype, as soon as autograd has computed it. If no dtype is given, it is reduced in that of its
    shard. Stages of a pipeline reduce their last group first.
    """
    release = re.match(r"(\d+)\.(\d+)", str(environment.get("torch", "")))
    return release is not None and (int(release[1]), int(release[2])) >= (2, 15)


def check_unsharded(graph: Graph) -> None:
    """Raise ShardingError for a step with an optimizer, and for a step that is sharded already."""
    if any(node.phase == "optimizer" for node in graph.nodes):
        raise ShardingError(
            "the graph includes an optimizer step: shard first, then add the optimizer"
        )
    if sharding_of(graph.meta.environment) is not None:
        raise ShardingError(
            f"the graph is sharded already: {sharding_words(graph.meta.environment)}"
        )


def shard_rows(n_rows: int, n_ranks: int) -> int:
    """Rows of each shard of a parameter with `n_rows` rows; FSDP2 pads all to the largest shard."""
    return -(-n_rows // n_ranks)


def sharding_of(environment: Mapping[str, Any]) -> Sharding | None:
    """The sharding recorded in the environment of a graph or plan; None: the step is not sharded.

    Raises ShardingError for a malformed record.
    """
    found = environment.get("sharding")
    if not isinstance(found, Mapping):
        return None
    names = {each.name for each in dataclasses.fields(Sharding)}
    if not found.keys() <= names:
        raise ShardingError(f"sharding is {dict(found)!r:.80}; expected only fields of Sharding")
    groups = found.get("groups", ())
    if not isinstance(groups, list | tuple) or not all(isinstance(path, str) for path in groups):
        raise ShardingError(f"groups is {groups!r:.80}; expected a sequence of module paths")
    return Sharding(**{"n_ranks": 0, **found, "groups": tuple(groups)})


def sharding_words(environment: Mapping[str, Any]) -> str:
    """For reports: "per rank of 8, FSDP2"; "" for a step that is not sharded."""
    sharding = sharding_of(environment)
    if sharding is None:
        return ""
    replicas = f"{sharding.n_replicas} x " if sharding.n_replicas > 1 else ""
    is_kept = sharding.reshard_after_forward is False
    kept = ", parameters kept from forward to backward" if is_kept else ""
    policy = sharding.mp_policy or MixedPrecision()
    computed = f", computed in {policy.param_dtype}" if policy.param_dtype else ""
    reduced = f", gradients reduced in {policy.reduce_dtype}" if policy.reduce_dtype else ""
    summed = ", gradients accumulated whole" if sharding.accumulates_whole else ""
    return f"per rank of {replicas}{sharding.n_ranks}, FSDP2{kept}{computed}{reduced}{summed}"
