"""The facts about a step that its graph file holds."""

from __future__ import annotations

from typing import Any

import pytest

from graphs.graph import GraphMeta


def _notes(**environment: Any) -> tuple[str, ...]:
    return GraphMeta.from_json({"environment": environment}).notes


def test_a_step_that_reads_values_is_told_by_the_names_of_the_arguments() -> None:
    (note,) = _notes(values_read=[{"of": [["input", 0], ["buffer", "b"]]}], arguments=["x"])
    assert note.startswith("forward reads values of x, buffer 'b' and chooses its operators")
    (note,) = _notes(values_read=[{"of": []}])
    assert note.startswith("forward reads values of random numbers")


@pytest.mark.parametrize(
    "found", [1.5, [1.5], [{}], [{"of": 3}], [{"of": [1]}], [{"of": [["input", [0]]]}]]
)
def test_values_of_another_form_in_a_strangers_file_are_passed_over(found: Any) -> None:
    assert _notes(values_read=found, arguments=["x"]) == ()


def _with_layout(gradient: str | None, form: str = "float32 [30]", state_bytes: int = 240) -> Any:
    layout = {
        "used": {"shape": [9, 10], "element_bytes": 4, "tensor": "a", "gradient": "da"},
        "pooler.weight": {"shape": [30], "element_bytes": 4, "tensor": "b", "gradient": gradient},
    }
    return {
        "parameter_layout": layout,
        "parameter_forms": {"used": "float32 [9, 10]", "pooler.weight": form},
        "environment": {"optimizer": {"name": "AdamW", "state_bytes": state_bytes}},
    }


def test_state_that_is_counted_for_parameters_without_a_gradient_is_told() -> None:
    (note,) = GraphMeta.from_json(_with_layout(None)).notes
    assert note.startswith("25 % of the parameters (1, the largest is 'pooler.weight') get no")
    assert "set requires_grad=False" in note


def test_no_note_on_state_if_none_is_counted_for_nothing() -> None:
    assert GraphMeta.from_json(_with_layout("db")).notes == ()
    assert GraphMeta.from_json(_with_layout(None, form="float32 [30], frozen")).notes == ()
    assert GraphMeta.from_json(_with_layout(None, state_bytes=0)).notes == ()
    strange = _with_layout(None)
    strange["parameter_layout"]["used"]["shape"] = "?"
    assert GraphMeta.from_json(strange).notes == ()
