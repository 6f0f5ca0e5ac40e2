"""From the command line to a Graph: load or trace, and say for which device and budget.

A graph file is read; a model file is loaded, its model built on the meta device (no weights are
allocated), and one training step of it traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from graphs.graph import Graph
from solver.arguments import Arguments, UsageError
from solver.budget import parse_size
from solver.model_file import LoadError, parse_source
from solver.solution import Solution
from solver.verification import Verification, Verifier

Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Problem:
    """What is to be planned. name, device, costs: for the report. notes: whole sentences."""

    name: str
    graph: Graph
    device: str
    costs: str
    budget_bytes: int
    reserve_bytes: int
    reserve_reason: str = ""
    notes: tuple[str, ...] = ()

    def verified(self, verifier: Verifier, solution: Solution) -> Verification:
        raise UsageError("--verify runs the model: a graph file has none; give the model file")


@contextlib.contextmanager
def opened_problem(arguments: Arguments, *, progress: Progress) -> Iterator[Problem]:
    """Load or trace what the command line names; a model file stays importable meanwhile.

    Raises UsageError, BudgetError, SizeError; LoadError, FormatError.
    """
    if arguments.problem.endswith(".json"):
        with progress("reading the graph"):
            problem = _graph_problem(arguments)
        yield problem
        return
    source = parse_source(arguments.problem)
    if source is None:
        raise LoadError(
            f"{arguments.problem!r} is none of model.py[:function], package.module:function, "
            "graph.json"
        )
    raise LoadError("not yet")


def _graph_problem(arguments: Arguments) -> Problem:
    _refuse_for_graphs(arguments)
    try:
        graph = Graph.load(arguments.problem)
    except OSError as error:
        raise LoadError(f"{arguments.problem}: {error.strerror}; give a graph file") from error
    return Problem(
        name=arguments.problem,
        graph=graph,
        device="",
        costs="",
        budget_bytes=parse_size(arguments.budget),
        reserve_bytes=0,
    )


def _refuse_for_graphs(arguments: Arguments) -> None:
    """What a graph file has in it already cannot be asked for again."""
