"""Check that the simulator and the referee agree on a schedule."""

from __future__ import annotations

import pytest

from graphs.graph import Graph
from solver.schedule import IllegalScheduleError, Places, Schedule, simulate
from tests.support.referee import FoulError, play_with_copies


def agree(graph: Graph, schedule: Schedule, places: Places) -> bool:
    """Assert that simulator and referee agree on legality, time and memory of the schedule. Returns
    whether it is legal."""
    try:
        time_s, *rest = play_with_copies(graph, schedule, places)
    except FoulError:
        with pytest.raises(IllegalScheduleError):
            simulate(graph, schedule, places=places)
        return False
    found = simulate(graph, schedule, places=places)
    assert found.time_s == pytest.approx(time_s, rel=1e-12, abs=0)
    assert [
        found.peak_bytes,
        found.live_bytes,
        found.host_peak_bytes,
        found.disk_peak_bytes,
    ] == rest
    return True
