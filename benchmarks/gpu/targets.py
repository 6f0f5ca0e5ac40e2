"""The targets of the GPU benchmark, and the cases that miss them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.ways import WAYS

OURS = tuple(way for way in WAYS if way.startswith("ours"))
STOCK = tuple(way for way in WAYS if way not in OURS)
PEAK_ABOVE, PEAK_BELOW = 0.01, 0.005
"""How far the predicted peak may be above and below the measured one, as shares of it."""
TIME_ERROR = 0.05
OVERHEAD_ABOVE_BOUND = 0.02
SAME_PEAK = 1.01
"""A stock way counts as one in the same memory if its peak is at most this multiple of ours."""

Cases = Mapping[str, Mapping[str, Any]]


@dataclass
class Target:
    """A target and how well it is met.

    title: the target in words.
    n_rows: cases that were checked.
    missed: case that misses the target -> what was found there.
    """

    title: str
    n_rows: int = 0
    missed: dict[str, str] = field(default_factory=dict)

    def check(self, case: str, holds: bool, words: str) -> None:
        self.n_rows += 1
        if not holds:
            self.missed[case] = words


def check_targets(parts: Mapping[str, Cases]) -> dict[str, Any]:
    """Check all targets: the fields of each `Target` by its name, without targets that no case is
    about.

    parts: part -> its cases with their rows.
    """
    targets = {
        "kept": Target("steps run within the budget, where the plain model fails"),
        "peak": Target("the peak is predicted within 1 %, and never more than 0.5 % too low"),
        "time": Target("the step's time is predicted within 5 %"),
        "overhead": Target("the measured overhead is at most the proven bound plus 2 points"),
        "faster": Target("faster than every stock way in the same memory"),
        "bits": Target("training is bitwise identical"),
        "host": Target("the host needs no more time for a step than in eager mode"),
    }
    rows_that_ran = {
        name: {case: row for case, row in cases.items() if row.get("status") == "ran"}
        for name, cases in parts.items()
    }
    ways, host = rows_that_ran.get("ways", {}), rows_that_ran.get("host", {})
    for case, row in parts.get("budget", {}).items():
        kept, fails = row.get("kept"), row.get("plain_fails")
        words = row.get("reason") or f"kept {kept}, the plain model fails {fails}"
        targets["kept"].check(case, bool(kept and fails), f"{row['status']}: {words}"[:160])
    for case, row in {**ways, **rows_that_ran.get("budget", {})}.items():
        error = row.get("peak_off")
        if error is not None and "compiled" not in case:  # compiled: measured while planning
            targets["peak"].check(case, -PEAK_BELOW <= error <= PEAK_ABOVE, f"{100 * error:+.2f} %")
    for case, row in ways.items():
        error = row.get("time_off")
        if error is not None:
            targets["time"].check(case, abs(error) <= TIME_ERROR, f"{100 * error:+.1f} %")
        bound, overhead = row.get("bound"), row.get("measured_overhead")
        if bound is not None and overhead is not None:
            words = f"{100 * overhead:+.1f} %, bound {100 * bound:+.1f} %"
            targets["overhead"].check(case, overhead <= bound + OVERHEAD_ABOVE_BOUND, words)
        stock = _fastest_stock(case, row, ways)
        if stock is not None:
            name, fastest = stock
            words = f"{row['samples_per_s']:.4g} samples/s, {name} {fastest:.4g}"
            targets["faster"].check(case, row["samples_per_s"] >= fastest, words)
    for case, row in parts.get("bits", {}).items():
        n_different = row.get("n_different")
        words = row.get("reason", f"{n_different} differ")
        targets["bits"].check(case, n_different == 0, f"{row['status']}: {words}"[:160])
    for case, row in host.items():
        model, way = case.split("/")
        plain_s = host.get(f"{model}/eager", {}).get("host_s")
        if way != "eager" and plain_s:
            words = f"{row['host_s'] / plain_s:.2f} times eager's"
            targets["host"].check(case, row["host_s"] <= plain_s, words)
    return {name: vars(target) for name, target in targets.items() if target.n_rows}


def _fastest_stock(case: str, row: Mapping[str, Any], cases: Cases) -> tuple[str, float] | None:
    """Of the stock ways to run the model in at most SAME_PEAK times the memory, the fastest: its
    name and samples/s. None if there is none, and for rows of a stock way."""
    model, way, *_ = case.split("/")
    rivals = [
        (other["samples_per_s"], name)
        for name, other in cases.items()
        if way in OURS
        and name.split("/")[0] == model
        and name.split("/")[1] in STOCK
        and other["peak_bytes"] <= SAME_PEAK * row["peak_bytes"]
    ]
    if not rivals:
        return None
    fastest, name = max(rivals)
    return name, fastest


def target_lines(targets: Mapping[str, Any]) -> Iterator[str]:
    """Lines of text: each target with the cases that miss it."""
    if targets:
        yield "\nTargets"
    for target in targets.values():
        n_held = target["n_rows"] - len(target["missed"])
        yield f"  {target['title']}: {n_held} of {target['n_rows']}"
        for case, words in target["missed"].items():
            yield f"    missed by {case}: {words}"
