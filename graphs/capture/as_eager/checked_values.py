"""Checks of values that the step computes, as nodes: torch.distributions refuses NaN so.

`if not torch._is_all_true(valid): raise ValueError(...)` reads a value that no trace knows. A step
that goes on has read True, so that is what the trace is told, and an operator looks at the value in
each step. Where it is False, the operator raises `CheckError`, and the module's own forward, called
again, raises the error that it would have raised.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from graphs.capture.as_eager.known_values import is_unknown


class CheckError(RuntimeError):
    """A check that was traced as passed does not pass in this step."""


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
def checks_noted(noted: list[torch.Tensor]) -> Iterator[None]:
    """Unknown values that are checked inside pass; what the operator returns is added to `noted`,
    so that it can be returned by what is traced, and stays in the program."""
    here, original = threading.get_ident(), torch._is_all_true

    def passes(values: torch.Tensor) -> Any:
        if threading.get_ident() != here or not is_unknown(values):
            return original(values)
        noted.append(_CHECK(original(values)))
        return True

    with mock.patch.object(torch, "_is_all_true", passes):
        yield
