"""Warnings point at the user's line."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from graphs.graph import warn
from scheduler_runtime import fit


def test_a_warning_points_at_its_caller() -> None:
    with pytest.warns(UserWarning, match="words") as seen:
        warn("words")
    assert seen[0].filename == __file__


def test_pytorch_and_ours_in_between_are_passed_over() -> None:
    model = fit(nn.Linear(4, 1), budget="1MB")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(torch.ones(2, 4)).sum().backward()
    assert any("state is not counted" in str(each.message) for each in seen)
    ours = [each for each in seen if str(each.message).startswith("fit: ")]
    assert {each.filename for each in ours} == {__file__}
