"""Numbers, strings, tensors and containers in attributes that a training loop changes."""

from __future__ import annotations

import copy
import threading
from collections import deque
from unittest import mock

import pytest
import torch
from torch import nn

from graphs.capture.threads import TRACING
from graphs.model_calls import Call
from graphs.trace import CapturedStep
from scheduler_runtime import fit, plan_ahead, plans_of
from scheduler_runtime.planned.guards import kind_of
from scheduler_runtime.planned.unread_attributes import UnreadAttributes
from tests.support.bitwise import assert_equal


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.n_steps = 0
        self.best: float | None = None
        self.inner = nn.Linear(4, 4)
        self.title = ""
        self.history: list[object] = []
        self.metrics: dict[str, list[float]] = {"loss": []}
        self.last: dict[str, float] = {}
        self.recent: deque[float] = deque(maxlen=3)
        self.losses = torch.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


class FromThird(Counting):
    """It reads the count, though it does the same until the third step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return (y * 2 if self.n_steps > 2 else y).square().mean()


class ByLength(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * (2 if len(self.history) > 2 else 1)).square().mean()


class ByShape(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * (2 if len(self.losses) > 2 else 1)).square().mean()


class ByEntry(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * (2 if self.last.get("n_steps", 0) > 2 else 1)).square().mean()


class ByAnotherName(Counting):
    """The list that it reads is in two attributes, of which one is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.config = {"history": self.history}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = len(self.inner.config["history"])
        return (self.inner(x) * (2 if n > 2 else 1)).square().mean()


class ByItsVars(Counting):
    """It reads the count without asking for the attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * (1 + vars(self)["n_steps"])).square().mean()


class ByItsVarsIfThere(Counting):
    """It takes another number if there is no count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * (1 + vars(self).get("n_steps", 0))).square().mean()


class ByAllItsVars(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = [v for v in vars(self).values() if isinstance(v, int)]
        return (self.inner(x) * (1 + sum(numbers))).square().mean()


class ByItsCopy(Counting):
    """Without a count of its own, the copy would have that of the class."""

    n_steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * (1 + copy.copy(self).n_steps)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(model: Counting, n_steps: int) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    found: list[torch.Tensor | None] = []
    for step in range(n_steps):
        model.zero_grad()
        loss = model(torch.randn(8, 4))
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters())]
        model.n_steps += 1
        model.best = loss.item()
        model.title = f"run {step}"
        model.history += [loss.item(), loss.detach(), {"loss": loss.item()}]
        model.metrics["loss"].append(loss.item())
        model.last.update(loss=loss.item(), n_steps=step)
        model.recent.append(loss.item())
        model.losses = torch.cat([model.losses, loss.detach()[None]])
    return found


@pytest.mark.parametrize(
    ("make", "n_plans"),
    [
        (Counting, 2),
        (FromThird, 5),
        (ByLength, 5),
        (ByShape, 5),
        (ByEntry, 5),
        (ByAnotherName, 5),
        (ByItsVars, 5),
        (ByItsVarsIfThere, 5),
        (ByAllItsVars, 5),
        (ByItsCopy, 5),
    ],
)
def test_what_forward_does_not_read_is_planned_once_more(make: type, n_plans: int) -> None:
    plain = make()
    class_attributes = [*vars(make)]
    model = copy.deepcopy(plain)
    names = [*vars(model)]
    fit(model, budget="1GB", optimizer=sgd(model))
    assert_equal(trained(plain, 5), trained(model, 5))
    assert len(plans_of(model)) == n_plans
    assert [name for name in vars(model) if name != "forward"] == names
    assert model.n_steps == plain.n_steps
    assert [*vars(make)] == class_attributes


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize(("make", "n_plans"), [(Counting, 1), (ByLength, 5), (ByEntry, 5)])
def test_containers_that_forward_does_not_read_need_no_second_plan(
    make: type, n_plans: int
) -> None:
    model = make()
    fit(model, budget="1GB", optimizer=sgd(model))
    for step in range(5):
        model(torch.randn(8, 4)).backward()
        model.history.append(step)
        model.last["n_steps"] = step
        model.recent.append(step)
        model.zero_grad()
    assert len(plans_of(model)) == n_plans


