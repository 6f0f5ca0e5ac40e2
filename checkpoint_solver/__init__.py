"""One name to import everything from: `from checkpoint_solver import solve, apply, fit, report`.

It has everything that `graphs`, `solver` and `scheduler_runtime` export, under the same names. Its
modules (`checkpoint_solver.export`, `.fsdp`, `.costs`, ...) have what subpackages of these packages
export. A name is imported when it is first used (PEP 562), so importing this package imports
neither torch nor Matplotlib.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoint_solver import chain as chain
    from checkpoint_solver import costs as costs
    from checkpoint_solver import emit as emit
    from checkpoint_solver import export as export
    from checkpoint_solver import fallback as fallback
    from checkpoint_solver import fsdp as fsdp
    from checkpoint_solver import integrations as integrations
    from checkpoint_solver import plot as plot
    from checkpoint_solver import schedule as schedule
    from checkpoint_solver import synthetic as synthetic
    from checkpoint_solver import tensor_parallel as tensor_parallel
    from graphs import *
    from graphs.model_calls import TraceError as TraceError
    from graphs.trace import trace as trace
    from graphs.trace import trace_variants as trace_variants
    from graphs.training_step import LossOnly as LossOnly
    from scheduler_runtime import *
    from solver import *
    from solver.device_and_costs import DeviceError as DeviceError
    from solver.plan_analysis import default_budgets as default_budgets
    from solver.sizes_deadlines_progress import BudgetError as BudgetError

_PACKAGES = ("graphs", "solver", "scheduler_runtime")
"""The lightest first: only the last one imports torch."""
_FROM_FOLDERS = {
    "BudgetError": "solver.sizes_deadlines_progress",
    "DeviceError": "solver.device_and_costs",
    "LossOnly": "graphs.training_step",
    "TraceError": "graphs.model_calls",
    "default_budgets": "solver.plan_analysis",
    "trace": "graphs.trace",
    "trace_variants": "graphs.trace",
}
_MODULES = {found.name for found in iter_modules(__path__)} - {"__main__", "cli"}
"""The public modules; `cli` is the command's code."""


def _refuse_other_packages() -> None:
    """Raise ImportError if one of _PACKAGES is missing, or if another file or package with its name
    would be imported instead."""
    ours = Path(__file__).resolve().parents[1]
    for name in _PACKAGES:
        spec = find_spec(name)
        place = None if spec is None else spec.origin
        if place is None or Path(place).resolve().parents[1] != ours:
            raise ImportError(
                f"checkpoint_solver needs the package {name!r} in {ours}, but that name "
                + (f"is taken by {place}: rename it" if place else "is missing: install again")
            )


_refuse_other_packages()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    This is called once for each name: modules are kept by the import system, others in globals().
    """
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FROM_FOLDERS:
        found = getattr(importlib.import_module(_FROM_FOLDERS[name]), name)
    elif name == "__all__":
        found = _names()
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        found = _from_a_package(name)
    globals()[name] = found
    return found


def _from_a_package(name: str) -> Any:
    for package in _PACKAGES:
        module = importlib.import_module(package)
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _names(packages: Sequence[str] = _PACKAGES) -> list[str]:
    """All public names of these packages. Imports them; only scheduler_runtime imports torch."""
    exported = (importlib.import_module(package).__all__ for package in packages)
    return sorted({*_FROM_FOLDERS, *_MODULES, *(name for names in exported for name in names)})


def __dir__() -> list[str]:
    """The public names; if torch is not installed, those of `graphs` and `solver`."""
    is_whole = find_spec("torch") is not None
    return _names(_PACKAGES if is_whole else _PACKAGES[:-1])
