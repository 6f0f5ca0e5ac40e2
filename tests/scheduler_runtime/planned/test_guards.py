"""Guards: a change of Python state that `forward` reads asks for another program."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.capture.refuse import generators_of
from graphs.trace import trace
from scheduler_runtime import apply
from scheduler_runtime.planned.guards import settings_of
from solver.solving import solve


@dataclasses.dataclass
class Scale:
    by: float = 1.0
    inner: Any = None


class Holder:
    by = 1.0

    def __init__(self) -> None:
        self.extra = 1.0


class Slotted:
    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 1.0


class Settable(nn.Module):
    """Reads Python state of every kind."""

    by = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = {"a": 1.0, "inner": {"b": 1.0}}
        self.scale = Scale(inner=Holder())
        self.row = [1.0, 2.0]
        self.names: set[str] = set()
        self.act = torch.relu
        self.trainer: Any = None
        self.slotted = Slotted()
        self.queue = deque([1.0], maxlen=1)
        self.number = np.float32(1.0)
        self.numbers = np.ones(8, dtype=np.float32)
        self.many_numbers = np.ones(2**20, dtype=np.float32)
        self.leaky = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.scaling = Scaling(1.0)
        self.config = type("Config", (), {"by": 1.0})
        self.measured = [torch.ones(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.linear(x)) * self.table["a"] * self.table["inner"]["b"]
        x = x * self.scale.by * self.scale.inner.extra * self.row[0] * self.by
        x = x * self.slotted.by * self.queue[0] * float(self.number)
        x = x * torch.from_numpy(self.numbers) * float(self.many_numbers[0])
        x = self.leaky(self.scaling(x)) * self.config.by * len(self.measured[0])
        return (-x if "negative" in self.names else x).pow(2).sum()


class Scaling:
    """Holds more than settings: known by which object it is."""

    def __init__(self, by: float) -> None:
        self.by, self.lock = by, threading.Lock()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    def __deepcopy__(self, _memo: object) -> Scaling:
        return Scaling(self.by)


class Tripled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def settings(model: nn.Module) -> Any:
    return settings_of(model, list(model.modules()))


def _swap_class(model: Settable) -> None:
    model.linear.__class__ = Tripled


def _own_forward(model: Settable) -> None:
    linear = model.linear
    linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)


CHANGES: dict[str, Callable[[Settable], object]] = {
    "dict": lambda m: m.table.__setitem__("a", 0.5),
    "dict in a dict": lambda m: m.table["inner"].__setitem__("b", 0.5),
    "dataclass": lambda m: setattr(m.scale, "by", 0.5),
    "object in a dataclass": lambda m: setattr(m.scale.inner, "extra", 0.5),
    "list": lambda m: m.row.__setitem__(0, 0.5),
    "set": lambda m: m.names.add("negative"),
    "function": lambda m: setattr(m, "act", torch.tanh),
    "object with slots": lambda m: setattr(m.slotted, "by", 0.5),
    "deque": lambda m: m.queue.append(0.5),
    "number of NumPy": lambda m: setattr(m, "number", np.float32(0.5)),
    "array in another's place": lambda m: setattr(m, "numbers", m.numbers / 2),
    "array that is written": lambda m: m.numbers.fill(0.5),
    "large array": lambda m: setattr(m, "many_numbers", m.many_numbers / 2),
    "partial function": lambda m: setattr(m, "leaky", functools.partial(F.leaky_relu)),
    "words of a partial function": lambda m: m.leaky.keywords.update(negative_slope=0.5),
    "object in another's place": lambda m: setattr(m, "scaling", Scaling(0.5)),
    "attribute of a class that is a config": lambda m: setattr(m.config, "by", 0.5),
    "form of a tensor": lambda m: m.measured.__setitem__(0, torch.ones(3)),
    "class of a submodule": _swap_class,
    "forward of a submodule": _own_forward,
}


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_seen_and_planned(change: Callable[[Settable], object]) -> None:
    torch.manual_seed(0)
    model, batch = Settable(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    apply(model, solve(model, batch, budget=10**9), on_mismatch="replan")
    model(batch).backward()
    before = settings(model)
    for each in (model, plain):
        change(each)
        each.zero_grad()
        each(batch).backward()
    assert before != settings(model)
    assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)


def test_an_attribute_of_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Settable()
    before = settings(model)
    monkeypatch.setattr(Settable, "by", 0.5)
    assert before != settings(model)


class Patched(nn.Module):
    """Its class has methods, containers and tensors."""

    table: ClassVar[Any] = {"by": 1.0}
    shift: Any = torch.ones(8)
    inner: Any = types.SimpleNamespace(by=1.0)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.hook = self.linear.register_forward_hook(self.doubled)

    def doubled(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    def tripled(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 3

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    @staticmethod
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @property
    def scale(self) -> float:
        return 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.halved(self.act(self.linear(x))) * self.scale + self.shift
        return (x * self.table["by"] * self.inner.by).square().sum()


def _another_hook(model: nn.Module) -> None:
    linear: Any = model.linear
    linear._forward_hooks.clear()
    model.hook = linear.register_forward_hook(model.tripled)


OF_CLASS: dict[str, Callable[[Any, type[Any]], object]] = {
    "method": lambda _m, kind: setattr(kind, "act", lambda _, x: x.relu()),
    "static method": lambda _m, kind: setattr(kind, "halved", staticmethod(torch.neg)),
    "property": lambda _m, kind: setattr(kind, "scale", property(lambda _: 3.0)),
    "dict": lambda _m, kind: kind.table.__setitem__("by", 0.5),
    "namespace": lambda _m, kind: setattr(kind.inner, "by", 0.5),
    "tensor": lambda _m, kind: setattr(kind, "shift", torch.zeros(8)),
    "hook in another's place": lambda model, _: _another_hook(model),
}


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("change", OF_CLASS.values(), ids=OF_CLASS.keys())
def test_a_change_of_the_class_or_a_hook_is_planned(change: Callable[..., object]) -> None:
    class Own(Patched):
        table: ClassVar[Any] = dict(Patched.table)
        shift = Patched.shift
        inner = copy.copy(Patched.inner)

    torch.manual_seed(0)
    model, batch = Own(), torch.randn(4, 8)
    own_forward = functools.partial(Own.forward, model)
    apply(model, solve(model, batch, budget=10**9), on_mismatch="replan")
    model(batch).backward()
    change(model, Own)
    model.zero_grad()
    model(batch).backward()
    planned = model.linear.weight.grad.clone()
    model.zero_grad()
    own_forward(batch).backward()
    assert torch.equal(planned, model.linear.weight.grad)


def test_a_setting_of_an_old_spectral_norm_is_seen() -> None:
    model = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 4)))
    before = settings(model)
    (hook,) = model[0]._forward_pre_hooks.values()
    hook.n_power_iterations = 2
    assert before != settings(model)


def test_hooks_with_the_same_code_are_the_same() -> None:
    """A training may register a new closure in every step."""
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    found = []
    for step in range(2):
        handle = model[0].register_forward_hook(lambda *_, step=step: seen.append(step))
        found.append(settings(model))
        handle.remove()
    assert found[0] == found[1] != settings(model)


def test_what_is_no_setting_changes_nothing() -> None:
    model = Settable()
    model.trainer = Holder()
    model.trainer.model, model.trainer.lock, model.trainer.step = model, threading.Lock(), 0
    model.table["nan"] = math.nan
    model.table["itself"] = model.table
    before = settings(model)
    assert before == settings(model)
    model.trainer.step = 1  # an object that holds more than settings is the same
    assert before == settings(model)


def test_weak_references_change_nothing() -> None:
    """nn.RNN lists such references to its weights, and lists them anew when these are converted."""
    model = Settable()
    tensors = [torch.ones(1), torch.ones(1)]
    model.references = [weakref.ref(tensors[0])]
    before = settings(model)
    model.references = [weakref.ref(tensors[1])]
    assert before == settings(model)


def test_a_list_that_is_rewritten_is_a_setting() -> None:
    model = Settable()
    seen = [settings(model)]
    for change in (
        lambda: model.row.__setitem__(0, 3.0),
        lambda: model.row.pop(),
        lambda: model.row.append(1.5),
        lambda: model.row.append("name"),  # type: ignore[arg-type]
    ):
        change()
        seen.append(settings(model))
        assert seen[-1] not in seen[:-1]


def test_a_model_whose_adapters_are_off_runs_its_own_forward() -> None:
    model, batch = Settable(), torch.randn(4, 8)
    apply(model, solve(model, batch, budget=10**9))
    model(batch).backward()
    model.requires_grad_(False)
    assert not model(batch).requires_grad


@pytest.mark.slow
def test_a_setting_that_changes_with_every_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Settable(), torch.randn(4, 8)
    apply(model, solve(model, batch, budget=10**9), on_mismatch="replan")
    for step in range(8):
        model.row[0] = 1.0 + step
        model(batch).backward()
    warned = [r for r in caplog.records if r.name == "scheduler_runtime.planned.forward"]
    (warning,) = warned
    assert "Settable has been planned for 8 kinds of call; shapes, " in warning.getMessage()


class Unsized(tuple[int, ...]):
    """A tuple that refuses its length, as the representations of e3nn do."""

    def __len__(self) -> int:
        raise NotImplementedError  # nothing is missing: `len` of e3nn's class raises this, too


class SettingUnsized(nn.Linear):
    sizes: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes = Unsized((2, 3))  # equal in each call
        return super().forward(x).sum()


def test_a_tuple_that_refuses_its_length_is_compared_by_its_entries() -> None:
    model = SettingUnsized(4, 4)
    found = []
    for sizes in ((2, 3), (2, 3), (2, 4)):
        model.sizes = Unsized(sizes)
        found.append(settings(model))
    assert found[0] == found[1] != found[2]
    assert not generators_of(model).keys() - generators_of(nn.Linear(4, 4)).keys()
    model.sizes = Unsized((2, 3))
    assert trace(model, torch.randn(2, 4)).nodes
