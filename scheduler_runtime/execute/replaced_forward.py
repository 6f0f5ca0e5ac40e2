"""Replace the forward of a module instance; `restore_forward` undoes it."""

from __future__ import annotations

import abc
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx._symbolic_trace as fx
from torch import nn


def is_exporting() -> bool:
    """Whether torch.export, torch.jit.trace or torch.fx is tracing now."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing() or fx.is_fx_symbolic_tracing()


def _own_forward_property(name: str) -> Any:
    """A property that returns this attribute of the module's own forward."""
    return property(lambda self: getattr(self.__wrapped__, name))


class ReplacedForward(abc.ABC):
    """Base class of everything that a plan puts in the place of `module.forward`.

    Tools that export or trace the module see its own forward, so what they make has no plan.

    instance_forward: a forward that another library had set on the instance (None: there is none).
    """

    def __init__(self, model: nn.Module) -> None:
        self.instance_forward = model.__dict__.get("forward")
        self._model = model

    # Read by torch.export and trainers. Properties, so that a copy of the module has its own.
    __name__ = _own_forward_property("__name__")
    __code__ = _own_forward_property("__code__")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For `inspect.signature`."""
        return self.instance_forward or types.MethodType(type(self._model).forward, self._model)

    @property
    def __globals__(self) -> dict[str, Any]:
        """Raises an error that says what to do: torch.jit.script reads this, but only compiles
        functions and methods. torch.fx does not need it."""
        raise AttributeError(
            f"{type(self._model).__name__} has a plan, and torch.jit.script cannot compile it: "
            "checkpoint_solver.remove(model) before exporting, or torch.jit.trace"
        )

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The forward that the module had before."""
        if self.instance_forward is not None:
            return self.instance_forward  # type: ignore[no-any-return]
        # torch.compile accepts a partial
        return functools.partial(type(self._model).forward, self._model)

    @abc.abstractmethod
    def why_not_traced(self, title: str) -> str:
        """The error message of `graphs.trace`, which would trace this instead of the module's own
        forward.

        title: what the message calls the module."""

    def constants(self) -> Iterator[torch.Tensor]:
        """Tensors that the module's own forward reads from attributes, closures and globals."""
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting():
            return self.run_for_export(*args, **kwargs)
        if not torch.compiler.is_compiling():
            caller = _calling_module(sys._getframe(1))
            # a module of another class, to which this was assigned, means the planned one
            if caller is not self._model and isinstance(caller, type(self._model)):
                return self._own_forward_of(caller)(*args, **kwargs)
        return self.run(*args, **kwargs)

    def _own_forward_of(self, other: nn.Module) -> Callable[..., Any]:
        """What runs without a plan in a module that holds this object because it was made with the
        attributes of the planned one, but has other parameters (the fast weights of
        meta-learning)."""
        return self.instance_forward or types.MethodType(type(other).forward, other)

    def run_for_export(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass that torch.export, torch.jit.trace or torch.fx traces."""
        return self.own_forward(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass of training or evaluation."""
        return self.own_forward(*args, **kwargs)


_CALL = nn.Module._call_impl.__code__
_CALLS = {_CALL, *(each for each in _CALL.co_consts if isinstance(each, types.CodeType))}
"""With hooks, a function inside of `_call_impl` calls forward."""


def _calling_module(frame: types.FrameType) -> nn.Module | None:
    """The module whose `__call__` has this frame (None if it is a frame of anything else).

    A forward in the attributes of a module gets no `self`."""
    return frame.f_locals["self"] if frame.f_code in _CALLS else None


def restore_forward(module: nn.Module) -> None:
    """Give the module its own forward back, if it was replaced."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, ReplacedForward):
        del module.forward
        if forward.instance_forward is not None:
            module.forward = forward.instance_forward


@contextlib.contextmanager
def without_plans(model: nn.Module) -> Iterator[None]:
    """In this context, the model runs without its plan; afterwards the plan is back unchanged."""
    replaced = [
        (module, forward)
        for module in model.modules()
        if isinstance(forward := module.__dict__.get("forward"), ReplacedForward)
    ]
    for module, _ in replaced:
        restore_forward(module)
    try:
        yield
    finally:
        for module, forward in replaced:
            module.forward = forward
