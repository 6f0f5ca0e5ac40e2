"""Refuses Python calls in forward that change values or gradients in ways a trace does not see.

A trace runs hooks on tensors and on nodes of the autograd graph, and records what they compute. It
misses the following, each of which is refused:

- hooks on saved tensors, and hooks that run when a parameter's gradient is accumulated;
- a hook that forward registers on a parameter: it stays there, one more in each step;
- an assignment to a tensor's `.data`, which is not an operator;
- a parameter's `.grad`, which does not exist in a trace, whether forward reads it or fills it by a
  backward pass of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint  # its hooks are known below by their module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from graphs.capture.refuse.side_effects import SideEffectError
from graphs.model_calls import nested

_CHECKPOINTS = torch.utils.checkpoint.__name__
_SAVED_TENSORS = (
    "forward uses hooks of saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu), "
    "which a planned step would not call; remove them: the plan decides what is saved for "
    "backward, and with host_budget= what is copied to the host"
)
_ON_PARAMETER = (
    "forward registers a hook on a parameter, one more in each step; a planned step would not: "
    "register it once, before training"
)
_AFTER_BACKWARD = (
    "forward registers a hook that runs once gradients exist ({name}), which a planned step "
    "would not call; register it on parameters, before training, or do this after backward()"
)
_DATA = (
    "forward assigns to the .data of a tensor, which a planned step would not do; write values in "
    "place under torch.no_grad() (copy_), or compute x + (new - x).detach()"
)
_GRAD = (
    "forward reads or changes the .grad of a parameter, which a planned step would not do; keep "
    "what it needs in a buffer, or do this outside of forward"
)
_BACKWARD = (
    "forward calls backward(), which adds to the .grad of parameters in the middle of the step; a "
    "plan has one backward pass, after forward: use torch.autograd.grad there, or divide the step "
    "into two, each with a model of its own"
)


def refusing_wrapper(why: Callable[..., str | None], original: Callable[..., Any]) -> Any:
    """Wrap a function so that some of its calls in this thread raise SideEffectError.

    why: called with the same arguments; returns the error's message, or None to allow the call.
    """
    here = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here and (message := why(*args, **kwargs)) is not None:
            raise SideEffectError(message)
        return original(*args, **kwargs)

    return call


@contextlib.contextmanager
def no_unseen_changes(module: nn.Module) -> Iterator[None]:
    """While inside, raise SideEffectError at the calls of this thread that a trace does not see.

    module: the model, on whose parameters hooks and `.grad` are refused.
    """

    def on_parameter(message: str) -> Callable[..., str | None]:
        def why(tensor: torch.Tensor, *_: Any, **__: Any) -> str | None:
            return message if any(tensor is p for p in module.parameters()) else None

        return why

    def after_backward(name: str) -> Callable[..., str]:
        return lambda *_, **__: _AFTER_BACKWARD.format(name=name)

    def on_backward(tensors: Any, *_: Any, inputs: Any = None, **__: Any) -> str | None:
        if inputs is not None:
            return None
        functions = _backward_functions_of(nested.tensors(tensors))
        # a parameter is a leaf if the model is run, and has a grad_fn in a trace
        parameter_ids = {id(p) for p in module.parameters()}
        parameter_functions = {p.grad_fn for p in module.parameters()}
        is_reached = any(
            f in parameter_functions or id(getattr(f, "variable", None)) in parameter_ids
            for f in functions
        )
        return _BACKWARD if is_reached else None

    data: Any = torch._C.TensorBase.data
    grad: Any = torch._C.TensorBase.grad
    grad_accessors = [
        refusing_wrapper(on_parameter(_GRAD), access)
        for access in (grad.__get__, grad.__set__, grad.__delete__)
    ]
    autograd: Any = torch._C._autograd
    accumulated, several = "register_post_accumulate_grad_hook", "register_multi_grad_hook"
    refusals: list[tuple[Any, str, Callable[..., str | None]]] = [
        (autograd, "_push_saved_tensors_default_hooks", _saved_hooks_message),
        (torch.Tensor, "register_hook", on_parameter(_ON_PARAMETER)),
        (torch.Tensor, accumulated, after_backward(accumulated)),
        (torch.autograd.graph, several, after_backward(several)),
        (torch.autograd, "backward", on_backward),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, why in refusals:
            new = refusing_wrapper(why, getattr(place, name))
            stack.enter_context(mock.patch.object(place, name, new))
        setter = _DataSetter(module, refusing_wrapper(lambda *_: _DATA, data.__set__))
        stack.enter_context(mock.patch.object(torch.Tensor, "data", property(data.__get__, setter)))
        stack.enter_context(mock.patch.object(torch.Tensor, "grad", property(*grad_accessors)))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply_if_it_changes))
        yield


_apply = nn.Module._apply


def _apply_if_it_changes(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`module.to(dtype)` and the like, which read each parameter's `.grad` even to change nothing.

    Routers of mixtures of experts call it in each forward pass.
    """
    with torch.no_grad():
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        if all(function(tensor) is tensor for tensor in tensors):
            return module
    return _apply(module, function, recurse)  # type: ignore[no-any-return, no-untyped-call]


class _DataSetter:
    """The setter of `.data`: copies new values into a frozen parameter, and refuses other writes.

    Momentum encoders (MoCo) average weights in forward by such an assignment. A copy has the same
    effect, except for tensors that share memory with the old or the new values.
    """

    def __init__(self, module: nn.Module, refuse: Callable[..., Any]) -> None:
        self._module, self._refuse = module, refuse

    def __call__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        parameters = {*map(id, self._module.parameters())}
        state = [*self._module.parameters(), *self._module.buffers()]
        storages = {each.untyped_storage()._cdata for each in state}
        if (
            isinstance(tensor, FakeTensor | FunctionalTensor)
            and not tensor.requires_grad
            and id(tensor) in parameters
            and (tensor.shape, tensor.dtype, tensor.stride())
            == (value.shape, value.dtype, value.stride())
            and value.untyped_storage()._cdata not in storages
        ):
            with torch.no_grad():
                tensor.copy_(value)
        else:
            self._refuse(tensor, value)


def _backward_functions_of(tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    """The autograd functions that a backward pass from these tensors would run.

    The function that accumulates a leaf's gradient has the leaf as its `variable`.
    """
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    while stack:
        function = stack.pop()
        if function not in seen:
            seen.add(function)
            yield function
            stack += [before for before, _ in function.next_functions]


def _saved_hooks_message(pack: Callable[..., Any], _unpack: Any) -> str | None:
    """The message for hooks on saved tensors, or None for hooks that leave values as they are.

    The latter are ours, which observe an opaque part, and those of `torch.utils.checkpoint`.
    """
    is_ours = getattr(pack, "is_of_trace", False)
    is_checkpoint = getattr(pack, "__module__", None) == _CHECKPOINTS
    return None if is_ours or is_checkpoint else _SAVED_TENSORS
