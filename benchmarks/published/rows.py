"""Read and check published rows: what was run, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.published.errors import NotPredictedError
from benchmarks.published.scripts import REASONS, SCRIPTS, Script, Settings

PEAK, TIME = "max_memory_allocated MiB", "median ms fwd+bwd"
PYTORCHS_OWN = ("huggingface", "torch")
"""Providers (implementations) that run PyTorch's operators one by one."""


@dataclass(frozen=True)
class ModuleRow:
    """A checked row of a module's benchmark. measured: in MiB or milliseconds, by `metric`."""

    script: Script
    gpu: str
    metric: str
    measured: float


def level_of(row: object) -> str:
    """The row's level, "op" or "model". Raises NotPredictedError for any other."""
    level = row.get("level") if isinstance(row, Mapping) else None
    if level not in ("op", "model"):
        raise NotPredictedError(f"level is {level!r}; 'op' for a module or 'model'")
    return str(level)


def module_row(row: Mapping[str, Any]) -> ModuleRow:
    """Check a row of level "op". Raises NotPredictedError if it cannot be predicted."""
    op, metric = _text(row, "op"), _text(row, "metric")
    provider = _text(row, "provider")
    if provider not in PYTORCHS_OWN:
        raise NotPredictedError(
            f"provider {provider}: its own kernels, whose memory no traced operator shows"
        )
    if op not in SCRIPTS:
        reason = REASONS.get(op, f"what the script of {op} builds is not described here")
        raise NotPredictedError(reason)
    if metric not in (PEAK, TIME):
        raise NotPredictedError(f"metric {metric!r}; known are {PEAK!r} and {TIME!r}")
    measured = number(row, "value")
    config, x = (_settings(row, name) for name in ("config", "x"))
    if duplicates := sorted(config.keys() & x.keys()):
        raise NotPredictedError(f"{duplicates[0]} is in config and in x")
    settings = Settings({**config, **x}, date=row.get("date"), is_time=metric == TIME)
    script = SCRIPTS[op](settings)
    settings.refuse_unread()
    return ModuleRow(script, _text(row, "gpu"), metric, measured)


def number(row: Mapping[str, Any], name: str) -> float:
    """A measured number of the row. Raises NotPredictedError if it is not a number above 0."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise NotPredictedError(f"{name} is {value!r}; a measured number above 0")
    return float(value)


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise NotPredictedError(f"{name} is {value!r}; a name is needed")
    return value


def _settings(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    if not isinstance(value, Mapping):
        raise NotPredictedError(f"{name} is {value!r}; settings by name are needed")
    return value
