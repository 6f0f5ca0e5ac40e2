"""Reads what a caller gives as `optimizer=`, for all entry points."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

GivenOptimizer: TypeAlias = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | str
"""What may be given as `optimizer=`: an optimizer of the model's parameters, possibly in another
library's wrapper; a class or function that makes one from the trainable parameters or from the
model; the name of a class of `torch.optim` ("AdamW")."""


def read_optimizer(given: GivenOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `given` stands for. A given optimizer is returned itself, without its
    wrappers.

    Raises TypeError for anything else; ValueError for an unknown name and for an optimizer that
    needs a closure (LBFGS); and what a given function raises.
    """
    made: Any = given
    if isinstance(given, str):
        made = getattr(torch.optim, given, None)
        if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
            raise ValueError(
                f"optimizer is {given!r}, which is not a class of torch.optim; give a name such as "
                '"AdamW", or the optimizer itself'
            )
    is_function = is_optimizer_factory(made)
    if is_function:
        made = _call_factory(made, model)
    while _is_wrapper(made):
        made = made.optimizer
    if not isinstance(made, torch.optim.Optimizer):
        what = "what optimizer(parameters) returned" if is_function else "optimizer"
        raise TypeError(
            f"{what} is an object of type {type(made).__name__}; give the torch.optim.Optimizer "
            "that trains the model, a function from its parameters to one (torch.optim.AdamW), or "
            'the name of a class of torch.optim ("AdamW")'
        )
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(made).__name__} steps with a closure, which runs the model as often as its "
            "values ask for, and no step of it can be planned: leave optimizer= out, and give the "
            'bytes of its state and its step as reserve="1GB" (docs/limits.md)'
        )
    return made


def is_optimizer_factory(given: GivenOptimizer) -> bool:
    """Whether the optimizer is yet to be made: a name, a class or a function is given."""
    is_optimizer = isinstance(given, torch.optim.Optimizer) or _is_wrapper(given)
    return isinstance(given, str) or (callable(given) and not is_optimizer)


def _is_wrapper(value: Any) -> bool:
    """Whether this is another library's wrapper around an optimizer (accelerate has one)."""
    return not isinstance(value, type) and isinstance(
        getattr(value, "optimizer", None), torch.optim.Optimizer
    )


def _call_factory(function: Callable[[Any], Any], model: nn.Module) -> Any:
    """What the function returns for the trainable parameters or, if that fails, for the model."""
    try:
        return function([p for p in model.parameters() if p.requires_grad])
    except (AttributeError, TypeError) as error:
        try:
            return function(model)  # lambda model: AdamW(model.parameters())
        except (AttributeError, TypeError) as other:
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(
                f"optimizer is a function, {name}, and fails: {name}(parameters) with {error!r}, "
                f"{name}(model) with {other!r}. It is called with one argument, the list of "
                "trainable parameters or the model, and returns the torch.optim.Optimizer"
            ) from None
