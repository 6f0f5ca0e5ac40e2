"""`attempt`: a part of a training step that runs again where memory runs short in the loss.

    loss = attempt(model, lambda: criterion(model(inputs), targets))

Errors in the model's own passes are met where they arise
(`scheduler_runtime.execute.restart_step`). The loss is the caller's, so the caller has to say what
may run twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scheduler_runtime.execute import is_out_of_memory
from scheduler_runtime.fitting.forward import FittedForward
from scheduler_runtime.fitting.state_before_attempt import Attempted

T = TypeVar("T")


def attempt(model: nn.Module, step: Callable[[], T]) -> T:
    """Run a part of a training step; where memory runs short, again with a tighter plan.

    model: given to `fit(..., on_pressure="replan")`, itself or a part of it, or a
        DistributedDataParallel around it.
    step: a function without arguments that runs the forward pass and the loss, and perhaps the
        backward pass; not the optimizer's step. What it changes elsewhere (lists, metrics, other
        modules) is not undone.

    Before it runs again, the random state of the CPU and of the model's device, the model's buffers
    and its gradients, and those of its inputs, are as they were. Raises the error as it came, with
    a note, where it has changed parameters or gradients that existed before, or where there is no
    tighter plan. ValueError for a model without such a plan.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    forwards = [
        forward
        for module in inner.modules()
        if isinstance(forward := module.__dict__.get("forward"), FittedForward)
    ]
    if not forwards or any(each.options.on_pressure != "replan" for each in forwards):
        raise ValueError('attempt needs a model that was given to fit(..., on_pressure="replan")')
    while True:
        attempted = Attempted(inner)
        for each in forwards:
            each.attempt = attempted
        try:
            return step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = error
        finally:
            for each in forwards:
                each.attempt = None
        attempted.again(failed)
