"""Rounding errors of a step's results, measured against the same step in float64.

A plan whose results are not bitwise identical is judged by them: its error may be at most FACTOR
times that of the step without a plan, or one rounding of the result.
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
    """In this mode, casts of float64 to shorter floating-point dtypes do nothing; models cast their
    outputs for the loss, for example."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        is_cast = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64
        if is_cast and dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Error:
    """The relative errors of one result, as in `relative_error`.

    name: of the result.
    plan: error of the step with the plan.
    plain: error of the step without a plan.
    least: error of one rounding in the result's dtype.
    """

    name: str
    plan: float
    plain: float
    least: float

    @property
    def share(self) -> float:
        """The plan's error as a share of what is allowed."""
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
    """The norm of the difference over the norm of `exact`; infinite if their shapes differ, or if
    they are not finite at the same places."""
    if found.shape != exact.shape or not torch.equal(found.isfinite(), exact.isfinite()):
        return float("inf")
    is_finite = exact.isfinite()
    difference = (found.double() - exact.double())[is_finite].norm()
    return float(difference / exact[is_finite].double().norm().clamp(min=1e-300))


def is_reference(exact: Sequence[Error], dtypes: Iterable[torch.dtype]) -> bool:
    """Whether the step in float64 has computed the same as the one without a plan.

    If not (with other random numbers, for example), errors are far above those of rounding.

    exact: the errors of all results.
    dtypes: the dtypes that the step computes in.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return statistics.median(each.plain for each in exact) < 4 * math.sqrt(eps)
