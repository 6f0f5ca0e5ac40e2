"""Reject arguments that a function does not take, and suggest what was probably meant."""

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
"""(function, argument) -> what to call instead, for arguments that another function takes."""

WITHOUT_NAME = {
    "fit": "; it takes no batch, but plans at the first step, with the batch of that step"
}
"""Function -> what else to say if it gets too many arguments without a name."""


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first unknown argument, suggesting the closest known one.

    function: the function's name, for the message.
    given: the names of the keyword arguments that it was called with.
    known: the names that it takes.
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
    """Decorate a function to suggest the right name for a misspelt keyword argument, and to ask for
    the names of arguments that have to be given by name.

    If the function passes unknown keyword arguments on (`**options`), only those that resemble a
    required one that is missing are rejected.
    """
    parameters = inspect.signature(function).parameters.values()
    unnamed = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    known = [each.name for each in parameters]
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters)
    required = [
        each.name
        for each in parameters
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given: Iterable[str] = kwargs
        if passes_on:
            missing = [name for name in required if name not in kwargs]
            unknown = [name for name in kwargs if name not in known]
            given = [name for name in unknown if difflib.get_close_matches(name, missing, n=1)]
        check_names(function.__name__, given, known)
        if len(args) > len(unnamed):
            named = next((each for each in (*required, *known) if each not in unnamed), None)
            raise TypeError(
                f"{function.__name__}() was given {len(args)} arguments without a name and takes "
                f"{len(unnamed)} ({', '.join(unnamed)})"
                + (f"; give the others by name, such as {named}=..." if named else "")
                + WITHOUT_NAME.get(function.__name__, "")
            )
        return function(*args, **kwargs)

    return call
