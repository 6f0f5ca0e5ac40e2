"""Forward passes that change gradients, or what autograd saves, with Python code, and are planned.

Each trick is a function of a layer's input and the layer. `TrickyNet` calls it for every layer,
either in the model's own forward or in the layer's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils import checkpoint as checkpoints

WIDTH, ROWS, N_LAYERS = 16, 64, 3

Trick = Callable[[Tensor, "Layer"], Tensor]


class Layer(nn.Module):
    def __init__(self, trick: Trick | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.trick = trick

    def forward(self, x: Tensor) -> Tensor:
        if self.trick is not None:
            x = self.trick(x, self)
        return self.down(torch.tanh(self.up(x)).square())


class TrickyNet(nn.Module):
    """Layers with a trick. inside: call it in each layer's forward, else in the model's own."""

    def __init__(self, trick: Trick, *, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(trick if inside else None) for _ in range(N_LAYERS))
        self.trick = None if inside else trick

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x if self.trick is None else self.trick(x, layer))
            x = x + torch.sin(x)
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def halved(tensor: Tensor) -> Tensor:
    return tensor.detach() / 2


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def saved_of_one_node(x: Tensor, _layer: Layer) -> Tensor:
    out = torch.exp(0.1 * x)
    if out.grad_fn is not None:
        out.grad_fn._raw_saved_result.register_hooks(halved, unchanged)
    return out.sin()


def hooks_disabled(x: Tensor, _layer: Layer) -> Tensor:
    with graph.disable_saved_tensors_hooks("none here"):
        return torch.exp(0.1 * x).sin()


def tensor_hook(x: Tensor, _layer: Layer) -> Tensor:
    out = torch.exp(0.1 * x)
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * 0.5)
    return out


def tensor_hook_before_in_place(x: Tensor, _layer: Layer) -> Tensor:
    out = 1.1 * x
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * 0.5)
    return out.mul_(2.0)


def node_hook(x: Tensor, _layer: Layer) -> Tensor:
    out = torch.exp(0.1 * x)
    if out.grad_fn is not None:
        out.grad_fn.register_hook(
            lambda made, _given: tuple(m if m is None else m / 2 for m in made)
        )
    return out


def node_prehook(x: Tensor, _layer: Layer) -> Tensor:
    out = torch.exp(0.1 * x)
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(lambda given: tuple(g if g is None else g / 2 for g in given))
    return out


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(4 * x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 0.5)


def straight_through_function(x: Tensor, _layer: Layer) -> Tensor:
    return _Rounded.apply(x)


def straight_through_detach(x: Tensor, _layer: Layer) -> Tensor:
    return x + (torch.round(4 * x) - x).detach()


def straight_through_no_grad(x: Tensor, _layer: Layer) -> Tensor:
    with torch.no_grad():
        rest = torch.round(4 * x) - x
    return x + rest


def data_changed_in_place(x: Tensor, _layer: Layer) -> Tensor:
    out = torch.exp(0.1 * x)
    out.data.mul_(2.0)
    return out.sin()


def detached_changed_in_place(x: Tensor, _layer: Layer) -> Tensor:
    out = 1.1 * x
    out.detach().mul_(2.0)
    return out


def no_grad_changed_in_place(x: Tensor, _layer: Layer) -> Tensor:
    out = 1.1 * x
    with torch.no_grad():
        out.clamp_(-0.5, 0.5)
    return out


def set_to_other_memory(x: Tensor, _layer: Layer) -> Tensor:
    out = 1.0 * x
    with torch.no_grad():
        out.set_(torch.round(4 * out))
    return out


def moved_to_its_own_dtype(x: Tensor, layer: Layer) -> Tensor:
    layer.up = layer.up.to(x.dtype)
    return x


def grad_switched(x: Tensor, _layer: Layer) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    rest = torch.exp(0.1 * x)
    torch.set_grad_enabled(before)
    return x * rest


def requires_grad_off(x: Tensor, layer: Layer) -> Tensor:
    layer.up.weight.requires_grad_(False)
    return x


def module_requires_grad_off(x: Tensor, layer: Layer) -> Tensor:
    layer.up.requires_grad_(False)
    return x


def requires_grad_toggled(x: Tensor, layer: Layer) -> Tensor:
    layer.up.requires_grad_(False)
    out = layer.up(x).tanh()[:, :WIDTH]
    layer.up.requires_grad_(True)
    return out


def requires_grad_on_inside(x: Tensor, _layer: Layer) -> Tensor:
    return x.detach().requires_grad_() * 1.1 + x


def detached_in_place(x: Tensor, _layer: Layer) -> Tensor:
    return x + torch.exp(0.1 * x).detach_()


def gradient_inside(x: Tensor, _layer: Layer) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.exp(0.1 * y).sum(), y)
    return x * gradient


def gradient_penalty(x: Tensor, layer: Layer) -> Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        out = layer.up(y).tanh()
        (gradient,) = torch.autograd.grad(out.sum(), y, create_graph=True)
    return x + gradient


def backward_inside(x: Tensor, _layer: Layer) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        torch.exp(0.1 * y).sum().backward()
    return x * y.grad


def func_grad(x: Tensor, _layer: Layer) -> Tensor:
    return x * torch.func.grad(lambda y: torch.exp(0.1 * y).sum())(x)


def func_vmap(x: Tensor, layer: Layer) -> Tensor:
    return x + torch.func.vmap(lambda row: torch.tanh(layer.up.weight[:WIDTH] @ row))(x)


def jvp(x: Tensor, _layer: Layer) -> Tensor:
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


def buffer_twice(x: Tensor, layer: Layer) -> Tensor:
    layer.count.add_(x.detach().mean())
    out = x * (1 + layer.count)
    layer.count.mul_(0.5)
    return out


def buffer_twice_saved_between(x: Tensor, layer: Layer) -> Tensor:
    layer.count.add_(x.detach().mean())
    out = x * (1 + layer.count.clone())
    layer.count.mul_(0.5)
    return out * layer.count.clone()


def tied(x: Tensor, layer: Layer) -> Tensor:
    return (
        torch.tanh(torch.nn.functional.linear(x, layer.up.weight[:WIDTH])) @ layer.up.weight[:WIDTH]
    )


def _checkpointed(x: Tensor, layer: Layer, **options: Any) -> Tensor:
    def run(y: Tensor) -> Tensor:
        return torch.exp(0.1 * layer.up(y)[:, :WIDTH]).sin()

    return checkpoints.checkpoint(run, x, **options)


def checkpointed(x: Tensor, layer: Layer) -> Tensor:
    return _checkpointed(x, layer, use_reentrant=False)


def checkpointed_reentrant(x: Tensor, layer: Layer) -> Tensor:
    return _checkpointed(x, layer, use_reentrant=True)


def checkpointed_selectively(x: Tensor, layer: Layer) -> Tensor:
    context = functools.partial(
        checkpoints.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
    )
    return _checkpointed(x, layer, use_reentrant=False, context_fn=context)


@contextlib.contextmanager
def _doubled() -> Iterator[None]:
    with _Doubling():
        yield


class _Doubling(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.exp.default else out


def checkpointed_with_other_recomputation(x: Tensor, layer: Layer) -> Tensor:
    return _checkpointed(
        x,
        layer,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), _doubled()),
    )


def checkpointed_with_dropout(*, preserve_rng_state: bool) -> Trick:
    def trick(x: Tensor, layer: Layer) -> Tensor:
        def run(y: Tensor) -> Tensor:
            return torch.nn.functional.dropout(torch.exp(0.1 * layer.up(y)[:, :WIDTH]), 0.5).sin()

        options: Any = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        return checkpoints.checkpoint(run, x, **options)

    return trick


PLANNED_TRICKS: dict[str, Trick] = {
    function.__name__: function
    for function in (
        saved_of_one_node,
        hooks_disabled,
        tensor_hook,
        tensor_hook_before_in_place,
        node_hook,
        node_prehook,
        straight_through_function,
        straight_through_detach,
        straight_through_no_grad,
        data_changed_in_place,
        detached_changed_in_place,
        no_grad_changed_in_place,
        set_to_other_memory,
        moved_to_its_own_dtype,
        grad_switched,
        requires_grad_off,
        module_requires_grad_off,
        requires_grad_toggled,
        requires_grad_on_inside,
        detached_in_place,
        gradient_inside,
        gradient_penalty,
        backward_inside,
        func_grad,
        func_vmap,
        jvp,
        buffer_twice,
        buffer_twice_saved_between,
        tied,
        checkpointed,
        checkpointed_reentrant,
        checkpointed_selectively,
        checkpointed_with_other_recomputation,
    )
}
"""Tricks that can be planned, with the gradients of eager mode."""

PARTS_ONLY = (
    "requires_grad_off",
    "module_requires_grad_off",
    "requires_grad_toggled",
    "checkpointed_with_other_recomputation",
)
"""Tricks that can only be planned in a submodule, which then is one piece of the plan."""
