"""Warnings that point at the user's line of code, past the frames of this project and PyTorch."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_ROOT = Path(__file__).parent.parent.parent
_PACKAGES = ("graphs", "solver", "scheduler_runtime", "checkpoint_solver")


def warn(words: str) -> None:
    """Issue a UserWarning at the innermost line that is neither in this project nor in PyTorch.

    If there is no such line (a backward pass in a thread of autograd), at the caller's line. From
    Python 3.12 on, `warnings.warn` can skip files by itself.
    """
    folders = [str(_ROOT / name) for name in _PACKAGES]
    if (torch := sys.modules.get("torch")) is not None:
        folders.append(str(Path(str(torch.__file__)).parent))
    skipped = (*(folder + os.sep for folder in folders), str(contextlib.__file__))
    level = 2  # the caller
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame, level = frame.f_back, level + 1
    warnings.warn(words, stacklevel=2 if frame is None else level)
