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
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from graphs.capture.as_eager.known_values import is_unknown


class CheckError(RuntimeError):
    """A check that passed when the step was traced fails in this step."""


def _check(is_true: torch.Tensor) -> torch.Tensor:
    if not is_true.item():
        raise CheckError("a value that forward checks is not what it was when the step was planned")
    return is_true.clone()


_library: Any = torch.library.Library("checkpoint_solver", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("check(Tensor is_true) -> Tensor")
_library.impl("check", torch.empty_like, "Meta")
for _device in ("CPU", "CUDA"):
    _library.impl("check", _check, _device)
_CHECK = torch.ops.checkpoint_solver.check.default


@contextlib.contextmanager
def record_checks(results: list[torch.Tensor]) -> Iterator[None]:
    """While inside, let checks of unknown values pass, and record an operator for each.

    results: the operators' results are appended here. The traced function must return them, or the
        operators would be removed from the program as unused.
    """
    here, original = threading.get_ident(), torch._is_all_true

    def assume_all_true(values: torch.Tensor) -> Any:
        if threading.get_ident() != here or not is_unknown(values):
            return original(values)
        results.append(_CHECK(original(values)))
        return True

    def assume_none_is_negative(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code  # forward's own `torch.any` is no check
        is_check = caller is F.gaussian_nll_loss.__code__ and threading.get_ident() == here
        if not is_check or not is_unknown(values):
            return original_any(values, *args, **kwargs)
        results.append(_CHECK(~original_any(values)))
        return False

    original_any = torch.any
    with (
        mock.patch.object(torch, "_is_all_true", assume_all_true),
        mock.patch.object(torch, "any", assume_none_is_negative),
    ):
        yield
