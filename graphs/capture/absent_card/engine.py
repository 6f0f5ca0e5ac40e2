"""Lets autograd's engine run on fake CUDA tensors, without asking a card for its stream.

The engine sums gradients on an accelerator on the stream that has computed them, or, if there is
none, on the device's current stream (torch/csrc/autograd/input_buffer.cpp), which a build without
CUDA does not have. So the engine, and only the engine, is told that gradients are on the CPU. Fake
tensors report their device from Python, where the answer can be changed; the functional wrappers of
a trace are made to do so too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture.absent_card.no_accelerator import no_accelerator

_DISPATCH_DEVICE = 10
"""Position of `dispatch_device` among the arguments of `_make_wrapper_subclass` after the class."""
_WRAPPERS = ("_compile.py", "eval_frame.py")
"""Files of PyTorch whose functions wrap a dispatch mode's method."""


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """While inside, gradients of fake CUDA tensors can be computed without a card."""
    original_make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

    def make_functional_wrapper(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is FunctionalTensor and len(args) > _DISPATCH_DEVICE:
            args = (*args[:_DISPATCH_DEVICE], True, *args[_DISPATCH_DEVICE + 1 :])
        return original_make_wrapper(cls, *args, **kwargs)

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with no_accelerator(), _EngineOnCpu():  # type: ignore[no-untyped-call]
            return _engine_run_backward(*args, **kwargs)

    own_device = property(lambda tensor: tensor.elem.device)
    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
        mock.patch.object(
            torch.Tensor, "_make_wrapper_subclass", staticmethod(make_functional_wrapper)
        ),
        mock.patch.object(FunctionalTensor, "device", own_device, create=True),
    ):
        yield


class _EngineOnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the CPU as a tensor's device if the engine asks, and the true device otherwise.

    The device may also be asked for by Python code, or by operators that it calls.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        only_moves = func is torch.ops.aten._to_copy.default and list(kwargs or {}) == ["device"]
        if only_moves and args[0].device == kwargs["device"]:
            # The engine believes that gradients are on the CPU, and moves them to their device. On
            # a card there is no such operator; here it would change the numbers in nodes' names.
            return args[0]
        value = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            return value
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
            frame = frame.f_back
        # It is the engine that asks if the innermost Python frame is the one that called it.
        is_of_engine = frame is not None and frame.f_code is _engine_run_backward.__code__
        return torch.device("cpu") if is_of_engine else value
