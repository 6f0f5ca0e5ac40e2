"""Rows of bytes, divided by the size of a unit and rounded down: whole solutions keep to them.

What is on the device at a position is there as a whole. So if units of b[u] bytes share a room of
M bytes, then for any number d

    sum of floor(b[u] / d) * x[u] <= floor(M / d)

as the left is whole and at most the sum of b[u] / d * x[u] (Gomory 1958, Chvatal 1973). Where there
is room for 2.7 units of a size, a linear program holds 2.7 of them, and with this row two. What is
there in any case is taken from the room first, and what no longer fits then is not there.

Most tensors of a network are a few times as large as the smallest of those that matter, so one row
for each position, by the size that fits best, does nearly all that there is to do: the linear
programs of single cuts come to what their integer programs prove, and that of windows proves
55.7 % where it proved 52.6 without these rows (the U-Net of the examples at its least budget).
"""

from __future__ import annotations

from collections.abc import Sequence

from solver.bound.cut import CutMilp


def round_bytes(cuts: CutMilp) -> None:
    """Add to each position of the program the row of the module."""
    program = cuts.program
    for p, keep in zip(cuts.positions, cuts.keep, strict=True):
        size_bytes = {keep[u]: cuts.folded.unit_bytes[u] for u in cuts.counted(keep, p)}
        undecided = {x: b for x, b in size_bytes.items() if not program.least[x]}
        room = cuts.room(p) - (sum(size_bytes.values()) - sum(undecided.values()))
        if room < 0:  # the program has no solution, as its own row of bytes says
            continue
        fitting = {x: b for x, b in undecided.items() if b <= room}
        for x in undecided.keys() - fitting.keys():
            program.most[x] = 0.0
        if sum(fitting.values()) > room:
            times, most = rounded(list(fitting.values()), room)
            values = {x: float(n) for x, n in zip(fitting, times, strict=True) if n}
            program.row([*values], [*values.values()], upper=float(most))


def rounded(sizes_bytes: Sequence[int], room: int) -> tuple[list[int], int]:
    """Whole numbers, one for each unit, and the most that they may add up to.

    sizes_bytes: each above 0 and within the room, which they exceed together. Divided by that of
    them after which the least of the room is left for what is left of the units.
    """

    def left(divisor: int) -> float:
        return room // divisor / sum(b // divisor for b in sizes_bytes)

    divisor = min(sorted(set(sizes_bytes)), key=left)
    return [b // divisor for b in sizes_bytes], room // divisor
