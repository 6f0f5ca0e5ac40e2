"""Forward passes that change gradients, or what autograd saves, in ways that are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

from tests.support.gradient_tricks import WIDTH, Layer, Trick, halved, unchanged


def savedhalved(x: Tensor, _layer: Layer) -> Tensor:
    with graph.saved_tensors_hooks(halved, unchanged):
        return torch.exp(0.1 * x).sin()


def savedhalved_for_many_operators(x: Tensor, layer: Layer) -> Tensor:
    with graph.saved_tensors_hooks(halved, unchanged):
        return layer.up(x).tanh()[:, :WIDTH]


def saved_in_half_precision(x: Tensor, _layer: Layer) -> Tensor:
    with graph.saved_tensors_hooks(lambda t: t.detach().half(), lambda t: t.float()):
        return torch.exp(0.1 * x).sin()


def saved_on_cpu(x: Tensor, _layer: Layer) -> Tensor:
    with graph.save_on_cpu():
        return torch.exp(0.1 * x).sin()


def saved_by_push(x: Tensor, _layer: Layer) -> Tensor:
    torch._C._autograd._push_saved_tensors_default_hooks(halved, unchanged)
    try:
        return torch.exp(0.1 * x).sin()
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def hook_on_parameter(x: Tensor, layer: Layer) -> Tensor:
    if layer.up.weight.requires_grad and torch.is_grad_enabled():
        layer.up.weight.register_hook(lambda gradient: gradient * 0.5)
    return x


def hook_after_accumulation(x: Tensor, layer: Layer) -> Tensor:
    layer.up.weight.register_post_accumulate_grad_hook(_halve_gradient)
    return x


def _halve_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


def multi_grad_hook(x: Tensor, layer: Layer) -> Tensor:
    a, b = torch.exp(0.1 * x), torch.sin(x)
    if a.requires_grad and b.requires_grad:
        graph.register_multi_grad_hook((a, b), lambda _gradients: layer.count.add_(1))
    return a + b


def multi_grad_hook_any(x: Tensor, layer: Layer) -> Tensor:
    a, b = torch.exp(0.1 * x), torch.sin(x)
    if a.requires_grad and b.requires_grad:
        graph.register_multi_grad_hook((a, b), lambda _g: layer.count.add_(1), mode="any")
    return a + b


def multi_grad_hook_of_parameters(x: Tensor, layer: Layer) -> Tensor:
    graph.register_multi_grad_hook(
        (layer.up.weight, layer.down.weight), lambda _gradients: layer.count.add_(1)
    )
    return x


def full_backward_hook_in_forward(x: Tensor, layer: Layer) -> Tensor:
    handle = layer.up.register_full_backward_hook(
        lambda _module, made, _given: tuple(m if m is None else m / 2 for m in made)
    )
    out = layer.up(x).tanh()[:, :WIDTH]
    handle.remove()
    return out


class _WritesBuffer(torch.autograd.Function):
    """Adds to a buffer in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.count = count
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.count.add_(1)
        return gradients[0] * 3, None


def function_that_writes_a_buffer(x: Tensor, layer: Layer) -> Tensor:
    return _WritesBuffer.apply(x, layer.count)


def straight_through_data(x: Tensor, _layer: Layer) -> Tensor:
    out = 1.0 * x
    out.data = torch.round(4 * out.data)
    return out


def parameter_data(x: Tensor, layer: Layer) -> Tensor:
    layer.up.weight.data = layer.up.weight.data * 0.99
    return x


def gradient_of_parameter_read(x: Tensor, layer: Layer) -> Tensor:
    gradient = layer.up.weight.grad
    return x if gradient is None else x * gradient.abs().mean()


def moved_to_another_dtype(x: Tensor, layer: Layer) -> Tensor:
    layer.up.double().float()
    return x


def gradient_of_parameter_set(x: Tensor, layer: Layer) -> Tensor:
    layer.up.weight.grad = torch.ones_like(layer.up.weight)
    return x


REFUSED_TRICKS: dict[str, tuple[Trick, str]] = {
    function.__name__: (function, why)
    for function, why in (
        (savedhalved, r"hooks of saved tensors"),
        (savedhalved_for_many_operators, r"hooks of saved tensors"),
        (saved_in_half_precision, r"hooks of saved tensors"),
        (saved_on_cpu, r"hooks of saved tensors"),
        (saved_by_push, r"hooks of saved tensors"),
        (hook_on_parameter, r"registers a hook on a parameter"),
        (hook_after_accumulation, r"register_post_accumulate_grad_hook"),
        (multi_grad_hook, r"register_multi_grad_hook"),
        (multi_grad_hook_any, r"register_multi_grad_hook"),
        (multi_grad_hook_of_parameters, r"register_multi_grad_hook"),
        (full_backward_hook_in_forward, r"changes the attribute '_is_full_backward_hook'"),
        (function_that_writes_a_buffer, r"changes buffer 'layers\.\d\.count' in place"),
        (straight_through_data, r"assigns to the .data"),
        (parameter_data, r"assigns to the .data"),
        (gradient_of_parameter_read, r"the \.grad of a parameter"),
        (gradient_of_parameter_set, r"the \.grad of a parameter"),
        (moved_to_another_dtype, r"the \.grad of a parameter"),
    )
}
"""Tricks that are refused, with a pattern of the error message."""
