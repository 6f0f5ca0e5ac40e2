"""What a script of a benchmark builds and runs, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class Script:
    """One measured call: forward and backward of a module, after earlier calls of the same.

    module: on the meta device. beside: tensors that the script holds and the call does not use.
    gradient: of the output: none for a scalar loss; "held" from the start; "made" after forward.
    retains_graph: backward(retain_graph=True): what forward saved is held to the end of the call.
    accumulates: gradients of the earlier calls are still there, and are added to.
    drops_x_gradient: that of x, and of a residual, is set to None before a call that is timed.
    made_before: packets of operators of forward that ran before the measured call.
    has_multiplied: a product ran before, so that the caller's thread has a workspace of cuBLAS.
    compiles: other calls in the process ran torch.compile, which keeps tensors of theirs; rows do
        not say how many.
    """

    module: nn.Module
    batch: tuple[torch.Tensor, ...] = ()
    beside: tuple[torch.Tensor, ...] = field(default=())
    gradient: Literal["none", "held", "made"] = "none"
    retains_graph: bool = False
    accumulates: bool = True
    drops_x_gradient: bool = False
    made_before: tuple[str, ...] = ()
    has_multiplied: bool = False
    compiles: bool = False


class Applied(nn.Module):
    """A function of parameters, such as x: they get gradients, as in the scripts."""

    def __init__(self, function: Callable[..., Any], **parts: torch.Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, *batch: torch.Tensor) -> Any:
        return self.function(self, *batch)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int64)


def linear(n_in: int, n_out: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=bias, dtype=dtype, device="meta")
