"""Traces checks of computed values, such as those by which torch.distributions refuses NaN.

`if not torch._is_all_true(valid): raise ValueError(...)` reads a value that a trace does not know.
`F.gaussian_nll_loss` checks its variances by `torch.any` in the same way. A step that continues has
passed the check, so the trace assumes that it passes, and an operator that checks the value becomes
part of the program. If the check fails in a later step, that operator raises `CheckError`, and the
module's own forward is called again, to raise its own error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from graphs.capture.as_eager.known_values import is_unknown
from graphs.capture.own_operators import define
from graphs.capture.threads import in_this_thread


class CheckError(RuntimeError):
    """A check that passed when the step was traced fails in this step."""


def _check(is_true: torch.Tensor) -> torch.Tensor:
    if not is_true.item():
        raise CheckError("a value that forward checks is not what it was when the step was planned")
    return is_true.clone()


_CHECK = define("check(Tensor is_true) -> Tensor", CPU=_check, CUDA=_check, Meta=torch.empty_like)


@contextlib.contextmanager
def record_checks(results: list[torch.Tensor]) -> Iterator[None]:
    """While inside, let checks of unknown values pass, and record an operator for each.

    results: the operators' results are appended here. The traced function must return them, or the
        operators would be removed from the program as unused.
    """
    original_all, original_any = torch._is_all_true, torch.any

    def assume_all_true(values: torch.Tensor) -> Any:
        if not is_unknown(values):
            return original_all(values)
        results.append(_CHECK(original_all(values)))
        return True

    def assume_none_is_negative(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The caller of `in_this_thread`'s function: forward's own `torch.any` is no check.
        caller = sys._getframe(2).f_code
        if caller is not F.gaussian_nll_loss.__code__ or not is_unknown(values):
            return original_any(values, *args, **kwargs)
        results.append(_CHECK(~original_any(values)))
        return False

    with (
        mock.patch.object(torch, "_is_all_true", in_this_thread(assume_all_true, original_all)),
        mock.patch.object(torch, "any", in_this_thread(assume_none_is_negative, original_any)),
    ):
        yield
