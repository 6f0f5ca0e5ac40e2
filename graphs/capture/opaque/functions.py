"""Functions that are planned as one piece, such as a loss in a model's forward that calls SciPy.

A function is identified by its module and name ("package.losses:matched"). It may be called by
another name or from a table of losses, so its code object is replaced while a step is traced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphs.capture.opaque.methods import called_method, is_method
from graphs.capture.own_failure import frames_of
from graphs.capture.threads import in_this_thread

_COLON = ":"


class CalledFunction(nn.Module):
    """A module without parameters that calls a function."""

    def __init__(self, function: types.FunctionType) -> None:
        super().__init__()
        self.function = function
        # A copy with a code object of its own, since that of the function is replaced.
        self._plain = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        self._plain.__kwdefaults__ = function.__kwdefaults__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain(*args, **kwargs)

    @contextlib.contextmanager
    def called_instead(self) -> Iterator[None]:
        """While inside, calls of the function in this thread call this module instead."""
        original_code = self.function.__code__
        target = in_this_thread(self, self._plain)

        def calls(*args: Any, **kwargs: Any) -> Any:
            function: Any = "target"
            return function(*args, **kwargs)

        # The code that replaces the function's cannot have a closure: the target is a constant.
        code = calls.__code__
        constants: Any = tuple(target if each == "target" else each for each in code.co_consts)
        self.function.__code__ = code.replace(co_consts=constants)
        try:
            yield
        finally:
            self.function.__code__ = original_code


def is_function(path: str) -> bool:
    """Whether the path of an opaque part is that of a function."""
    return _COLON in path


def piece_at(model: nn.Module, path: str) -> nn.Module:
    """The submodule with this path, or a module that calls the method or function of this name.

    Raises AttributeError or ImportError if there is none.
    """
    if is_method(path):
        return called_method(model, path)
    if not is_function(path):
        return model.get_submodule(path)
    package, _, name = path.partition(_COLON)
    function = getattr(importlib.import_module(package), name)
    if not _can_be_piece(function):
        raise AttributeError(f"{path} is no function of its own")
    return _called_function(function)


def outermost_function(model: nn.Module, error: BaseException) -> str | None:
    """The first function that the model's own forward has called on the way to the error.

    Returns its path ("package.losses:matched"); None if no such function can be an opaque part.
    """
    is_inside = False
    for frame in frames_of(error):
        code, package = frame.f_code, str(frame.f_globals.get("__name__"))
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name == "forward" and first is model:
            is_inside = True
        elif is_inside and package.partition(".")[0] not in ("torch", "contextlib", "graphs"):
            function = getattr(sys.modules.get(package), code.co_name, None)
            if _can_be_piece(function) and function.__code__ is code:  # type: ignore[union-attr]
                return f"{package}{_COLON}{code.co_name}"
    return None


def holds_tensors(value: object) -> bool:
    """Whether the object is or holds a tensor or a module, in attributes or containers."""
    stack, seen = [value], set[int]()
    while stack:
        each = stack.pop()
        if isinstance(each, torch.Tensor | nn.Module):
            return True
        if id(each) in seen or isinstance(each, type | types.ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            stack += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            stack += iter(each)
        else:
            stack += getattr(each, "__dict__", {}).values()
    return False


def _can_be_piece(function: object) -> bool:
    """Whether the object is a plain Python function without a closure (a decorated one has one)."""
    return isinstance(function, types.FunctionType) and function.__closure__ is None


_called_function = functools.cache(CalledFunction)
