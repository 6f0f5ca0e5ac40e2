"""A forward put on a module instance in the place of its own; `restore_forward` undoes it."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class ReplacedForward(abc.ABC):
    """Base of everything that a plan puts in the place of `module.forward`.

    instance_forward: what another library had put on the instance before (None: nothing).
    """

    def __init__(self, model: nn.Module) -> None:
        self.instance_forward = model.__dict__.get("forward")
        self._model = model
        # sets __wrapped__: trainers inspect the signature of forward
        functools.update_wrapper(self, self.own_forward, updated=())

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The forward that the module had before."""
        if self.instance_forward is not None:
            return self.instance_forward  # type: ignore[no-any-return]
        return functools.partial(type(self._model).forward, self._model)

    @abc.abstractmethod
    def why_not_traced(self, title: str) -> str:
        """`graphs.trace` would trace this instead of the module's own forward, so it asks. title:
        how the message calls the module."""

    def constants(self) -> Iterator[torch.Tensor]:
        """Tensors that the module's own forward takes from attributes, closures and globals."""
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
