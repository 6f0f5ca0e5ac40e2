"""A node stays as it is while an alias that cannot be made again holds one of its storages."""

from solver.bound import StorageGraph, lower_bound_s
from solver.methods.evict import evict
from solver.schedule.simulator import simulate
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.small_graphs import make, op

# f makes a and s. From q, which overwrites a, to r, which reads the result, f cannot run again: s,
# which u reads in between, has to be there. t is read after r only and may be made again.
GRAPH = make(
    [
        op("f", "", "a s t", time_s=2.0),
        op("big", "", "b", phase="backward"),
        op("q", "a", "a.over", phase="backward"),
        op("u", "s b", "c", phase="backward"),
        op("r", "a.over c", "d", phase="backward"),
        op("z", "t d", "e", phase="backward"),
    ],
    {"a": 2, "s": 4, "t": 8, "b": 3, "a.over": 2, "c": 9, "d": 1, "e": 1},
    aliases={"a.over": "a"},
    outputs="e",
)
FOLDED = StorageGraph.of(GRAPH)
A, S, T = 0, 1, 2


def test_the_maker_is_not_recomputed_from_the_alias_to_its_last_use() -> None:
    assert [p for p in range(7) if FOLDED.cannot_recompute(0, p)] == [3, 4]
    may = [FOLDED.may_recompute(after=p, before=p + 1, budget_bytes=99)[0] for p in range(6)]
    assert may == [True, True, False, False, True, False]


def test_what_else_it_made_is_there_if_read_meanwhile() -> None:
    assert FOLDED.reads[2] == (A, S)
    assert FOLDED.needed_names(2) == ["a", "s"]
    assert [FOLDED.is_pinned(S, p) for p in range(6)] == [p == 3 for p in range(6)]
    assert not any(FOLDED.is_pinned(T, p) for p in range(6))


def test_bound_and_eviction_obey_the_span() -> None:
    least_bytes = least_peak_bytes(GRAPH)
    assert least_bytes == 18  # a, s, b and c while u runs; with t it would be 26
    truth = fastest(GRAPH, budget_bytes=least_bytes)
    assert truth.time_s == 9.0
    assert lower_bound_s(GRAPH, budget_bytes=least_bytes) <= truth.time_s
    assert lower_bound_s(GRAPH, budget_bytes=least_bytes) > 8.99
    schedule, _ = evict(FOLDED, budget_bytes=least_bytes)
    assert simulate(GRAPH, schedule).time_s == truth.time_s
