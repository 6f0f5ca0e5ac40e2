"""The closest setting of another system: the fastest of its settings that fits the budget.

Every candidate (`systems.py`) is simulated on the same graph as our plan, so the figures are
comparable. They are only forecasts of that system: it runs other kernels, and what it allocates
besides the model is not in the graph.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from graphs.graph import Graph
from solver.module_checkpointing.for_other_frameworks.forecasts import forecast
from solver.module_checkpointing.for_other_frameworks.model_layers import layers
from solver.module_checkpointing.for_other_frameworks.systems import SYSTEMS, Candidate, Family
from solver.schedule import Simulation, simulate


@dataclass(frozen=True)
class Emitted:
    """The setting of a system that is closest to a budget.

    system: a key of `SYSTEMS`.
    title: the system's name for people.
    setting: options or configuration as the system takes them; "" for its default.
    simulation: the step with this setting.
    fits: whether it is within the budget. If no setting is, this is the one with the least peak.
    n_layers: number of layers of the model.
    n_judged: how many settings were simulated.
    note: a sentence on what the setting refers to ("": none).
    """

    system: str
    title: str
    setting: str
    simulation: Simulation
    fits: bool
    n_layers: int
    n_judged: int
    note: str = ""


def nearest(graph: Graph, *, system: str, budget_bytes: int) -> Emitted:
    """The fastest setting of the system whose simulated peak is at most `budget_bytes`.

    If none fits, the one with the smallest peak is returned.

    Raises NoLayersError for a graph without layers, and KeyError for an unknown system.
    """
    target_system = SYSTEMS[system]
    model_layers = layers(graph)
    tried: list[tuple[str, Simulation]] = []
    for family in target_system.families(graph, model_layers):
        tried += _try_family(graph, family, budget_bytes=budget_bytes)
    fitting = [(text, run) for text, run in tried if run.peak_bytes <= budget_bytes]
    if fitting:
        setting, simulation = min(fitting, key=lambda t: (t[1].time_s, t[1].peak_bytes))
    else:
        setting, simulation = min(tried, key=lambda t: (t[1].peak_bytes, t[1].time_s))
    return Emitted(
        system=system,
        title=target_system.title,
        setting=setting,
        simulation=simulation,
        fits=bool(fitting),
        n_layers=len(model_layers),
        n_judged=len(tried),
        note=target_system.note,
    )


SHORT_FAMILY = 8
"""All candidates of a family of up to this size are simulated."""


def _try_family(graph: Graph, family: Family, *, budget_bytes: int) -> list[tuple[str, Simulation]]:
    """Simulate candidates of a family: (setting, simulation) of those that were tried.

    All of a short family are simulated. In a long one each candidate recomputes more than the one
    before, so the first that fits is found by bisection, starting with the last.
    """

    def simulated(candidate: Candidate) -> tuple[str, Simulation]:
        return candidate.text, simulate(graph, forecast(graph, candidate.regions))

    if len(family) <= SHORT_FAMILY:
        return [simulated(candidate) for candidate in family]
    tried: list[tuple[str, Simulation]] = []

    def fits(candidate: Candidate) -> bool:
        tried.append(simulated(candidate))
        return tried[-1][1].peak_bytes <= budget_bytes

    if fits(family[-1]):
        bisect_left(family[:-1], True, key=fits)
    return tried
