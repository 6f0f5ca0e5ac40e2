"""A misspelt keyword argument is refused with the name that was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
ELSEWHERE = {
    ("fit", "parameters"): "plans with parameters in host memory are made by "
    'solve(..., parameters="auto") and run by apply()'
}
"""By function and argument: what takes it instead."""


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first given name that is not known, with the nearest one that is.

    function: its name, for the message.
    """
    names = list(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            if (function, name) in ELSEWHERE:
                hint = f"; {ELSEWHERE[function, name]}"
            raise TypeError(f"{function}() takes no argument {name!r}{hint}")


def names_checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, which says what was meant where a keyword argument is misspelt."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        check_names(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return call
