"""Dataclasses, named tuples and nested values as what a model takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from benchmarks.same_bits import keeping_nothing
from graphs.model_calls import nested
from graphs.trace import TraceError, trace
from scheduler_runtime import PlanMismatchError, apply, fit, plans_of
from scheduler_runtime.by_submodule.planning import plan_chain
from tests.support.bitwise import assert_same_gradients


@dataclasses.dataclass
class Hidden:
    last: torch.Tensor
    mask: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    hidden: Hidden
    others: tuple[Any, ...]
    n_tokens: int = 3


@dataclasses.dataclass(slots=True)
class Slotted:
    loss: torch.Tensor
    name: str


class Pair(NamedTuple):
    loss: torch.Tensor
    parts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    scale: float = 2.0


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    setting: Setting
    weights: list[torch.Tensor]


RETURNS: dict[str, tuple[Callable[..., Any], Callable[[Any], list[torch.Tensor]]]] = {
    "dataclass": (
        lambda h, loss: Output(loss, Hidden(h[:, :3]), (h.detach().mean(), None, "words")),
        lambda out: [out.loss, out.hidden.last],
    ),
    "slots": (lambda _h, loss: Slotted(loss, "words"), lambda out: [out.loss]),
    "dataclass without a loss": (
        lambda h, _loss: Hidden(h, mask=h.detach() > 0),
        lambda out: [out.last],
    ),
    "named tuple": (
        lambda h, loss: Pair(loss, {"a": [h, (h * 2, None)], "b": 1.5}),
        lambda out: [out.loss, out.parts["a"][1][0]],
    ),
    "dicts in tuples in dicts": (
        lambda h, loss: {"x": [h, (h * 2, {"y": None, "z": loss})], "w": 7},
        lambda out: [out["x"][1][1]["z"], out["x"][0]],
    ),
    "distribution": (
        lambda h, _loss: Independent(Normal(h, h.exp()), 1),
        lambda out: [out.base_dist.loc, out.base_dist.scale],
    ),
}
"""How to build the output, and which part of it the loss uses."""


class Returning(nn.Module):
    """A stack of layers; what it returns is put together by a function."""

    def __init__(self, put_together: Callable[..., Any]) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.layers = nn.Sequential(*blocks)
        self.put_together = put_together

    def forward(self, batch: Any) -> Any:
        x = batch.x * batch.setting.scale + batch.weights[0] if isinstance(batch, Batch) else batch
        hidden = self.layers(x)
        return self.put_together(hidden, hidden.square().mean())


def sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.sum() for part in parts]).sum()


def assert_bitwise_identical(
    plain: nn.Module,
    model: nn.Module,
    batch: Any,
    parts: Callable[[Any], list[torch.Tensor]] = lambda out: [out],
) -> None:
    outputs = []
    for each in (plain, model):
        torch.manual_seed(7)
        outputs.append(each(batch))
        sum_of(parts(outputs[-1])).backward()
    (expected, expected_spec), (got, spec) = map(nested.flatten, outputs)
    assert type(outputs[0]) is type(outputs[1])
    assert spec == expected_spec
    for one, other in zip(expected, got, strict=True):
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same
    assert_same_gradients(plain, model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RETURNS)
def test_what_a_model_returns_keeps_its_form_and_the_gradients_their_bits(kind: str) -> None:
    put_together, parts = RETURNS[kind]
    torch.manual_seed(0)
    plain, x = Returning(put_together), torch.randn(8, 16)
    model, fitted = copy.deepcopy(plain), copy.deepcopy(plain)
    solution = keeping_nothing(trace(model, x, loss=lambda out, _batch: sum_of(parts(out))))
    assert solution.simulation.n_recomputed > 4
    apply(model, solution)
    assert_bitwise_identical(plain, model, x, parts)
    plain.zero_grad()
    fit(fitted, budget="1GB", loss_outputs=parts)
    assert_bitwise_identical(plain, fitted, x, parts)


@pytest.mark.slow
def test_a_batch_may_be_a_dataclass_and_each_shape_is_planned() -> None:
    plain = Returning(lambda _h, loss: loss)
    model = fit(copy.deepcopy(plain), budget="1GB")
    for n_rows in (8, 3):
        batch = Batch(torch.randn(n_rows, 16), Setting(), [torch.randn(16)])
        plain.zero_grad()
        model.zero_grad()
        assert_bitwise_identical(plain, model, batch)
    assert batch.setting == Setting()
    traced = trace(plain, batch)
    assert sum(t.size_bytes for t in traced.resident if t.kind == "input") == 4 * (3 * 16 + 16)


def test_another_batch_is_refused_by_the_name_of_its_field() -> None:
    model = Returning(lambda _h, loss: loss)
    batch = Batch(torch.randn(8, 16), Setting(), [torch.randn(16)])
    apply(model, keeping_nothing(trace(model, batch)), on_mismatch="error")
    with pytest.raises(PlanMismatchError, match=r"batch\.x"):
        model(dataclasses.replace(batch, x=torch.randn(9, 16)))


@pytest.mark.parametrize(
    "kind", [lambda h: Categorical(logits=h), lambda h: Normal(h[:, :1], h[:, 1:].exp())]
)
def test_a_policy_may_return_the_distribution_of_its_actions(kind: Any) -> None:
    torch.manual_seed(0)
    plain, x = Returning(lambda h, _loss: kind(h)), torch.randn(8, 16)
    fitted = fit(copy.deepcopy(plain), budget="1GB")
    sampled = plain(x).sample()
    assert repr(plain(x).batch_shape) == repr(fitted(x).batch_shape)  # no tuple
    assert_bitwise_identical(plain, fitted, x, lambda out: [out.log_prob(sampled), out.entropy()])
    assert plans_of(fitted)


def test_submodules_of_a_model_that_returns_a_dataclass_are_planned() -> None:
    put_together, parts = RETURNS["dataclass"]

    class Branching(Returning):
        def forward(self, batch: Any) -> Any:
            hidden = self.layers(batch)
            hidden = hidden * 2 if float(hidden.detach().sum()) > 0 else hidden
            return self.put_together(hidden, hidden.square().mean())

    torch.manual_seed(0)
    plain, x = Branching(put_together), torch.randn(512, 16)
    model = copy.deepcopy(plain)
    with pytest.raises(TraceError):
        trace(plain, x, loss=lambda out, _batch: sum_of(parts(out)))
    apply(model, plan_chain(model, x, budget="1GB", loss=lambda out, _batch: sum_of(parts(out))))
    assert_bitwise_identical(plain, model, x, parts)


def test_flatten_and_back() -> None:
    setting = Setting()
    one = Output(torch.ones(1), Hidden(torch.ones(2)), (setting, torch.ones(3)))
    flat, spec = nested.flatten({"a": one, "b": None})
    assert [tuple(t.shape) for t in nested.tensors(one)] == [(1,), (2,), (3,)]
    back = nested.unflatten(flat, spec)["a"]
    assert type(back) is Output
    assert back.hidden.last is one.hidden.last
    assert back.others[0] is setting
    doubled = nested.map_tensors(lambda t: t * 2, one)
    assert doubled.hidden.last.tolist() == [2.0, 2.0]
    assert one.hidden.last.tolist() == [1.0, 1.0]


def test_a_dataclass_that_holds_itself_does_not_go_round_for_ever() -> None:
    ring = Hidden(torch.ones(2))
    ring.mask = ring
    assert len(nested.leaves(ring)) == 2


class Hiding:
    """Neither a dataclass nor known to pytree."""

    def __init__(self, x: torch.Tensor | None = None, scale: float = 1.0) -> None:
        self.x, self.scale = x, scale


class WithArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, hiding: Any = None, index: Any = None) -> torch.Tensor:
        if isinstance(hiding, Hiding):
            x = x * hiding.scale + (0 if hiding.x is None else hiding.x)
        if index is not None:
            x = x[torch.from_numpy(index)]
        return self.linear(x).square().mean()


def test_an_argument_that_hides_tensors_is_refused() -> None:
    """Or they would stay those of the first call."""
    model = fit(WithArguments(), budget="1GB")
    with pytest.raises(TraceError, match="an argument of type Hiding hides tensors"):
        model(torch.randn(8, 16), Hiding(torch.randn(16)))


@pytest.mark.slow
def test_what_an_argument_says_is_seen_at_every_call() -> None:
    plain = WithArguments()
    model = fit(copy.deepcopy(plain), budget="1GB")
    x, hiding, index = torch.randn(4, 16), Hiding(), np.arange(2000) % 4
    for scale, row in ((1.0, 0), (3.0, 1), (1.0, 2)):
        hiding.scale = scale
        index[1000] = row  # in the middle: NumPy's repr leaves it out
        for arguments in ((x, hiding), (x, None, index)):
            assert torch.equal(plain(*arguments), model(*arguments))


@pytest.mark.slow
def test_a_plan_for_evaluation_is_not_taken_for_training() -> None:
    """Or the plain step would run, whatever the budget."""
    model, x = Returning(lambda _h, loss: loss).eval(), torch.randn(8, 16)
    solution = keeping_nothing(trace(model, x))
    apply(model, solution, on_mismatch="error")
    model(x).backward()
    model.train()
    with pytest.raises(PlanMismatchError, match="train"):
        model(x)
