"""What a loss that the training computes takes: its operators are watched in one step.

A dispatch mode sees them from the end of the model's forward pass until the first gradient of an
output arrives. Then it does nothing more, and is taken off in the training's own thread: when the
output's graph is gone (so ends a loss that never runs backward, too), at the optimizer's step or at
the model's next call. One that is taken off within a backward pass comes back after it, since the
engine restores the state of the thread.

Some of what a loss does is not seen: compiled kernels, bytes of sparse tensors, and backward
functions that have other bits under a mode. Then nothing is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphs.costs import CostModel, Measured, OpCall
from graphs.model_calls import nested, same_strides
from scheduler_runtime.execute import Watching, maker_of
from scheduler_runtime.fitting.loss_outside import LossSeen

Arrived = Callable[[LossSeen | None, Sequence[bool]], None]
"""Is told what was seen (None: not all of it), and which of the outputs have got a gradient."""


class LossWatch(Watching):
    """Watches until the outputs' gradients arrive, or until it is ended."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile gives up a loss that is first called here, and for good."""
        return True

    def __init__(
        self, costs: CostModel, device: torch.device, known: Iterable[torch.Tensor]
    ) -> None:
        """known: tensors that the plan counts already. costs: for the workspace of operators."""
        super().__init__()
        self._costs = costs.roofline if isinstance(costs, Measured) else costs
        self._device = device
        self._arrived: Arrived | None = None
        self._known: set[int] = set()
        self._made: dict[int, int] = {}  # storage -> its bytes
        self._read: dict[int, int] = {}
        self._taken_bytes = self._peak_bytes = 0
        self._sees_all = True
        self._is_on = self._is_paused = False
        self._hooks: list[Any] = []
        self._functions: list[weakref.ref[Any]] = []
        self._n_outputs = 0  # that are there
        for tensor in known:
            self._add(tensor)

    def begin(self, output: Any, arrived: Arrived) -> None:
        """Watch what happens to the output of a planned forward pass, where `can_watch`."""
        watch = weakref.ref(self)

        def before_optimizer(*_: Any) -> None:
            # one that is not over yet goes on: this is the optimizer of another model
            if (found := watch()) is not None and found.is_over:
                found._take_off()

        self._hooks.append(register_optimizer_step_pre_hook(before_optimizer))
        self.also(output, arrived)
        self.watch()
        self._is_on = True

    def also(self, output: Any, arrived: Arrived) -> None:
        """The loss may be computed from this output as well; whichever gradient arrives first ends
        it."""
        made = [t for t in nested.tensors(output) if maker_of(t) is not None]
        for tensor in nested.tensors(output):
            self._add(tensor)
        strides = {t.output_nr: t.stride() for t in made}
        watch = weakref.ref(self)

        def gradients_are_there(gradients: Sequence[torch.Tensor | None]) -> None:
            if (found := watch()) is not None:
                found._end_of_loss(gradients, strides, arrived)

        def gradients_are_gone() -> None:
            if (found := watch()) is None:
                return
            found._n_outputs -= 1
            if found._n_outputs:
                return
            found._arrived = None
            if not _in_backward():
                found._take_off()

        function: Any = made[0].grad_fn
        self._functions.append(weakref.ref(function, lambda _gone: gradients_are_gone()))
        self._n_outputs += 1
        self._hooks.append(function.register_prehook(gradients_are_there))
        self._arrived = arrived

    @property
    def is_on_top(self) -> bool:
        """Whether it watches, and no other mode does after it."""
        stack = _get_current_dispatch_mode_stack()
        return self._is_on and not self.is_over and bool(stack) and stack[-1] is self

    @property
    def is_over(self) -> bool:
        """Whether the gradients have arrived, or cannot arrive any more."""
        return self._arrived is None

    def misses(self) -> None:
        """A backward function runs without this mode."""
        self._sees_all = False

    def end(self) -> bool:
        """Nothing is watched any more. False: it is still below another mode, and does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._take_off()
        return not self._is_on

    def _take_off(self) -> None:
        """With those below that are over. Not if another mode is on top of it, or on the stack of
        another thread."""
        self._arrived = None
        while (stack := _get_current_dispatch_mode_stack()) and (top := _over(stack[-1])):
            top._is_on = False
            top.unwatch()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = self.called(func, args, kwargs)
        if self._arrived is not None and not self._is_paused:
            self._count(OpCall(target=func, args=args, kwargs=kwargs or {}, value=value))
        return value

    def _count(self, call: OpCall) -> None:
        inputs, outputs, written = call.inputs(), call.outputs(), call.mutated()
        if not outputs and not written:
            return  # it asks for a property
        if any(tensor.layout != torch.strided for tensor in (*inputs, *outputs)):
            self._sees_all = False
        if not self._sees_all:
            return
        for tensor in inputs:
            if self._add(tensor):
                if _in_backward() and not any(tensor is each for each in written):
                    self._sees_all = False  # what is no accumulated gradient was made unseen
                storage = tensor.untyped_storage()
                self._read[storage._cdata] = storage.nbytes()
        for tensor in outputs:
            if self._add(tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = storage.nbytes()
                self._taken_bytes += storage.nbytes()
        workspace_bytes = self._costs.cost(call).workspace_bytes
        self._peak_bytes = max(self._peak_bytes, self._taken_bytes + workspace_bytes)

    def _add(self, tensor: torch.Tensor) -> bool:
        """Whether it is on a storage of the device that was not known."""
        if tensor.device != self._device or tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return False
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._gone, storage._cdata).atexit = False
        return True

    def _gone(self, storage: int) -> None:
        self._known.discard(storage)
        self._taken_bytes -= self._made.pop(storage, 0)

    def _end_of_loss(
        self,
        gradients: Sequence[torch.Tensor | None],
        strides: dict[int, tuple[int, ...]],
        arrived: Arrived,
    ) -> None:
        if self._arrived is None:
            return
        self._arrived = None
        here = [(n, each) for n, each in enumerate(gradients) if each is not None]
        reached = [each is not None for each in gradients]
        if not self._sees_all or any(self._add(each) for _, each in here):
            arrived(None, reached)
            return
        total_bytes = sum(each.nbytes for _, each in here)
        if not total_bytes:
            return  # of an empty batch: nothing is to be learned
        own = {each.untyped_storage()._cdata for _, each in here} & self._made.keys()
        copied_bytes = sum(  # the plan's own, in the strides that it was traced with
            each.nbytes
            for n, each in here
            if not same_strides(each.shape, each.stride(), strides.get(n, each.stride()))
        )
        peak_bytes = max(self._peak_bytes, self._taken_bytes + copied_bytes) - total_bytes
        seen = LossSeen(
            read_bytes=sum(self._read.values()),
            left_bytes=self._taken_bytes - sum(self._made[each] for each in own),
            peak_bytes=max(0, peak_bytes),
            output_bytes=total_bytes,
        )
        arrived(seen, reached)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def can_watch() -> bool:
    """Not inside of other modes than these: the top one is taken off when one of them ends."""
    for each in _get_current_dispatch_mode_stack():
        if (watch := _over(each)) is not None:
            watch.end()  # of a model that was not called again
    if _in_backward():  # of a reentrant checkpoint: the engine would drop the mode, not its kernels
        return False
    return all(isinstance(each, LossWatch) for each in _get_current_dispatch_mode_stack())


@contextmanager
def not_watched() -> Iterator[None]:
    """What runs in it (the planning of another model) is no part of a loss."""
    stack = _get_current_dispatch_mode_stack()
    paused = [each for each in stack if isinstance(each, LossWatch) and not each._is_paused]
    for each in paused:
        each._is_paused = True
    try:
        yield
    finally:
        for each in paused:
            each._is_paused = False


def _over(mode: TorchDispatchMode) -> LossWatch | None:
    return mode if isinstance(mode, LossWatch) and mode.is_over else None
