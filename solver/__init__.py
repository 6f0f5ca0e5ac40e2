"""The answer: a schedule within a budget in bytes, judged and with its proof. Imports no torch.

solution = solve(model, batch, budget="16GB")     # a Solution
report(solution)                                  # print it
draw(solution, "memory.png")                      # the memory over the step
draw(sweep(solution), "pareto.png")               # what other budgets cost
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from solver.plan_analysis import (
        Curve,
        PipelineSplit,
        RankPlans,
        rank_peak_bytes,
        share_rank_budget,
        split_pipeline,
    )
    from solver.python_api import draw, report, sweep
    from solver.schedule import (
        Compute,
        Free,
        IllegalScheduleError,
        Request,
        Schedule,
        Simulation,
        Solution,
        simulate,
    )
    from solver.solving import solve

    Trace = Simulation  # its former name

__all__ = [
    "Compute",
    "Curve",
    "Free",
    "IllegalScheduleError",
    "PipelineSplit",
    "RankPlans",
    "Request",
    "Schedule",
    "Simulation",
    "Solution",
    "Trace",
    "draw",
    "rank_peak_bytes",
    "report",
    "share_rank_budget",
    "simulate",
    "solve",
    "split_pipeline",
    "sweep",
]

_HOMES = {
    "plan_analysis": (
        *("Curve", "PipelineSplit", "RankPlans", "rank_peak_bytes", "share_rank_budget"),
        "split_pipeline",
    ),
    "python_api": ("draw", "report", "sweep"),
    "schedule": (
        *("Compute", "Free", "IllegalScheduleError", "Request", "Schedule", "Simulation"),
        *("Solution", "simulate"),
    ),
    "solving": ("solve",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_FORMER = {"Trace": "Simulation"}


class _MovedFinder:
    """Asked last, for a module that is not there: loads the list of those that have moved."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] == __name__:
            from graphs.moved_imports import MovedFinder

            MovedFinder().find_spec(name, path)


sys.meta_path.append(_MovedFinder)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loaded when it is asked for (PEP 562): `solve --version` imports this package too."""
        current = _FORMER.get(name, name)
        if current not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[current]}"), current)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
