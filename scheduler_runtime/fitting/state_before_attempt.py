"""The state that `attempt` restores before a part of a training step runs again."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphs.capture import RandomSources
from graphs.model_calls import device_of
from scheduler_runtime.execute import RestartableStep, drop_frames


class StateBeforeAttempt:
    """The state before a function that runs a model's training forward pass, to restore it.

    It does not keep gradients alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._random = RandomSources(device_of(model), ())
        self._states = self._random.states()
        self._steps: list[RestartableStep] = []
        self._sends_buffers = self._is_replicated = False
        self._read_before: list[tuple[torch.Tensor, int, Any, int]] = []

    def note_begun(self, step: RestartableStep) -> None:
        """Note that a planned forward pass of the model begins, and the versions of what it reads.

        step: what the forward pass needs to run again.
        """
        own = () if self._steps else tuple(self._model.parameters())
        known = {id(each) for each, *_ in self._read_before}
        for each in (*own, *step.leaf_tensors):
            if id(each) not in known:
                known.add(id(each))
                grad = each.grad
                gradient_ref = None if grad is None else weakref.ref(grad)
                self._read_before.append((each, each._version, gradient_ref, _version(grad)))
        replicas = DistributedDataParallel._get_active_ddp_module()
        if replicas is not None:
            self._is_replicated = True
            self._sends_buffers |= bool(replicas.will_sync_module_buffers())
        self._steps.append(step)

    def restore_and_tighten(self, error: Exception) -> None:
        """Restore everything, and make the next plan a tighter one.

        Raises the error if that is not possible.
        """
        drop_frames(error)
        why = self._why_not_restorable()
        if why:
            error.add_note(f"attempt cannot run this again: {why}.")
            raise error
        self._steps[-1].tighten_next_step(error)
        for each in reversed(self._steps):
            each.end_backward()
            each.restore_buffers()
        for parameter, _, gradient, _ in self._read_before:
            if gradient is None:
                parameter.grad = None
        self._random.set_states(self._states)
        self._steps.clear()
        self._read_before.clear()

    def _why_not_restorable(self) -> str:
        """Why the function cannot run again; "": it can."""
        if not self._steps:
            return "no training forward pass of the model ran in it"
        if any(p._version != version for p, version, _, _ in self._read_before):
            return "it has changed parameters (an optimizer's step), which are not put back"
        if self._sends_buffers:
            return "DistributedDataParallel sends buffers in the forward pass, once on every rank"
        for parameter, _, gradient, version in self._read_before:
            now = parameter.grad
            if gradient is not None and (now is not gradient() or _version(now) != version):
                return "it has changed gradients that existed before, which are not put back"
            if self._is_replicated and gradient is None and now is not None:
                return "DistributedDataParallel has sent gradients"
        return ""


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor._version