class Scaled(nn.Module):
    def __init__(self, config: dict[str, float]) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config["scale"]


class Shared(Counting):
    """A part reads the dict, and the model holds it too."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"scale": 1.0}
        self.part = Scaled(self.config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.inner(x)).square().mean()


class InClosure(Counting):
    """It reads the dict, but not the attribute."""

    def __init__(self) -> None:
        super().__init__()
        config = self.config = {"scale": 1.0}
        self.scale = lambda: config["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.scale()).square().mean()


class ByBoundMethod(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"scale": 1.0}
        self.scale = self.config.get

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.scale("scale")).square().mean()


class WithOwnGetattribute(Shared):
    def __getattribute__(self, name: str) -> object:
        return super().__getattribute__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config = object.__getattribute__(self, "config")
        return (self.inner(x) * config["scale"]).square().mean()


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("make", [Shared, InClosure, ByBoundMethod, WithOwnGetattribute])
def test_a_container_that_is_read_elsewhere_is_compared(make: type) -> None:
    plain = make()
    model = make()
    fit(model, budget="1GB", optimizer=sgd(model))
    x = torch.randn(8, 4)
    for step in range(6):
        if step > 3:
            plain.config["scale"] = model.config["scale"] = 1.0 * step
        loss = model(x)
        assert_equal([plain(x)], [loss])
        loss.backward()
        model.zero_grad()
    assert len(plans_of(model)) == 3


class ReadOnlyClass(type(nn.Module)):
    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError("read-only")


class OfReadOnlyClass(Counting, metaclass=ReadOnlyClass):
    pass


def test_a_class_that_cannot_be_changed_is_planned() -> None:
    model = OfReadOnlyClass()
    fit(model, budget="1GB", optimizer=sgd(model))
    model(torch.randn(8, 4)).backward()
    assert len(plans_of(model)) == 1


def test_with_tighter_plans_for_a_shortage_it_is_planned_once_more_too() -> None:
    model = Counting()
    fit(model, budget="1GB", optimizer=sgd(model), on_pressure="replan")
    trained(model, 4)
    assert len(plans_of(model)) == 2


def test_a_plan_made_ahead_is_for_all_values_that_forward_does_not_read() -> None:
    model = Counting()
    fit(model, budget="1GB", optimizer=sgd(model))
    trained(model, 2)
    plan_ahead(model, [torch.randn(16, 4)])
    assert len(plans_of(model)) == 3
    model.n_steps += 1
    model(torch.randn(16, 4)).backward()
    assert len(plans_of(model)) == 3


def test_an_attribute_that_a_copy_of_the_class_has_is_as_before() -> None:
    """The class is watched meanwhile, and other modules of it may be called inside of forward."""
    model, other = Counting(), Counting()
    other.n_steps = 7
    model.inner.register_forward_pre_hook(lambda _module, _args: seen.append(other.n_steps))
    seen: list[int] = []
    fit(model, budget="1GB", optimizer=sgd(model))
    trained(model, 3)
    assert set(seen) == {7}


def test_threads_that_plan_modules_of_one_class_take_turns() -> None:
    """Each watch is on the class. Two at once would leave one of them there."""
    model = Counting()
    unread = UnreadAttributes()
    call = Call.of((torch.randn(8, 4),), {})
    before = kind_of(model, call)
    model.n_steps += 1
    unread.compare([before], kind_of(model, call), model)
    is_free = []

    def trace() -> CapturedStep:
        def try_to_trace() -> None:
            if is_free_now := TRACING.acquire(blocking=False):
                TRACING.release()
            is_free.append(is_free_now)

        thread = threading.Thread(target=try_to_trace)
        thread.start()
        thread.join()
        return mock.Mock()

    unread.trace(model, trace)
    assert is_free == [False]
    assert model.n_steps == 1
