"""Keeps the thread's dispatch keys as they are, whatever a trace that fails leaves behind.

PyTorch's Python code keeps some guards in local variables (`_str`, which makes the words for a
tensor). When such a guard is freed, it sets the keys to what they were when it was made. If the
function raises an error inside a transform (`torch.func.linearize`), the error's traceback holds
the guard, and when that is freed at last, autograd's keys stay off for all models of the process.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch

_GUARD = torch._C._DisableFuncTorch.__name__


@contextlib.contextmanager
def dispatch_keys_kept() -> Iterator[None]:
    """A context after which the dispatch keys are those of now, also later on."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        try:
            yield
        except BaseException as error:
            _free_guards(error)
            raise


def _free_guards(error: BaseException) -> None:
    """Free the variables of functions that hold a guard, in the tracebacks of the error and of the
    errors that led to it. Other frames stay: the search for opaque parts looks at their variables.
    """
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or any(each is other for other in found):
            continue
        found.append(each)
        waiting += [each.__cause__, each.__context__]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if _GUARD in frame.f_code.co_names:
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
