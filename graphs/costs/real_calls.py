"""Runs an operator call on real tensors of the same shapes, strides and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphs.costs.loops import row_loop
from graphs.costs.operators import OpCall, aten
from graphs.model_calls import named_arguments, strided_like


def runner(call: OpCall, device: torch.device) -> Callable[[], Any]:
    """A function that runs the call on real tensors of the same shapes, strides and dtypes."""
    index_limits = _index_limits(call)
    is_product = call.packet in _PRODUCTS
    args, kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: _real_tensor_like(
            tensor, device, below=index_limits.get(id(tensor), 1), is_normal=is_product
        ),
        (call.args, dict(call.kwargs)),
    )
    args = with_real_seeds(call.target, args)
    if call.packet is aten._grouped_mm:
        _fill_equal_groups(*args, **kwargs)
    return lambda: call.target(*args, **kwargs)


_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


def _real_tensor_like(
    tensor: torch.Tensor, device: torch.device, *, below: int, is_normal: bool
) -> torch.Tensor:
    """A real tensor of the same shape, strides and dtype; integers are from 0 to `below` - 1.

    Scalars on the host (random seeds, step counts) stay there.
    """
    stays_on_host = tensor.device.type == "cpu" and tensor.dim() == 0
    where = tensor.device if stays_on_host else device
    new = strided_like(tensor, where)
    storage = torch.empty(0, dtype=tensor.dtype, device=where).set_(new.untyped_storage())
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        _ = storage.normal_() if is_normal else storage.uniform_()
    elif tensor.dtype in (torch.int32, torch.int64):
        storage.random_(0, below)
    else:
        storage.zero_()
    return new


def _fill_equal_groups(
    one: torch.Tensor, other: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> None:
    """Fill equal groups into `offs`, the ends of the groups of a grouped product. (It was filled
    with zeros; with every group ending at 0, nothing would be multiplied.)"""
    if offs is None:
        return
    by_rows = one.dim() == 2 and other.dim() == 3
    size = one.shape[0] if by_rows else other.shape[-1] if one.dim() == 3 else one.shape[-1]
    n_groups = offs.numel()
    group_ends = [size * (n + 1) // n_groups for n in range(n_groups)]
    offs.copy_(torch.tensor(group_ends, dtype=offs.dtype))


SEEDED_BACKWARD = tuple(
    f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient", "cudnn")
)
_FORMER_NAMES = {"rng_state": "philox_seed", "unused": "philox_offset"}
"""Flash attention's forward operator's names for the seeds -> its backward operator's names."""


def with_real_seeds(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an attention's backward operator, with seeds from its forward operator.

    By PyTorch's fake-tensor rules the random seeds that fused attention passes from its forward to
    its backward operator on CUDA are on the device. In eager mode some kernels keep them on the
    host, and their backward kernel crashes the process when it is given a device tensor. Only the
    forward operator knows where its seeds are.

    args: real tensors (gradient, query, key, value, ...). The arguments of any other operator are
        returned unchanged.
    """
    name = getattr(getattr(operator, "overloadpacket", None), "__name__", "")
    if name not in SEEDED_BACKWARD or not isinstance(args[1], torch.Tensor) or not args[1].is_cuda:
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


def _index_limits(call: OpCall) -> dict[int, int]:
    """id() of each index tensor -> how many positions its indices can refer to.

    Indices are drawn from all of these: with equal ones, scatter-adds would wait for each other,
    which they do not in real training.
    """
    args = call.args
    packet = call.packet
    if packet is not None and row_loop(call):  # F.linear_cross_entropy: input, weight, target
        return {id(args[2]): args[1].shape[0]}
    if packet is aten.embedding:
        return {id(args[1]): args[0].shape[0]}
    if packet is aten.embedding_dense_backward:
        return {id(args[1]): args[2]}
    forward = packet in (aten.nll_loss_forward, aten.nll_loss2d_forward)
    if forward or packet in (aten.nll_loss_backward, aten.nll_loss2d_backward):
        x, target = args[:2] if forward else args[1:3]  # after the gradient
        return {id(target): x.shape[min(1, x.dim() - 1)]}
    if packet in (aten.gather, aten.index_select, aten.scatter, aten.scatter_add, aten.index_add):
        return {id(args[2]): args[0].shape[args[1]] if args[0].dim() else 1}
    if packet in (aten.index, aten.index_put):
        pairs = zip(args[1], args[0].shape, strict=False)
        return {id(index): size for index, size in pairs if index is not None}
    if packet is aten.max_pool2d_with_indices_backward:
        return {id(args[7]): args[1].shape[-1] * args[1].shape[-2]}
    return {}
