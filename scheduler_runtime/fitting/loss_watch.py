"""Measure the memory of a loss outside of the model, by watching its operators in one step.

A dispatch mode sees the operators from the end of the model's forward pass until the first gradient
of an output arrives. After that it does nothing, and it is left in the training's own thread: when
the output's graph is freed (that also ends the watch of a loss that never runs backward), at the
optimizer's step, or at the model's next call. If it were left within a backward pass, it would be
back afterwards, since the engine restores the state of the thread.

Some operators are not seen: compiled kernels, bytes of sparse tensors, and backward functions that
run without the mode, because their results would differ under it. Then no result is reported.
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
from scheduler_runtime.execute import WatchingMode, program_of_output
from scheduler_runtime.fitting.loss_outside import LossSeen

OnArrival = Callable[[LossSeen | None, Sequence[bool]], None]
"""Called with what was seen (None: not everything was), and which of the outputs get a gradient."""


class LossWatch(WatchingMode):
    """Watches a loss until the gradients of the outputs arrive, or until `end`."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise torch.compile would never compile a loss that is first called here."""
        return True

    def __init__(
        self, costs: CostModel, device: torch.device, known: Iterable[torch.Tensor]
    ) -> None:
        """known: tensors that the plan counts already.
        costs: the cost model, for the workspace of operators."""
        super().__init__()
        self._costs = costs.roofline if isinstance(costs, Measured) else costs
        self._device = device
        self._on_arrival: OnArrival | None = None
        self._known_storages: set[int] = set()
        self._made_bytes: dict[int, int] = {}  # storage -> its bytes
        self._read_bytes: dict[int, int] = {}
        self._taken_bytes = self._peak_bytes = 0
        self._sees_all = True
        self._is_on = self._is_paused = False
        self._hooks: list[Any] = []
        self._functions: list[weakref.ref[Any]] = []
        self._n_outputs = 0  # outputs whose graphs still exist
        for tensor in known:
            self._add_storage(tensor)

    def begin(self, output: Any, on_arrival: OnArrival) -> None:
        """Start to watch what is done with this output of a planned forward pass.

        To be called only if `can_watch`.
        """
        watch = weakref.ref(self)

        def before_optimizer(*_: Any) -> None:
            # if the watch is not over yet, this is the optimizer of another model
            if (found := watch()) is not None and found.is_over:
                found._leave_mode()

        self._hooks.append(register_optimizer_step_pre_hook(before_optimizer))
        self.watch_output(output, on_arrival)
        self.watch()
        self._is_on = True

    def watch_output(self, output: Any, on_arrival: OnArrival) -> None:
        """Also watch this output, from which the same loss may be computed. The first gradient that
        arrives for any output ends the watch."""
        planned_outputs = [t for t in nested.tensors(output) if program_of_output(t) is not None]
        for tensor in nested.tensors(output):
            self._add_storage(tensor)
        strides = {t.output_nr: t.stride() for t in planned_outputs}
        watch = weakref.ref(self)

        def on_gradients(gradients: Sequence[torch.Tensor | None]) -> None:
            if (found := watch()) is not None:
                found._end_of_loss(gradients, strides, on_arrival)

        def on_graph_freed() -> None:
            if (found := watch()) is None:
                return
            found._n_outputs -= 1
            if found._n_outputs:
                return
            found._on_arrival = None
            if not _in_backward():
                found._leave_mode()

        function: Any = planned_outputs[0].grad_fn
        self._functions.append(weakref.ref(function, lambda _reference: on_graph_freed()))
        self._n_outputs += 1
        self._hooks.append(function.register_prehook(on_gradients))
        self._on_arrival = on_arrival

    @property
    def is_on_top(self) -> bool:
        """Whether it is watching, and is the topmost mode."""
        stack = _get_current_dispatch_mode_stack()
        return self._is_on and not self.is_over and bool(stack) and stack[-1] is self

    @property
    def is_over(self) -> bool:
        """Whether the gradients have arrived, or cannot arrive any more."""
        return self._on_arrival is None

    def note_missed_backward(self) -> None:
        """Called when a backward function runs without this mode, so not everything is seen."""
        self._sees_all = False

    def end(self) -> bool:
        """Stop watching. Returns False if the mode cannot be left yet, since it is below another
        one; then it stays without effect."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._leave_mode()
        return not self._is_on

    def _leave_mode(self) -> None:
        """Leave the mode, and modes below it that are over.

        That is not possible if another mode is on top of it, or in another thread."""
        self._on_arrival = None
        while (stack := _get_current_dispatch_mode_stack()) and (top := _finished_watch(stack[-1])):
            top._is_on = False
            top.unwatch()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = self.call_operator(func, args, kwargs)
        if self._on_arrival is not None and not self._is_paused:
            self._count(OpCall(target=func, args=args, kwargs=kwargs or {}, value=value))
        return value

    def _count(self, call: OpCall) -> None:
        inputs, outputs, written = call.inputs(), call.outputs(), call.mutated()
        if not outputs and not written:
            return  # it only reads a property
        if any(tensor.layout != torch.strided for tensor in (*inputs, *outputs)):
            self._sees_all = False
        if not self._sees_all:
            return
        for tensor in inputs:
            if self._add_storage(tensor):
                if _in_backward() and not any(tensor is each for each in written):
                    # Not an accumulated gradient, so an operator that was not seen has made it.
                    self._sees_all = False
                storage = tensor.untyped_storage()
                self._read_bytes[storage._cdata] = storage.nbytes()
        for tensor in outputs:
            if self._add_storage(tensor):
                storage = tensor.untyped_storage()
                self._made_bytes[storage._cdata] = storage.nbytes()
                self._taken_bytes += storage.nbytes()
        workspace_bytes = self._costs.cost(call).workspace_bytes
        self._peak_bytes = max(self._peak_bytes, self._taken_bytes + workspace_bytes)

    def _add_storage(self, tensor: torch.Tensor) -> bool:
        """Add the tensor's storage to the known ones; whether it is on the device and was new."""
        if tensor.device != self._device or tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        if storage._cdata in self._known_storages:
            return False
        self._known_storages.add(storage._cdata)
        weakref.finalize(storage, self._forget_storage, storage._cdata).atexit = False
        return True

    def _forget_storage(self, storage: int) -> None:
        self._known_storages.discard(storage)
        self._taken_bytes -= self._made_bytes.pop(storage, 0)

    def _end_of_loss(
        self,
        gradients: Sequence[torch.Tensor | None],
        strides: dict[int, tuple[int, ...]],
        on_arrival: OnArrival,
    ) -> None:
        if self._on_arrival is None:
            return
        self._on_arrival = None
        arrived = [(n, each) for n, each in enumerate(gradients) if each is not None]
        reached = [each is not None for each in gradients]
        if not self._sees_all or any(self._add_storage(each) for _, each in arrived):
            on_arrival(None, reached)
            return
        total_bytes = sum(each.nbytes for _, each in arrived)
        if not total_bytes:
            return  # an empty batch shows nothing
        own = {each.untyped_storage()._cdata for _, each in arrived} & self._made_bytes.keys()
        copied_bytes = sum(  # gradients that the plan will copy to the strides it was traced with
            each.nbytes
            for n, each in arrived
            if not same_strides(each.shape, each.stride(), strides.get(n, each.stride()))
        )
        peak_bytes = max(self._peak_bytes, self._taken_bytes + copied_bytes) - total_bytes
        seen = LossSeen(
            read_bytes=sum(self._read_bytes.values()),
            left_bytes=self._taken_bytes - sum(self._made_bytes[each] for each in own),
            peak_bytes=max(0, peak_bytes),
            output_bytes=total_bytes,
        )
        on_arrival(seen, reached)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def can_watch() -> bool:
    """Whether no dispatch modes other than these are active: a watch can only be left on top."""
    for each in _get_current_dispatch_mode_stack():
        if (watch := _finished_watch(each)) is not None:
            watch.end()  # left by a model that was not called again
    if _in_backward():  # of a reentrant checkpoint: the engine would drop the mode, not its kernels
        return False
    return all(isinstance(each, LossWatch) for each in _get_current_dispatch_mode_stack())


@contextmanager
def losses_not_watched() -> Iterator[None]:
    """In this context (the planning of another model), operators do not count as part of a loss."""
    stack = _get_current_dispatch_mode_stack()
    paused = [each for each in stack if isinstance(each, LossWatch) and not each._is_paused]
    for each in paused:
        each._is_paused = True
    try:
        yield
    finally:
        for each in paused:
            each._is_paused = False


def _finished_watch(mode: TorchDispatchMode) -> LossWatch | None:
    """The mode, if it is a watch that is over."""
    return mode if isinstance(mode, LossWatch) and mode.is_over else None
