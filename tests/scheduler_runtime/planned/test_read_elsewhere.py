"""Globals, closures, default arguments and the environment: what `forward` reads of them."""

from __future__ import annotations

import copy
import gc
import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import fit, plans_of
from scheduler_runtime.planned.read_elsewhere import NOW, ReadElsewhere
from tests.support.bitwise import assert_same_gradients

pytestmark = pytest.mark.filterwarnings("ignore:fit. the optimizer's state is not counted")

temperature = 1.0
table = {"by": 1.0, "loss": 0.0}
row = [1.0]
options = types.SimpleNamespace(by=1.0, step=0)
shift = torch.ones(8)
n_calls = 0


class Config:
    by: ClassVar[float] = 1.0
    seen: ClassVar[int] = 0


class Trainer:
    """Holds more than plain values."""

    def __init__(self) -> None:
        self.epoch, self.step, self.lock = 1, 0, threading.Lock()

    def __deepcopy__(self, _memo: object) -> Trainer:
        return self


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / row[0]


def scaling(by: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function, and one that changes the number that it multiplies by."""

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * by

    def change(value: float) -> None:
        nonlocal by
        by = value

    return scale, change


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.trainer = Trainer()
        self.scale, self.change = scaling(1.0)

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return x + shift

    def forward(self, x: torch.Tensor, times: Any = (1.0,)) -> torch.Tensor:
        global n_calls
        n_calls += 1
        x = self.shifted(halved(F.gelu(self.linear(x)))) * temperature * table["by"] * options.by
        x = self.scale(x) * self.trainer.epoch * float(os.environ.get("TEST_SCALE", "1"))
        return (x * Config.by * times[0]).square().sum()


Change = Callable[[pytest.MonkeyPatch, Reading], object]
HERE = f"{__name__}."
CHANGES: dict[str, Change] = {
    "number": lambda patch, _: patch.setattr(HERE + "temperature", 0.5),
    "tensor": lambda patch, _: patch.setattr(HERE + "shift", torch.zeros(8)),
    "function": lambda patch, _: patch.setattr(HERE + "halved", torch.tanh),
    "list of a function": lambda patch, _: patch.setattr(HERE + "row", [0.5]),
    "entry of a dict": lambda patch, _: patch.setitem(table, "by", 0.5),
    "attribute of a namespace": lambda patch, _: patch.setattr(options, "by", 0.5),
    "attribute of a class": lambda patch, _: patch.setattr(Config, "by", 0.5),
    "function of a module": lambda patch, _: patch.setattr(F, "gelu", torch.tanh),
    "closure": lambda _, model: model.change(0.5),
    "default": lambda patch, _: patch.setattr(Reading.forward, "__defaults__", ((0.5,),)),
    "environment": lambda patch, _: patch.setenv("TEST_SCALE", "0.5"),
    "object with a lock": lambda _, model: setattr(model.trainer, "epoch", 2),
}


def read_by(model: nn.Module) -> ReadElsewhere:
    return ReadElsewhere([type(model).forward], model.modules())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_forward_reads_is_compared(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reading()
    found = read_by(model)
    assert found == NOW
    change(monkeypatch, model)
    assert found != NOW
    assert found.changed()
    assert read_by(model) == NOW


def test_what_forward_does_not_read_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is what it sets itself: a planned step does not set it."""
    model = Reading()
    found = read_by(model)
    monkeypatch.setitem(table, "loss", 3.0)
    monkeypatch.setattr(options, "step", 3)
    monkeypatch.setattr(Config, "seen", 3)
    monkeypatch.setattr(HERE + "n_calls", 3)
    monkeypatch.setenv("ANOTHER", "3")
    model.trainer.step = 3
    assert found == NOW


def test_installed_packages_are_not_searched() -> None:
    assert not ReadElsewhere([nn.Linear.forward], [nn.Linear(4, 4)])._places


def test_objects_are_not_kept_alive() -> None:
    model = Reading()
    model.trainer = Trainer()
    found, trainer = read_by(model), weakref.ref(model.trainer)
    model.trainer = None
    gc.collect()
    assert trainer() is None
    assert "epoch" in str(found.changed())


def test_a_function_that_is_gone_is_a_change() -> None:
    model = Reading()
    found = read_by(model)
    model.scale = model.change = None
    assert "closure" in found.changed()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("name", ["number", "closure", "environment", "object with a lock"])
def test_an_annealed_number_is_planned_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = Reading(), torch.randn(4, 8)
    planned = fit(copy.deepcopy(plain), budget="1GB")
    planned.scale, planned.change = plain.scale, plain.change
    for model in (plain, planned):
        model(x).backward()
        model.zero_grad()
    CHANGES[name](monkeypatch, plain)
    for _ in range(2):
        for model in (plain, planned):
            model.zero_grad()
            model(x).backward()
        assert_same_gradients(plain, planned)
    assert len(plans_of(planned)) == 2
