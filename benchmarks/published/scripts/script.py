"""A description of what a benchmark script builds and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class Script:
    """One measured call, which runs forward and backward of a module after earlier such calls.

    module: the module, on the meta device.
    batch: arguments of the call.
    unused_tensors: tensors that the script holds and the call does not use.
    gradient: the output's gradient: "none" is needed for a scalar loss; "held" is live from the
        start; "made" is made after forward.
    retains_graph: backward(retain_graph=True): what forward saved is live to the end of the call.
    accumulates: gradients of earlier calls are still there and are added to.
    drops_x_gradient: gradients of x and of a residual are set to None before each timed call.
    ops_run_before: packets of forward operators that ran before the measured call.
    has_cublas_workspace: a matrix product ran before, so that the caller's thread has a workspace
        of cuBLAS.
    has_compiled_before: other calls in the process ran torch.compile, which keeps tensors alive;
        rows do not state how many bytes.
    """

    module: nn.Module
    batch: tuple[torch.Tensor, ...] = ()
    unused_tensors: tuple[torch.Tensor, ...] = field(default=())
    gradient: Literal["none", "held", "made"] = "none"
    retains_graph: bool = False
    accumulates: bool = True
    drops_x_gradient: bool = False
    ops_run_before: tuple[str, ...] = ()
    has_cublas_workspace: bool = False
    has_compiled_before: bool = False


class FunctionModule(nn.Module):
    """Calls a function with itself and the batch. Tensors such as x are parameters of this module,
    so that they get gradients, as in the scripts."""

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
