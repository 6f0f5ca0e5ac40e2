"""Defines operators of the namespace `checkpoint_solver`, for what a trace would lose otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("checkpoint_solver", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, *, is_random: bool = False, **kernels: Callable[..., object]) -> Any:
    """Define an operator, and return it.

    is_random: whether it draws random numbers, so that a recomputation replays its random state.
    kernels: dispatch key -> kernel.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.nondeterministic_seeded,) if is_random else ()
    LIBRARY.define(schema, tags=tags)
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key)
    return getattr(torch.ops.checkpoint_solver, name).default
