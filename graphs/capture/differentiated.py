"""Which modules take part in gradients that forward takes itself, while a step is traced.

PyTorch's hooks of saved tensors, and its checkpoints, which are made of such hooks, do not run as
planned there. The gradient that forward takes unpacks what the modules before it have saved, and
what its own graph saves of this is held until the backward pass, which unpacks it again. Inside
transforms of torch.func and under forward-mode differentiation such hooks raise an error, or give
a checkpoint's recomputation other tensors to save than the first run had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd import forward_ad

from graphs.capture.refuse import around_module_calls
from graphs.capture.threads import in_this_thread


@contextlib.contextmanager
def recording_differentiated(model: nn.Module) -> Iterator[dict[str, None]]:
    """Use it around a call of `model`; yields the paths of such modules, in order.

    These are the modules called within a transform, and those whose call has begun when forward
    asks for a gradient; some of the latter may have nothing to do with that gradient.
    """
    paths = {module: name for name, module in model.named_modules()}
    begun: dict[str, None] = {"": None}
    found: dict[str, None] = {}
    run_engine = torch.autograd._engine_run_backward

    def before(module: nn.Module) -> None:
        if module in paths:
            begun[paths[module]] = None
            if _in_transform():
                found[paths[module]] = None

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        found.update(begun)
        return run_engine(*args, **kwargs)

    with (
        around_module_calls(before),
        mock.patch.object(
            torch.autograd, "_engine_run_backward", in_this_thread(run_backward, run_engine)
        ),
    ):
        yield found


def _in_transform() -> bool:
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )
