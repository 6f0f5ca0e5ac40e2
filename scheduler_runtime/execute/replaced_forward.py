"""A forward put on a module instance in the place of its own; `restore_forward` undoes it."""

from __future__ import annotations

import abc
import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx._symbolic_trace as fx
from torch import nn


def is_exported() -> bool:
    """Whether torch.export, torch.jit.trace or torch.fx calls, to write down the operators."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing() or fx.is_fx_symbolic_tracing()


def _own(name: str) -> Any:
    """An attribute of the module's own forward."""
    return property(lambda self: getattr(self.__wrapped__, name))


class ReplacedForward(abc.ABC):
    """Base of everything that a plan puts in the place of `module.forward`.

    To tools that export it is the module's own forward: what they make has no plan.

    instance_forward: what another library had put on the instance before (None: nothing).
    """

    def __init__(self, model: nn.Module) -> None:
        self.instance_forward = model.__dict__.get("forward")
        self._model = model

    # What torch.export and trainers read. Not kept on the instance: a copy has its own.
    __name__ = _own("__name__")
    __code__ = _own("__code__")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For `inspect.signature`."""
        return self.instance_forward or types.MethodType(type(self._model).forward, self._model)

    @property
    def __globals__(self) -> dict[str, Any]:
        """torch.jit.script asks; it takes functions and methods only. torch.fx can do without."""
        raise AttributeError(
            f"{type(self._model).__name__} has a plan, and torch.jit.script cannot compile it: "
            "checkpoint_solver.remove(model) before exporting, or torch.jit.trace"
        )

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The forward that the module had before."""
        if self.instance_forward is not None:
            return self.instance_forward  # type: ignore[no-any-return]
        return functools.partial(type(self._model).forward, self._model)  # torch.compile takes it

    @abc.abstractmethod
    def why_not_traced(self, title: str) -> str:
        """`graphs.trace` would trace this instead of the module's own forward, so it asks. title:
        how the message calls the module."""

    def constants(self) -> Iterator[torch.Tensor]:
        """Tensors that the module's own forward takes from attributes, closures and globals."""
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exported():
            return self.exported(*args, **kwargs)
        return self.run(*args, **kwargs)

    def exported(self, *args: Any, **kwargs: Any) -> Any:
        """A forward pass whose operators are written down."""
        return self.own_forward(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """A forward pass of the training or of an evaluation."""
        return self.own_forward(*args, **kwargs)


def restore_forward(module: nn.Module) -> None:
    """Put the module's own forward back; a module that has it stays as it is."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, ReplacedForward):
        del module.forward
        if forward.instance_forward is not None:
            module.forward = forward.instance_forward


@contextlib.contextmanager
def own_forwards(model: nn.Module) -> Iterator[None]:
    """The model without its plan, in this context: what the plan has made is kept."""
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
