"""The state before a step, to undo it or run it again: buffers, generators, and which gradients
existed."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from graphs.capture import RandomSources
from graphs.model_calls import local_part
from scheduler_runtime.execute.copy_streams import host_memory
from scheduler_runtime.execute.spill_file import DiskError


class StateBeforeStep:
    """Copies of everything that a step changes, so that it can be undone or run again.

    written: the tensors that the forward pass writes.
    random: the generators that it draws from.
    on_host: whether to keep the copies in host memory, for a plan that counts no device memory for
        them.
    copies: whether to copy what is written. If not, only the generators can be restored, and the
        results of the forward pass must not depend on what it writes.
    counts_states: whether the plan counts memory for the generators' states. If not, they are kept
        as bytes, not as tensors.
    """

    def __init__(
        self,
        written: Sequence[torch.Tensor],
        random: Sequence[RandomSources],
        *,
        on_host: bool,
        copies: bool = True,
        counts_states: bool = True,
    ) -> None:
        self._written = list(written)
        self.has_copies = copies
        copied = self._written if copies else []
        self._values = [(each, _copy_of(each, on_host=on_host)) for each in copied]
        self._random = tuple(random)
        states = [each.states() for each in self._random]
        self._counts_states = counts_states
        self._states: list[Any] = states if counts_states else [*map(pickle.dumps, states)]
        self._versions = self._versions_now()
        self._has_forward_ended = False
        self._is_only_writer = True
        self._has_delivered = False
        self._leaves_without_gradient: Mapping[fx.Node, torch.Tensor] = {}
        self._cannot_undo_all = False

    @property
    def values(self) -> list[torch.Tensor]:
        """Copies of the tensors."""
        return [copy for _, copy in self._values]

    @property
    def has_random(self) -> bool:
        """Whether the generators can be restored."""
        return bool(self._random)

    @contextmanager
    def put_back(self, *, runs_forward: bool) -> Iterator[None]:
        """In this context, buffers and generators are as before the forward pass; afterwards they
        are as they are now.

        runs_forward: whether the forward pass runs inside. If nothing else has written the buffers,
            it writes the same values again, and they need not be restored.
        """
        # plans count device memory for these copies only where no forward pass runs
        present = StateBeforeStep(self._written, self._random, on_host=runs_forward)
        self._is_only_writer &= self.is_last_writer
        self.restore()
        is_same = False
        try:
            yield
            is_same = runs_forward and self._is_only_writer and self.has_copies
        finally:
            if not is_same:
                present.restore_tensors()
            self.forward_ended()
            present.restore_random()

    def forward_ended(self) -> None:
        """Note that the forward pass has ended, and the versions of what it has written."""
        self._versions, self._has_forward_ended = self._versions_now(), True

    def backward_begins(self, leaves: Mapping[fx.Node, torch.Tensor]) -> None:
        """Note which leaves have no gradient yet.

        leaves: parameters and inputs of the step whose gradients are accumulated in `.grad`."""
        self._cannot_undo_all |= self._has_delivered  # by an earlier backward pass
        self._leaves_without_gradient = {
            node: each for node, each in leaves.items() if each.grad is None
        }

    def cannot_undo(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether gradients for any of these nodes cannot be undone: they are added to existing
        ones, or go on to the operator that has made the tensor."""
        return any(node not in self._leaves_without_gradient for node in nodes)

    def note_delivered(self, nodes: Iterable[fx.Node]) -> None:
        """Note that the gradients of these nodes have left the step."""
        delivered = list(nodes)
        self._has_delivered |= bool(delivered)
        self._cannot_undo_all |= self.cannot_undo(delivered)

    @property
    def is_last_writer(self) -> bool:
        """Whether nothing has written the tensors since the forward pass."""
        return not self._has_forward_ended or self._versions == self._versions_now()

    def restore_tensors(self) -> None:
        with torch.no_grad():
            for tensor, copy in self._values:
                local_part(tensor).copy_(copy)

    def restore_random(self) -> None:
        for each, states in zip(self._random, self._states, strict=True):
            each.set_states(states if self._counts_states else pickle.loads(states))

    def restore(self) -> None:
        self.restore_tensors()
        self.restore_random()

    def undo_after(self, error: DiskError) -> DiskError:
        """Undo the step as far as possible; returns the error with what could be undone."""
        for leaf in self._leaves_without_gradient.values():
            leaf.grad = None
        gradients = "No gradient of this forward pass has been added"
        if self._cannot_undo_all:
            gradients = (
                "Gradients of this forward pass have been added to earlier ones in part: set all "
                "to None before the next step"
            )
        state = "as before that pass"
        if self._is_only_writer and self.is_last_writer:
            self.restore()
        else:
            state = "not as before that pass: another one has written buffers since"
        detailed = DiskError(f"{error}. {gradients}. Buffers and random state are {state}")
        for note in getattr(error, "__notes__", ()):
            detailed.add_note(note)
        return detailed

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor, _ in self._values]


def _copy_of(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    values = local_part(tensor).detach()
    # the host memory is pinned, so the host need not wait for the device
    return host_memory(values).copy_(values, non_blocking=True) if on_host else values.clone()
