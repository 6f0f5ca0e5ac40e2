"""Shares, times, counts and ops formatted for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphs.graph import Node

N_TIMES_FROM = 10.0
"""From this overhead on, a step's time is shown as a multiple: a percentage of five digits says no
more than "3526 x as long", and is harder to read."""


def format_share(share: float | None) -> str:
    """Format an overhead: "+4.73 %", "3526 x as long"; "" for None."""
    if share is None:
        return ""
    if share >= N_TIMES_FROM:
        return f"{1 + share:,.0f} x as long"
    return f"{100 * share:+.2f} %"


def format_percent(share: float, *, digits: int = 2) -> str:
    """Format a share of a whole: "0.01 %"."""
    return f"{100 * share:.{digits}f} %"


def format_time(time_s: float) -> str:
    """Format a time with three digits and a unit: "1.23 s", "45.6 ms", "789 us"."""
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        if time_s >= factor:
            amount = time_s / factor
            digits = 0 if amount >= 100 else 1 if amount >= 10 else 2
            return f"{amount:.{digits}f} {unit}"
    return f"{time_s:.1e} s" if time_s else "0 s"


def counted(n: int, thing: str, things: str | None = None) -> str:
    """Format a count: "1 op", "2 ops". things: the plural, if it is not `thing` plus "s"."""
    return f"{n} {thing if n == 1 else things or thing + 's'}"


def describe_type(value: object) -> str:
    """What a wrong value is, for errors: "None", "an object of type int"."""
    return "None" if value is None else f"an object of type {type(value).__name__}"


def describe_op(node: Node | None) -> str:
    """Describe an op by name, operator, phase and module. None stands for the state before the
    first op."""
    if node is None:
        return "before the first op (all of it is resident)"
    module = f" in {node.module}" if node.module else ""
    return f"{node.name} ({node.op}, {node.phase}){module}"
