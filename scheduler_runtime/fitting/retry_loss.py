"""`attempt`: run a part of a training step again if memory runs out in the loss.

    loss = attempt(model, lambda: criterion(model(inputs), targets))

Out-of-memory errors in the model's own passes are handled there
(`scheduler_runtime.execute.restart_step`). The loss is computed by the caller, so the caller has to
say what may run twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scheduler_runtime.execute import is_out_of_memory
from scheduler_runtime.fitting.forward import FittedForward
from scheduler_runtime.fitting.state_before_attempt import StateBeforeAttempt

T = TypeVar("T")


def attempt(model: nn.Module, step: Callable[[], T]) -> T:
    """Run a part of a training step; if memory runs out, run it again with a tighter plan.

    Before `step` runs again, these are restored: the random state of the CPU and of the model's
    device, the model's buffers, and the gradients of the model and of its inputs.

    model: a module that was given to `fit(..., on_pressure="replan")` or contains such a module, or
        a DistributedDataParallel around it.
    step: a function without arguments that runs the forward pass and the loss, and perhaps the
        backward pass, but not the optimizer's step. What it changes elsewhere (lists, metrics,
        other modules) is not restored.

    Raises the original error, with a note, if `step` has changed parameters or gradients that
    existed before, or if there is no tighter plan; ValueError for a model without such a `fit`.
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
        attempted = StateBeforeAttempt(inner)
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
        attempted.restore_and_tighten(failed)
