"""Every path of a GPU once, on tiny models: what holds and what does not, without stopping.

The first thing to run on a new machine. Groups run in processes of their own, so that a kernel that
ends its process takes only its group with it; the last line of its errors names the check.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu import smoke_checks, smoke_device, smoke_recorded
from benchmarks.gpu.smoke_device import Bench

Check = Callable[[Bench], str]

GROUPS: Mapping[str, tuple[Check, ...]] = {
    "device": smoke_device.DEVICE,
    "operators": smoke_device.OPERATORS,
    "plan": smoke_checks.PLAN,
    "memory": smoke_checks.MEMORY,
    "CUDA graph": smoke_recorded.RECORDED,
    "compile": smoke_checks.COMPILED,
    "fit": smoke_checks.FIT,
}


def groups(_settings: object) -> list[str]:
    return list(GROUPS)


def run(group: str, device: torch.device, backend: str) -> dict[str, Any]:
    """A row; `checks` says of each check what was found."""
    bench = Bench(device, backend)
    checks: dict[str, str] = {}
    failed: list[str] = []
    started_s = time.monotonic()
    for check in GROUPS[group]:
        name = check.__name__.replace("_", " ")
        print(f"{group}: {name} ...", file=sys.stderr, flush=True)
        begun_s = time.monotonic()
        try:
            found = check(bench)
            checks[name] = f"holds ({time.monotonic() - begun_s:.1f} s): {found}"
        except Exception as error:  # noqa: BLE001 - the point is to hear of every failure
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
            checks[name] = f"FAILS: {type(error).__name__}: {str(error)[:600]} ({where})"
            failed.append(name)
    return {
        "status": "failed" if failed else "ran",
        "reason": ", ".join(failed),
        "n_held": len(checks) - len(failed),
        "n_failed": len(failed),
        "seconds": time.monotonic() - started_s,
        "checks": checks,
    }
