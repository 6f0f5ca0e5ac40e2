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
