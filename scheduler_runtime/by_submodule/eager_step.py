"""A training step in eager mode that can be observed and measured, and has no side effects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from graphs.capture import (
    SideEffectError,
    attributes_unchanged,
    has_paired_hooks,
    no_generators_made,
)
from graphs.model_calls import TraceError, nested
from scheduler_runtime.execute import remove_torch_checkpoint
from scheduler_runtime.measuring import (
    TrainingStep,
    buffers_and_random_state_restored,
    no_garbage,
    peak_above_bytes,
)


@contextlib.contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """A context that begins without gradients; after it, buffers, gradients and random state are as
    before."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with buffers_and_random_state_restored(model):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def hooks_keep_nothing(model: nn.Module) -> Iterator[None]:
    """A context for a forward pass without a backward pass: raise TraceError if a submodule has
    hooks of both passes, and its attributes or those of its parameters change.

    Such hooks need one forward pass per backward pass, while a checkpointed submodule runs two. All
    attributes are restored.
    """
    hooked = {name: each for name, each in model.named_modules() if has_paired_hooks(each)}
    owned = [parameter for each in hooked.values() for parameter in each.parameters(recurse=False)]
    before = [(vars(parameter), dict(vars(parameter))) for parameter in owned]
    is_changed = False
    try:
        with contextlib.ExitStack() as stack:
            for module in hooked.values():
                stack.enter_context(attributes_unchanged(module))
            yield
    except SideEffectError:
        is_changed = True
    finally:
        for attributes, old in before:
            is_changed |= [*map(id, attributes.values())] != [*map(id, old.values())]
            attributes.clear()
            attributes.update(old)
    if is_changed:
        raise TraceError(
            f"hooks of submodules ({min(hooked)!r} is one) keep something of the forward pass for "
            "the backward pass, and a submodule with a checkpoint runs two forward passes per "
            "backward pass; train without a plan, with smaller batches if memory is short"
        )


class ObservedStep(TrainingStep):
    """The training step that is planned by submodules."""

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of parameters, buffers and batch, by kind; each storage counts once."""
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for kind, tensors in (
            ("parameter", self.model.parameters()),
            ("buffer", self.model.buffers()),
            ("input", nested.tensors(self.batch)),
        ):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        return sizes

    @contextlib.contextmanager
    def changed_state(self) -> Iterator[tuple[str, ...]]:
        """A context that yields the names of the parameters and buffers that a forward pass
        changes. On leaving it, they have the values that they have now."""
        state = self._named_state()
        # in host memory: the device may have no room for the parameters twice
        copies = {id(t): t.detach().to("cpu", copy=True) for t in state.values()}
        before = {name: copies[id(tensor)] for name, tensor in state.items()}
        with state_restored(self.model):
            with hooks_keep_nothing(self.model), no_generators_made(self.model):
                self.forward()
            self.release()
            changed = {
                name: before[name]
                for name, tensor in self._named_state().items()
                if not tensor.detach().cpu().equal(before[name])
            }
        del before, copies
        try:
            yield tuple(changed)
        finally:
            after = self._named_state()
            with torch.no_grad():
                for name, value in changed.items():
                    after[name].copy_(value)

    def _named_state(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers, those of shared modules under each of their names."""
        return {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }

    def peak_bytes(self, put_checkpoints: Callable[[], object]) -> int:
        """The peak of one step with a plan, resident bytes included.

        put_checkpoints: puts the plan's checkpoints into the model; they are removed afterwards.
        """
        put_checkpoints()
        try:
            with state_restored(self.model):
                self.run()  # memory that is allocated once, by the first step, does not count
            with state_restored(self.model), no_garbage(self.device):
                above_bytes = peak_above_bytes(self.run, self.device)
        finally:
            self.release()
            remove_torch_checkpoint(self.model)
        return sum(self.resident_bytes().values()) + above_bytes
