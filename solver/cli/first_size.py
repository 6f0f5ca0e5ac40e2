"""Where a search for the largest size begins if the model refuses the smallest one."""

from __future__ import annotations

from solver.cli.arguments import Arguments
from solver.cli.model_file import ModelFile
from solver.cli.traced_step import ModelFailsError
from solver.plan_analysis import FIRST, SECOND


def second_size(
    arguments: Arguments, file: ModelFile, failed: ModelFailsError
) -> tuple[int, str] | None:
    """The size that get_batch has by default, else SECOND, and a note that says so.

    None: the user has given the first size, or there is no other.
    """
    largest = arguments.largest
    if largest is None or getattr(arguments, largest):
        return None
    usual = file.default_of(largest)
    size = SECOND.get(largest) if usual is None else usual
    if size is None or size == FIRST[largest]:
        return None
    what = largest.replace("_", " ")
    whose = "" if usual is None else ", that of get_batch"
    return size, (
        f"The search began with {what} {size}{whose}: with {what} {FIRST[largest]} the model "
        f"itself fails ({failed})."
    )
