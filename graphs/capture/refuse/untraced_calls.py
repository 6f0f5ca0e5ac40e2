"""Refuses calls in forward that cannot be traced, but that are fine in a part that is run instead.

Without these checks the trace would fail inside of torch, with an error that does not say what
forward does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from graphs.capture.refuse.side_effects import SideEffectError
from graphs.capture.refuse.unseen_changes import refusing_wrapper

_REQUIRES_GRAD = "forward switches requires_grad of a parameter"
_ONE_SET = (
    "; a plan is for one set of parameters that get gradients. Detach where no gradient is wanted "
    "(torch.func.functional_call with detached parameters), or do this in a submodule, which is "
    "planned as one piece"
)
_SUBCLASS = "forward makes a tensor of the class {name} (as_subclass)"
_NOT_RECORDED = (
    ", whose operators cannot be recorded; use plain tensors, or do this in a submodule, which is "
    "planned as one piece"
)


@contextlib.contextmanager
def no_untraced_calls(model: nn.Module) -> Iterator[None]:
    """While inside, raise SideEffectError at calls of this thread that cannot be traced.

    These are switching `requires_grad` of a parameter of the model, and `as_subclass`.
    """

    def refuse_switch(tensor: torch.Tensor, requires_grad: bool = True) -> None:
        is_switched = tensor.requires_grad != requires_grad
        if is_switched and any(tensor is each for each in model.parameters()):
            raise SideEffectError(_REQUIRES_GRAD + _ONE_SET, short=_REQUIRES_GRAD)

    flag: Any = torch._C.TensorBase.requires_grad
    calls: dict[str, Any] = {
        "requires_grad_": refusing_wrapper(refuse_switch, torch.Tensor.requires_grad_),
        "requires_grad": property(flag.__get__, refusing_wrapper(refuse_switch, flag.__set__)),
        "as_subclass": refusing_wrapper(_refuse_subclass, torch.Tensor.as_subclass),
    }
    with mock.patch.multiple(torch.Tensor, **calls):
        yield


def _refuse_subclass(_tensor: torch.Tensor, cls: type) -> None:
    """Refuse `as_subclass`, except to PyTorch's classes: tracing itself and nn.Parameter use it."""
    if cls.__module__.partition(".")[0] != "torch":
        what = _SUBCLASS.format(name=cls.__name__)
        raise SideEffectError(what + _NOT_RECORDED, short=what)
