"""What counts as a level's: units, rooms, times, and when the state before it is due."""

import math

import pytest

from graphs.graph import Graph
from solver.bound import StorageGraph
from solver.chain.nested_reversal_levels import Levels, Stretch, divide
from tests.support.small_graphs import make, op


def divided(graph: Graph, *, width_bytes: int = 8, **division: tuple[int, ...]) -> Levels:
    folded = StorageGraph.of(graph)
    return divide(folded, width_bytes=width_bytes, budget_bytes=100, **division)


def one_state(width_bytes: int, *, far: str = "f") -> Levels:
    """Three levels: a state that the next one reads, a small unit, one that is read `far` on, and
    one that is made only once.
    """
    graph = make(
        [
            op("a", "", "a s f", time_s=1.0),
            op("b", "a", "b", time_s=2.0),
            op("c", f"b {far}", "c", time_s=4.0),
            op("p", "c", "p", recomputable=False),
            op("loss", "p", "d4", phase="backward"),
            op("back_c", "d4 c b p", "d3", phase="backward"),
            op("back_b", "d3 b a", "d2", phase="backward"),
            op("back_a", "d2 a s f", "d1", phase="backward"),
        ],
        {"a": 4, "s": 1, "f": 4, "b": 4, "c": 4, "p": 4, "d4": 1, "d3": 1, "d2": 1, "d1": 1},
        outputs="d1",
    )
    return divided(graph, bounds=(0, 1, 2, 4), checks=(7, 6, 5), width_bytes=width_bytes)


def names(levels: Levels) -> list[str]:
    every = ("a", "s", "f", "b", "c", "p", "d4", "d3", "d2", "d1")
    return ["".join(every[u] for u in each.unit_bytes) for each in levels.stretches]


def test_small_units_those_read_far_on_and_those_made_once_are_free() -> None:
    assert names(one_state(4)) == ["a", "b", "c"]
    assert names(one_state(2)) == ["as", "b", "c"]
    assert names(one_state(4, far="")) == ["af", "b", "c"]


def test_the_room_at_a_check_leaves_out_units_of_lower_levels_only() -> None:
    # d2 d1 a s f; d3 d2 b (a is of a lower level); d4 d3 p c (b is)
    assert one_state(4).room_bytes == (100 - 11, 100 - 6, 100 - 10)


def test_times_and_what_is_due() -> None:
    levels = one_state(4)
    assert levels.forward_s == (1.0, 2.0, 4.0)
    assert levels.one_unit_s == 0.0
    assert levels.arrival.always_due == (False, True, True)
    assert levels.arrival.forward_s == levels.forward_s


def two_states() -> Levels:
    """Later nodes of the second level read one state of the first, its own nodes both."""
    graph = make(
        [
            op("u1", "", "x1", time_s=1.0),
            op("v1", "x1", "y1", time_s=2.0),
            op("u2", "x1", "x2", time_s=4.0),
            op("v2", "x2 y1", "y2", time_s=8.0),
            op("loss", "x2 y2", "d3", phase="backward"),
            op("back_2", "d3 x2 y2 y1", "d2", phase="backward"),
            op("back_1", "d2 x1 y1", "d1", phase="backward"),
        ],
        {"x1": 4, "y1": 4, "x2": 4, "y2": 4, "d3": 1, "d2": 1, "d1": 1},
        outputs="d1",
    )
    return divided(graph, bounds=(0, 2, 4), checks=(6, 5))


def test_one_of_two_states_in_an_empty_range_does_not_do_for_both() -> None:
    levels = two_states()
    assert levels.forward_s == (1.0, 12.0)  # where y2 is there, x1 is enough
    assert levels.one_unit_s == 8.0  # y2 there: v2 does not run
    assert levels.arrival.always_due == (False, False)
    assert levels.arrival.due_if_read == (False, True)
    assert levels.arrival.forward_s == (1.0, 12.0)


def test_a_level_alone_reads_only_what_later_nodes_read_of_the_one_before() -> None:
    levels = two_states()
    assert [levels.saving_s(2, held) for held in (0, 4, 8)] == [12.0, 4.0, 0.0]
    assert [levels.saving_s(2, held, unaided=True) for held in (0, 4, 8)] == [math.inf, 8.0, 0.0]


@pytest.mark.parametrize(("unit_bytes", "is_due"), [(8, True), (4, False)])
def test_a_state_is_due_if_an_empty_range_cannot_have_it(unit_bytes: int, is_due: bool) -> None:
    graph = make(
        [
            op("f1", "", "x1 g1"),
            op("f2", "x1", "x2 g2"),
            op("loss", "x2", "d3", phase="backward"),
            op("back_2", "d3 g2", "d2", phase="backward"),
            op("back_1", "d2 g1", "d1", phase="backward"),
        ],
        {"x1": unit_bytes, "g1": 8, "x2": unit_bytes, "g2": 8, "d3": 1, "d2": 1, "d1": 1},
        outputs="d1",
    )
    levels = divided(graph, bounds=(0, 1, 2), checks=(4, 3))
    assert levels.arrival.due_if_read == (False, is_due)


def with_another_read(other_bytes: int) -> Levels:
    """A node of the second level reads a unit of the first that nothing else reads."""
    graph = make(
        [
            op("g1", "", "g1", time_s=2.0),
            op("z1", "", "z1", time_s=1.0),
            op("f2", "g1", "g2"),
            op("k2", "z1", "k2"),
            op("loss", "g2", "d3", phase="backward"),
            op("back_2", "d3 g2", "d2", phase="backward"),
            op("back_1", "d2 g1", "d1", phase="backward"),
        ],
        {"g1": 8, "z1": other_bytes, "g2": 8, "k2": 8, "d3": 1, "d2": 1, "d1": 1},
        outputs="d1",
    )
    return divided(graph, bounds=(0, 2, 4), checks=(6, 5))


def test_what_is_due_can_take_less_than_the_demand() -> None:
    levels = with_another_read(8)
    assert levels.forward_s[0] == 2.0
    assert levels.arrival.due_if_read == (False, True)
    assert levels.arrival.forward_s[0] == 1.0


def test_where_one_read_may_be_there_the_level_is_not_due() -> None:
    arrival = with_another_read(4).arrival
    assert arrival is None or arrival.due_if_read == (False, False)


def test_a_window_begins_after_the_check_of_the_level_above() -> None:
    graph = make(
        [
            op("f1", "", "x1 g1"),
            op("f2", "x1", "g2"),
            op("loss", "g2", "d3", phase="backward"),
            op("back_2", "d3 g2 x1", "d2", phase="backward"),
            op("back_1", "d2 g1", "d1", phase="backward"),
        ],
        {"x1": 8, "g1": 8, "g2": 8, "d3": 1, "d2": 1, "d1": 1},
        outputs="d1",
    )
    levels = divided(graph, bounds=(0, 1, 2), checks=(4, 3))
    x1, g1, g2 = 0, 1, 2
    assert [each.demand for each in levels.stretches] == [{g1}, {g2}]
    assert levels.stretches[1].later == {x1}


def test_levels_that_are_equal_have_one_linear_program() -> None:
    one, other = (
        Stretch(
            nodes=((1.0, frozenset({u}), frozenset(), frozenset({u - 1})),),
            unit_bytes={u: 8},
            demand=frozenset({u}),
        )
        for u in (3, 7)
    )
    assert one.signature == other.signature
    read = Stretch(one.nodes, one.unit_bytes, one.demand, later=frozenset({2}))
    assert read.signature != one.signature
