"""Functions that are planned as one piece: a loss in a model's own forward that asks SciPy, say.

A function is found by its module and name ("package.losses:matched"). Where it is called is not
known (a table of losses, another name), so its code is replaced while a step is traced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from graphs.capture.opaque.methods import called_method, is_method
from graphs.capture.own_failure import frames_of

_COLON = ":"


class CalledFunction(nn.Module):
    """Calls a function. It has no parameters."""

    def __init__(self, function: types.FunctionType) -> None:
        super().__init__()
        self.function = function
        # with a code object of its own: that of the function is replaced
        self._plain = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        self._plain.__kwdefaults__ = function.__kwdefaults__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain(*args, **kwargs)

    @contextlib.contextmanager
    def called_instead(self) -> Iterator[None]:
        """A call of the function in this thread calls this module while inside."""
        here, own = threading.get_ident(), self.function.__code__

        def target(*args: Any, **kwargs: Any) -> Any:
            function: Callable[..., Any] = self if threading.get_ident() == here else self._plain
            return function(*args, **kwargs)

        def calls(*args: Any, **kwargs: Any) -> Any:
            function: Any = "target"
            return function(*args, **kwargs)

        # Code has no closure to find the target in: it becomes a constant of the code.
        code = calls.__code__
        constants: Any = tuple(target if each == "target" else each for each in code.co_consts)
        self.function.__code__ = code.replace(co_consts=constants)
        try:
            yield
        finally:
            self.function.__code__ = own


def is_function(path: str) -> bool:
    return _COLON in path


def piece_at(model: nn.Module, path: str) -> nn.Module:
    """The submodule with this path, or what calls the method or the function with this name.

    Raises AttributeError, ImportError where there is none.
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
    """The name of the first function that the model's own forward calls on the way to the error.

    None: there is none that can be a piece.
    """
    inside = False
    for frame in frames_of(error):
        code, package = frame.f_code, str(frame.f_globals.get("__name__"))
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name == "forward" and first is model:
            inside = True
        elif inside and package.partition(".")[0] not in ("torch", "contextlib", "graphs"):
            function = getattr(sys.modules.get(package), code.co_name, None)
            if _can_be_piece(function) and function.__code__ is code:  # type: ignore[union-attr]
                return f"{package}{_COLON}{code.co_name}"
    return None


def holds_tensors(value: object) -> bool:
    """Whether a tensor or a module is in the object, its attributes or its containers."""
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
            stack += each
        else:
            stack += getattr(each, "__dict__", {}).values()
    return False


def _can_be_piece(function: object) -> bool:
    """Whether it is a plain function of a module: a decorated one is another's closure."""
    return isinstance(function, types.FunctionType) and function.__closure__ is None


_called_function = functools.cache(CalledFunction)
