"""The targets of the GPU benchmark, and the rows that miss them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.ways import WAYS

OURS = tuple(way for way in WAYS if way.startswith("ours"))
STOCK = tuple(way for way in WAYS if way not in OURS)
PEAK_ABOVE, PEAK_BELOW = 0.01, 0.005
"""The predicted peak may be so far above the measured one, and so far below."""
TIME_OFF = 0.05
MORE_THAN_BOUND = 0.02
SAME_PEAK = 1.01
"""A stock way has the same peak as ours up to this factor of it."""

Cases = Mapping[str, Mapping[str, Any]]


@dataclass
class Target:
    """n_rows: that were looked at. missed: those that miss it, and by what."""

    title: str
    n_rows: int = 0
    missed: dict[str, str] = field(default_factory=dict)

    def look(self, case: str, holds: bool, words: str) -> None:
        self.n_rows += 1
        if not holds:
            self.missed[case] = words


def found(parts: Mapping[str, Cases]) -> dict[str, Any]:
    """Each target by name; parts: cases with their rows, by part."""
    ran = {
        name: {case: row for case, row in cases.items() if row.get("status") == "ran"}
        for name, cases in parts.items()
    }
    checked = {
        "kept": _kept(parts.get("budget", {})),
        "peak": _peak({**ran.get("ways", {}), **ran.get("budget", {})}),
        "time": _time(ran.get("ways", {})),
        "overhead": _overhead(ran.get("ways", {})),
        "faster": _faster(ran.get("ways", {})),
        "bits": _bits(parts.get("bits", {})),
        "host": _host(ran.get("host", {})),
    }
    return {
        name: {"title": target.title, "n_rows": target.n_rows, "missed": target.missed}
        for name, target in checked.items()
        if target.n_rows
    }


def lines(targets: Mapping[str, Any]) -> Iterator[str]:
    """The table, as text."""
    if targets:
        yield "\nTargets"
    for target in targets.values():
        n_held = target["n_rows"] - len(target["missed"])
        yield f"  {target['title']}: {n_held} of {target['n_rows']}"
        for case, words in target["missed"].items():
            yield f"    missed by {case}: {words}"


def _kept(cases: Cases) -> Target:
    target = Target("three steps and more run within the budget, where the plain model fails")
    for case, row in cases.items():
        kept, fails = row.get("kept"), row.get("plain_fails")
        words = row.get("reason") or f"kept {kept}, the plain model fails {fails}"
        target.look(case, bool(kept and fails), f"{row['status']}: {words}"[:160])
    return target


def _peak(cases: Cases) -> Target:
    target = Target("the peak is predicted within 1 %, and never more than 0.5 % too low")
    for case, row in cases.items():
        off = row.get("peak_off")
        if off is not None and "compiled" not in case:  # which is measured, not predicted
            target.look(case, -PEAK_BELOW <= off <= PEAK_ABOVE, f"{100 * off:+.2f} %")
    return target


def _time(cases: Cases) -> Target:
    target = Target("the step's time is predicted within 5 %")
    for case, row in cases.items():
        off = row.get("time_off")
        if off is not None:
            target.look(case, abs(off) <= TIME_OFF, f"{100 * off:+.1f} %")
    return target


def _overhead(cases: Cases) -> Target:
    target = Target("the measured overhead is the proven bound and 2 points at most")
    for case, row in cases.items():
        bound, overhead = row.get("bound"), row.get("measured_overhead")
        if bound is not None and overhead is not None:
            words = f"{100 * overhead:+.1f} %, bound {100 * bound:+.1f} %"
            target.look(case, overhead <= bound + MORE_THAN_BOUND, words)
    return target


def _faster(cases: Cases) -> Target:
    """Of each model, each row of ours against the fastest stock way in no more memory."""
    target = Target("faster than every stock way in the same memory")
    for case, row in cases.items():
        model, way, *_ = case.split("/")
        if way not in OURS:
            continue
        others = [
            (other["samples_per_s"], name)
            for name, other in cases.items()
            if name.split("/")[0] == model
            and name.split("/")[1] in STOCK
            and other["peak_bytes"] <= SAME_PEAK * row["peak_bytes"]
        ]
        if others:
            best, name = max(others)
            words = f"{row['samples_per_s']:.4g} samples/s, {name} {best:.4g}"
            target.look(case, row["samples_per_s"] >= best, words)
    return target


def _bits(cases: Cases) -> Target:
    target = Target("training is bitwise identical")
    for case, row in cases.items():
        n_different = row.get("n_different")
        words = row.get("reason", f"{n_different} differ")
        target.look(case, n_different == 0, f"{row['status']}: {words}"[:160])
    return target


def _host(cases: Cases) -> Target:
    target = Target("the host hands a step over in no more time than eager mode's")
    for case, row in cases.items():
        model, way = case.split("/")
        plain = cases.get(f"{model}/eager", {}).get("host_s")
        if way != "eager" and plain:
            target.look(case, row["host_s"] <= plain, f"{row['host_s'] / plain:.2f} times eager's")
    return target
