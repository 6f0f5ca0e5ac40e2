"""Which gradients exist before the step, by the word that a graph says it with."""

from __future__ import annotations

import pytest

from graphs.training_step import ACCUMULATE, FRESH, OF_MICRO_BATCHES, accumulation


@pytest.mark.parametrize(
    ("word", "of_parameter", "of_input"),
    [(FRESH, False, False), (ACCUMULATE, True, True), (OF_MICRO_BATCHES, True, False)],
)
def test_each_micro_batch_has_gradients_of_its_own_inputs(
    word: str, of_parameter: bool, of_input: bool
) -> None:
    assert accumulation(word).adds_to("parameter") is of_parameter
    assert accumulation(word).adds_to("input") is of_input


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="gradients is 'sum'; one of 'fresh', 'accumulate', "):
        accumulation("sum")
