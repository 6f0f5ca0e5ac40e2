"""Rounding errors of a step's results, measured against the same step in float64.

They decide whether a plan that changes last bits passes: the error of each of its results may be at
most FACTOR times the error of the step without a plan, or the error of rounding the result once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FACTOR = 2.0


class InFloat64(TorchDispatchMode):
    """In this mode, casts of float64 tensors to shorter floating-point dtypes do nothing.

    Otherwise a model's own casts (of its outputs for the loss, for example) would round.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        is_cast = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64
        if is_cast and dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Error:
    """The errors of one result, relative to the step in float64 (`relative_error`).

    name: the result's name.
    plan: the error of the step with the plan.
    plain: the error of the step without a plan.
    least: the error of rounding once to the result's dtype.
    """

    name: str
    plan: float
    plain: float
    least: float

    @property
    def share(self) -> float:
        """The plan's error as a share of the allowed error."""
        return self.plan / max(FACTOR * self.plain, self.least)

    def __str__(self) -> str:
        return f"{self.name}: {self.plan:.1e} with the plan, {self.plain:.1e} without"


def errors(
    plan: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
) -> Iterator[Error]:
    """The errors of all floating-point results that all three steps have.

    plan, plain, exact: results by name, of the step with the plan, without it, and in float64.
    """
    for name in plan.keys() & plain.keys() & exact.keys():
        dtype = plain[name].dtype
        if dtype.is_floating_point:
            least = torch.finfo(dtype).eps / 2
            one, other = (relative_error(found[name], exact[name]) for found in (plan, plain))
            yield Error(name, one, other, least)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference divided by the norm of `exact`, over finite numbers.

    Infinite if their shapes differ, or if they are finite at different places.
    """
    if found.shape != exact.shape or not torch.equal(found.isfinite(), exact.isfinite()):
        return float("inf")
    is_finite = exact.isfinite()
    difference = (found.double() - exact.double())[is_finite].norm()
    return float(difference / exact[is_finite].double().norm().clamp(min=1e-300))


def is_reference(exact: Sequence[Error], dtypes: Iterable[torch.dtype]) -> bool:
    """Whether the step in float64 computes the same function as the step without a plan.

    If it does not (it may draw other random numbers), the errors are far above those of rounding.

    exact: the errors of all results.
    dtypes: the dtypes that the step computes in.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return statistics.median(each.plain for each in exact) < 4 * math.sqrt(eps)
