"""Refuses Python calls in forward that change values or gradients in ways a trace does not see.

A trace runs hooks on tensors and on nodes of the autograd graph, and records what they compute. It
misses the following, each of which is refused:

- hooks on saved tensors, and hooks that run when a parameter's gradient is accumulated;
- a hook that forward registers on a parameter: it stays there, one more in each step;
- an assignment to a tensor's `.data`, which is not an operator;
- a parameter's `.grad`, which does not exist in a trace, whether forward reads it or fills it by a
  backward pass of its own.

`no_untraced_calls` refuses calls that cannot be traced, but that are fine in a part of the model
that is run instead. Otherwise the trace would fail inside of torch, with an error that does not say
what forward does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint  # its hooks are known below by their module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from graphs.capture.refuse.side_effects import SideEffectError
from graphs.capture.threads import in_this_thread
from graphs.model_calls import autograd_functions, nested, storage_key

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
    "place under torch.no_grad() (copy_), or compute x + (new - x).detach(); where the first call "
    "alone does so (ActNorm), call the model once before it is planned"
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
_REQUIRES_GRAD = "forward switches requires_grad of a parameter"
_ONE_SET = (
    "; a plan is for one set of parameters that get gradients. Detach where no gradient is wanted "
    "(torch.func.functional_call with detached parameters), or do this in a submodule, which is "
    "planned as one piece"
)
COMPILED = "forward calls a function compiled by torch.compile"
CALL_ORIGINAL = (
    ", whose operators cannot be recorded; call the function as it was before (`f`, not "
    "`torch.compile(f)`), or call it in a submodule, which is planned as one piece"
)
_SUBCLASS = "forward makes a tensor of the class {name} (as_subclass)"
_NOT_RECORDED = (
    ", whose operators cannot be recorded; use plain tensors, or do this in a submodule, which is "
    "planned as one piece"
)


def _refusing_wrapper(why: Callable[..., str | None], original: Callable[..., Any]) -> Any:
    """Wrap a function so that some of its calls in this thread raise SideEffectError.

    why: called with the same arguments; returns the error's message, or None to allow the call.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if (message := why(*args, **kwargs)) is not None:
            raise SideEffectError(message)
        return original(*args, **kwargs)

    return in_this_thread(call, original)


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
        functions = autograd_functions(nested.tensors(tensors))
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
        _refusing_wrapper(on_parameter(_GRAD), access)
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
            new = _refusing_wrapper(why, getattr(place, name))
            stack.enter_context(mock.patch.object(place, name, new))
        setter = _DataSetter(module, _refusing_wrapper(lambda *_: _DATA, data.__set__))
        stack.enter_context(mock.patch.object(torch.Tensor, "data", property(data.__get__, setter)))
        stack.enter_context(mock.patch.object(torch.Tensor, "grad", property(*grad_accessors)))
        apply = in_this_thread(_apply_if_it_changes, _apply)
        stack.enter_context(mock.patch.object(nn.Module, "_apply", apply))
        yield


_apply = nn.Module._apply


def _apply_if_it_changes(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`module.to(dtype)` and the like, which read each parameter's `.grad` even to change nothing.

    Routers of mixtures of experts call it in each forward pass. A submodule may have an `_apply` of
    its own.
    """
    for child in module.children() if recurse else ():
        child._apply(function)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if not all(function(tensor) is tensor for tensor in tensors):
            _apply(module, function, recurse=False)  # type: ignore[no-untyped-call]
    return module


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
        storages = {storage_key(each) for each in state}
        if (
            isinstance(tensor, FakeTensor | FunctionalTensor)
            and not tensor.requires_grad
            and id(tensor) in parameters
            and (tensor.shape, tensor.dtype, tensor.stride())
            == (value.shape, value.dtype, value.stride())
            and storage_key(value) not in storages
        ):
            with torch.no_grad():
                tensor.copy_(value)
        else:
            self._refuse(tensor, value)


def _saved_hooks_message(pack: Callable[..., Any], _unpack: Any) -> str | None:
    """The message for hooks on saved tensors, or None for hooks that leave values as they are.

    The latter are ours, which observe an opaque part, and those of `torch.utils.checkpoint`.
    """
    is_ours = getattr(pack, "is_of_trace", False)
    is_checkpoint = getattr(pack, "__module__", None) == _CHECKPOINTS
    return None if is_ours or is_checkpoint else _SAVED_TENSORS


@contextlib.contextmanager
def no_untraced_calls(model: nn.Module) -> Iterator[None]:
    """While inside, raise SideEffectError at calls of this thread that cannot be traced.

    These are switching `requires_grad` of a parameter of the model, `as_subclass`, and, with
    recent releases of torch, functions compiled by torch.compile.
    """

    def refuse_switch(tensor: torch.Tensor, requires_grad: bool = True) -> None:
        is_switched = tensor.requires_grad != requires_grad
        if is_switched and any(tensor is each for each in model.parameters()):
            raise SideEffectError(_REQUIRES_GRAD + _ONE_SET, short=_REQUIRES_GRAD)

    flag: Any = torch._C.TensorBase.requires_grad
    calls: dict[str, Any] = {
        "requires_grad_": _refusing_wrapper(refuse_switch, torch.Tensor.requires_grad_),
        "requires_grad": property(flag.__get__, _refusing_wrapper(refuse_switch, flag.__set__)),
        "as_subclass": _refusing_wrapper(_refuse_subclass, torch.Tensor.as_subclass),
    }
    with mock.patch.multiple(torch.Tensor, **calls), _no_compiled_functions():
        yield


@contextlib.contextmanager
def _no_compiled_functions() -> Iterator[None]:
    """While inside, raise SideEffectError where a compiled function would be traced as if it were
    not compiled.

    Its kernels may round differently than the operators in that trace. torch 2.15 does so; before,
    `torch.compile` itself raised an error (`graphs.capture.refused_trace`).
    """
    from torch._dynamo import config, eval_frame
    from torch._higher_order_ops.utils import _in_hop_compile

    name = "_is_eager_on_nested_compile"
    runs_uncompiled = getattr(eval_frame, name, None)
    if runs_uncompiled is None:
        yield
        return

    def refuse() -> bool:
        runs = bool(runs_uncompiled())
        # operators such as flex_attention compile what they call in order to be recorded
        if runs and not config.force_compile_during_fx_trace and not _in_hop_compile():
            raise SideEffectError(COMPILED + CALL_ORIGINAL, short=COMPILED)
        return runs

    with mock.patch.object(eval_frame, name, in_this_thread(refuse, runs_uncompiled)):
        yield


def _refuse_subclass(_tensor: torch.Tensor, cls: type) -> None:
    """Refuse `as_subclass`, except to PyTorch's classes: tracing itself and nn.Parameter use it."""
    if cls.__module__.partition(".")[0] != "torch":
        what = _SUBCLASS.format(name=cls.__name__)
        raise SideEffectError(what + _NOT_RECORDED, short=what)
