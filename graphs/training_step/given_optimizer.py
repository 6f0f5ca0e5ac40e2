"""What a caller gives as `optimizer=`, read in one place for all entry points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

GivenOptimizer: TypeAlias = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | str
"""An optimizer of the model's parameters, also in the wrapper of another library; a class or a
function from the trainable parameters, or from the model, to one; the name of a class of
`torch.optim` ("AdamW")."""


def read_optimizer(given: GivenOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that is meant; one that is given is returned as it is, out of its wrappers.

    Raises TypeError for anything else; ValueError for an unknown name; what the function raises.
    """
    made: Any = given
    if isinstance(made, str):
        made = _named(made)
    is_function = is_made_from(made)
    if is_function:
        made = _made(made, model)
    while _is_wrapper(made):
        made = made.optimizer
    if not isinstance(made, torch.optim.Optimizer):
        what = "what optimizer(parameters) returned" if is_function else "optimizer"
        raise TypeError(
            f"{what} is an object of type {type(made).__name__}; give the torch.optim.Optimizer "
            "that trains the model, a function from its parameters to one (torch.optim.AdamW), or "
            'the name of a class of torch.optim ("AdamW")'
        )
    return made


def is_made_from(given: GivenOptimizer) -> bool:
    """Whether it stands for an optimizer that is yet to be made: its name, or a function."""
    if isinstance(given, str):
        return True
    return (
        callable(given) and not isinstance(given, torch.optim.Optimizer) and not _is_wrapper(given)
    )


def _is_wrapper(value: Any) -> bool:
    """Whether another library has put this around an optimizer (accelerate does)."""
    return not isinstance(value, type) and isinstance(
        getattr(value, "optimizer", None), torch.optim.Optimizer
    )


def _named(name: str) -> Any:
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(
            f'optimizer is {name!r}, which is not a class of torch.optim; "AdamW", say, or the '
            "optimizer itself"
        )
    return found


def _made(function: Callable[[Any], Any], model: nn.Module) -> Any:
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
