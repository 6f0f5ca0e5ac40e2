"""The step with what eager mode holds: functions, sums of gradients, operators in place."""

from __future__ import annotations

import pytest

from graphs.graph import Graph, Node, Tensor, as_eager
from solver.schedule import baseline, simulate

SIZES = {"x": 7, "a": 100, "b": 100, "g": 100, "p": 100, "q": 100, "s": 100, "w": 1}
WIRING = {
    "f": ("a", ("x",), "forward"),
    "h": ("b", ("a",), "forward"),
    "bg": ("g", ("b",), "backward"),
    "bp": ("p", ("a",), "backward"),
    "bq": ("q", ("g", "p"), "backward"),
    "bs": ("s", ("q", "b"), "backward"),
    "bw": ("w", ("s",), "backward"),
}


def step(**meta: object) -> Graph:
    """Backward: g, then p and q (as a square's gradient is computed), s = the sum of q and b."""
    nodes = tuple(
        Node(name, f"op.{name}", inputs, (out,), 1.0, phase=phase)
        for name, (out, inputs, phase) in WIRING.items()
    )
    kinds = {"x": "input", "w": "gradient"}
    tensors = tuple(Tensor(n, size, kinds.get(n, "activation")) for n, size in SIZES.items())
    return Graph(nodes=nodes, tensors=tensors, outputs=("w",), meta=meta)


def live_bytes(graph: Graph, node: str) -> int:
    schedule = baseline(graph)
    position = [getattr(op, "node", "") for op in schedule.ops].index(node)
    return simulate(graph, schedule).live_bytes[position]


def test_a_graph_that_says_nothing_of_eager_mode_is_itself() -> None:
    graph = step()
    assert as_eager(graph) == graph
    assert as_eager(step(in_place=["nobody"], backward_functions=[["nobody", "bq"]])) == graph


def test_a_function_holds_what_it_has_read_and_made_until_it_returns() -> None:
    plain, eager = step(), as_eager(step(backward_functions=[["bp", "bq"]]))
    assert live_bytes(plain, "bq") == 7 + 4 * 100  # b, g, p, q
    assert live_bytes(eager, "bq") == 7 + 5 * 100  # a as well, which bp has read
    assert live_bytes(eager, "bs") == live_bytes(plain, "bs") == 7 + 3 * 100


def test_what_autograd_has_saved_stays_until_its_function_has_run() -> None:
    plain, eager = step(), as_eager(step(saved_unread={"bs": ["a", "x"], "nobody": ["a"]}))
    assert live_bytes(plain, "bq") == 7 + 4 * 100  # b, g, p, q
    assert live_bytes(eager, "bq") == 7 + 5 * 100  # a as well
    assert eager.node_by_name["bs"].inputs == ("q", "b", "a")


def test_results_of_dead_code_stay_while_variables_hold_them() -> None:
    dead = {"d": {"after": "f", "size_bytes": 50}, "nowhere": {"after": "x", "size_bytes": 50}}
    eager = as_eager(step(dead_results=dead, saved_unread={"h": ["d"]}, in_place=["f"]))
    assert live_bytes(eager, "f") == 7 + 50  # f overwrites x, as without dead code
    assert live_bytes(eager, "h") == 7 + 50 + 100
    assert live_bytes(eager, "bg") == 7 + 2 * 100
    assert as_eager(eager) == eager


def test_a_sum_is_in_place_of_the_older_summand_that_nothing_else_needs() -> None:
    assert live_bytes(as_eager(step(gradient_sums=["bs"])), "bs") == 7 + 2 * 100


@pytest.mark.parametrize("changes", [{"w": ("s", "q")}, {"s": ("x", "q")}])
def test_a_sum_is_new_where_the_older_one_is_read_later_or_not_the_steps(
    changes: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for out, inputs in changes.items():
        name, (_, _, phase) = next(item for item in WIRING.items() if item[1][0] == out)
        monkeypatch.setitem(WIRING, name, (out, inputs, phase))
    plain, eager = step(), as_eager(step(gradient_sums=["bs"]))
    assert live_bytes(eager, "bs") == live_bytes(plain, "bs")


def test_a_sum_of_another_size_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "q", 1)  # an expanded gradient
    assert live_bytes(as_eager(step(gradient_sums=["bs"])), "bs") == live_bytes(step(), "bs")


def test_an_operator_in_place_allocates_nothing() -> None:
    assert live_bytes(step(), "h") == 7 + 2 * 100
    eager = as_eager(step(in_place=["h"]))
    assert live_bytes(eager, "h") == 7 + 100
    assert eager.root("b") == "a"


def test_node_names_phases_and_times_stay() -> None:
    notes = {"in_place": ["h"], "backward_functions": [["bp", "bq"]], "gradient_sums": ["bs"]}
    plain, eager = step(), as_eager(step(**notes))
    assert [(n.name, n.phase, n.time_s) for n in eager.nodes] == [
        (n.name, n.phase, n.time_s) for n in plain.nodes
    ]
    assert eager.resident_bytes == plain.resident_bytes
