"""The random seeds that fused attention passes from its forward to its backward operator on CUDA.

By PyTorch's fake-tensor rules the seeds are on the device. In eager mode some kernels keep them on
the host, and their backward kernel crashes the process when it is given a device tensor. Only the
forward operator knows where its seeds are, so a backward operator is measured with seeds that its
forward operator returned.
"""

from __future__ import annotations

from typing import Any

import torch

from graphs.model_calls import named_arguments

BACKWARD = tuple(
    f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient", "cudnn")
)
_FORMER_NAMES = {"rng_state": "philox_seed", "unused": "philox_offset"}
"""Flash attention's forward operator's names for the seeds -> its backward operator's names."""


def with_real_seeds(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an attention's backward operator, with seeds from its forward operator.

    args: real tensors (gradient, query, key, value, ...). The arguments of any other operator are
        returned unchanged.
    """
    name = getattr(getattr(operator, "overloadpacket", None), "__name__", "")
    if name not in BACKWARD or not isinstance(args[1], torch.Tensor) or not args[1].is_cuda:
        return args
    forward = getattr(torch.ops.aten, name.removesuffix("_backward")).default
    own = named_arguments(operator, args, {})
    arguments = {**own, "compute_log_sumexp": True}
    wanted = {a.name: arguments[a.name] for a in forward._schema.arguments if a.name in arguments}
    forward_results = {
        _FORMER_NAMES.get(returned.name, returned.name): value
        for returned, value in zip(forward._schema.returns, forward(**wanted), strict=True)
    }
    seeds = {key: forward_results[key] for key in _FORMER_NAMES.values()}
    return tuple(seeds.get(key, value) for key, value in own.items())
