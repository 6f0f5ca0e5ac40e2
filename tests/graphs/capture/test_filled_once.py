"""Attributes that the first call fills: planned where nothing but constants goes into them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.capture.joint_graph import capture
from graphs.model_calls import Call
from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit
from scheduler_runtime.fitting import plans_of
from solver import solve
from tests.support.bitwise import assert_equal
from tests.support.word_language import TransformerLanguageModel

N_TOKENS = 60


def transformer() -> TransformerLanguageModel:
    torch.manual_seed(0)
    return TransformerLanguageModel(n_tokens=N_TOKENS, width=16, n_layers=1)


def tokens(n_steps: int = 8) -> torch.Tensor:
    return torch.arange(n_steps * 4).reshape(n_steps, 4) * 7 % N_TOKENS


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(output[:-1].flatten(0, 1), batch[1:].flatten())


def train(model: nn.Module, lengths: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    seen = []
    for n_steps in lengths:
        model.zero_grad()
        value = loss(model(tokens(n_steps)), tokens(n_steps))
        value.backward()
        seen += [value.detach(), *(p.grad.clone() for p in model.parameters())]
    return [*seen, torch.get_rng_state()]


@pytest.mark.slow
def test_fit_fills_the_mask_as_the_first_call_does() -> None:
    plain = transformer()
    fitted = fit(copy.deepcopy(plain), budget="5MB")
    assert_equal(train(plain, [8, 8, 6, 6]), train(fitted, [8, 8, 6, 6]))
    assert torch.equal(plain.src_mask, fitted.src_mask)
    assert len(plans_of(fitted)) == 2


@pytest.mark.slow
def test_planning_leaves_the_mask_to_the_first_call() -> None:
    plain = transformer()
    solution = solve(plain, tokens(), budget="5MB", loss=loss)
    assert plain.src_mask is None
    planned = apply(copy.deepcopy(plain), solution)
    assert_equal(train(plain, [8, 8]), train(planned, [8, 8]))
    assert len(planned.forward._programs.programs) == 1


class Filling(nn.Module):
    def __init__(self, make: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept = None
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.make(self, x)
        return self.layer(x + self.kept).sum()


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    "make",
    [
        lambda module, _: module.layer.weight[0].detach() * 2,
        lambda _, x: x.mean(0),
        lambda _, x: torch.rand(4),
        lambda _, x: torch.zeros(4).fill_(3.0),
    ],
)
def test_what_is_more_than_constants_is_refused(make: Any) -> None:
    model = Filling(make)
    with pytest.raises(TraceError):
        trace(model, torch.ones(2, 4))
    assert model.kept is None


class Branching(nn.Module):
    """What it returns when it fills the attribute, and later."""

    def __init__(self, first: Callable[..., Any], later: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.other = nn.Parameter(torch.ones(4))
        self.kept = None
        self.first, self.later = first, later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.full((4,), 2.0)
            return self.first(self, x).sum()
        return self.later(self, x).sum()


def times_kept(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * module.weight * module.kept


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    "first",
    [
        lambda module, x: x * module.weight,  # other operators
        lambda module, x: x * module.other * module.kept,  # of another parameter
        lambda module, x: x * module.weight * torch.full((4,), 3.0),  # of another constant
    ],
)
def test_a_first_call_that_computes_something_else_is_refused(first: Any) -> None:
    with pytest.raises(TraceError, match=r"first call of Branching.*'kept'.*before it is planned"):
        trace(Branching(first, times_kept), torch.ones(2, 4))
    called = Branching(first, times_kept)
    called(torch.ones(2, 4))
    trace(called, torch.ones(2, 4))
    trace(Branching(times_kept, times_kept), torch.ones(2, 4))


class _Scaled(torch.autograd.Function):
    """The identity; its gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def without_gradient(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        other = x * module.other
    return other * module.weight * module.kept


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("first", "later"),
    [
        (without_gradient, lambda module, x: x * module.other * module.weight * module.kept),
        (
            lambda module, x: _Scaled.apply(times_kept(module, x), 1.0),
            lambda module, x: _Scaled.apply(times_kept(module, x), 2.0),
        ),
    ],
)
def test_a_first_call_of_other_gradients_is_refused(first: Any, later: Any) -> None:
    with pytest.raises(TraceError, match="computes something else"):
        trace(Branching(first, later), torch.ones(2, 4))
    trace(Branching(later, later), torch.ones(2, 4))


class Numbering(nn.Module):
    """Sets a number in each call, which a method of a part then changes, as Funnel does."""

    def __init__(self, following: Callable[[int], int]) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.part.pooled = 1
        self.following = following

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.pooled = self.following(self.part.pooled)
        return (self.part(x) / self.part.pooled).sum()


def test_a_number_that_each_call_leaves_is_left_by_planned_steps() -> None:
    def steps(model: Numbering, x: torch.Tensor) -> list[torch.Tensor]:
        seen = []
        for pooled in (1, None, 1, None):
            if pooled is not None:
                model.part.pooled = pooled
            model.zero_grad()
            model(x).backward()
            assert model.part.pooled == 2
            seen.append(model.part.weight.grad.clone())
        return seen

    torch.manual_seed(0)
    plain, x = Numbering(lambda _: 2), torch.randn(3, 4)
    fitted = fit(copy.deepcopy(plain), budget="5MB", optimizer=[])
    expected = steps(plain, x)
    assert plain.part.pooled == 2
    assert_equal(expected, steps(fitted, x))
    assert len(plans_of(fitted)) == 1


@pytest.mark.parametrize("value", [2j, b"two", torch.channels_last, torch.strided])
def test_plain_values_of_any_type_are_left_by_planned_steps(value: object) -> None:
    model = Storing(lambda module, _: setattr(module, "value", value))
    fitted = fit(model, budget="5MB", optimizer=[])
    for _ in range(2):
        fitted(torch.ones(2, 4)).backward()
        assert fitted.value == value
        del fitted.value


def test_a_number_that_changes_in_each_call_is_refused() -> None:
    model = Numbering(lambda n: n + 1)
    with pytest.raises(TraceError, match=r"cannot be planned.*'pooled' of 'part'"):
        trace(model, torch.ones(2, 4))
    assert model.part.pooled == 1


class Router(nn.Module):
    """Remembers the dtype and device of its input; computes in its own dtype, as Switch does."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input_dtype, self.device = x.dtype, x.device
        self.part = self.part.to(torch.float32)
        return self.part(x.float()).to(self.input_dtype).sum()


def test_a_router_that_keeps_dtypes_is_planned() -> None:
    torch.manual_seed(0)
    plain, x = Router(), torch.randn(3, 4)
    fitted = fit(copy.deepcopy(plain), budget="5MB", optimizer=[])
    for model in (plain, fitted):
        model(x).backward()
    assert torch.equal(plain.part.weight.grad, fitted.part.weight.grad)
    assert (fitted.input_dtype, fitted.device) == (torch.float32, torch.device("cpu"))


class WithSign(nn.Linear):
    """Sets a tensor in an `_apply` of its own."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.sign = fn(torch.full((), -1.0))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self, "sign", 1.0)


def test_what_a_submodules_own_apply_changes_is_refused() -> None:
    model = Router()
    model.part = nn.Sequential(WithSign(4, 4))
    with pytest.raises(TraceError, match=r"cannot be planned.*'sign' of 'part.0'"):
        trace(model, torch.randn(3, 4))


class Storing(nn.Module):
    """Sets attributes to the length of its batch. forward: what it does with them besides."""

    def __init__(self, how: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.part, self.n, self.how = nn.Linear(4, 4), 0, how
        self.part.m = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.how(self, x)
        self.n, self.part.m = x.shape[0], -x.shape[0]
        return (self.part(x) * self.n).sum() * (1.0 if y is None else y) + self.part.m


def overwritten(module: Any, x: torch.Tensor) -> None:
    module.n = x.shape[0]


def unset(module: Any, _: torch.Tensor) -> None:
    del module.n


def unseen(read: Callable[[Any], Any]) -> Callable[[Any, torch.Tensor], None]:
    """Reads, and does nothing with it."""

    def how(module: Any, _: torch.Tensor) -> None:
        read(module)

    return how


READS = [
    unseen(lambda module: module.n is None),
    unseen(lambda module: isinstance(module.n, int)),
    unseen(lambda module: bool(module.part.m)),
    unseen(lambda module: getattr(module, "n", 0)),
    unseen(lambda module: hasattr(module, "n")),
    unseen(lambda module: vars(module)["n"]),
    unseen(lambda module: copy.copy(module).n),
    lambda module, _: None if "n" in vars(module) else 2.0,
    unset,
]


@pytest.mark.slow
@pytest.mark.parametrize("how", [lambda *_: None, overwritten])
def test_a_number_that_is_set_unread_needs_no_plan_of_its_own(how: Any) -> None:
    batches = [torch.randn(n, 4) for n in (2, 3, 5)]
    torch.manual_seed(0)
    plain = Storing(how)
    fitted = fit(copy.deepcopy(plain), budget="5MB", optimizer=[])
    for index in (0, 1, 2, 0, 2, 1, 0, 1, 1, 2, 2, 0):
        for model in (plain, fitted):
            model.zero_grad()
            model(batches[index]).backward()
        assert torch.equal(plain.part.weight.grad, fitted.part.weight.grad)
        assert (fitted.n, fitted.part.m) == (plain.n, plain.part.m)
    assert len(plans_of(fitted)) == 3


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("how", READS)
def test_what_forward_reads_before_it_sets_it_is_compared(how: Any) -> None:
    model = Storing(how)
    state = vars(model), vars(model.part), vars(type(model)), vars(nn.Linear)
    before = [*map(dict, state)]
    call, device = Call.of((torch.ones(2, 4),), {}), torch.device("cpu")
    captured = capture(model, call, device=device, choose=lambda _output: (0,))
    assert [*map(dict, state)] == before
    assert {each.attribute for each in captured.filled} == {"n", "m"}
    assert not all(each.is_unread for each in captured.filled)


@pytest.mark.slow
def test_the_remedy_names_an_attribute_that_is_read_before_it_is_set() -> None:
    fitted = fit(Storing(READS[0]), budget="5MB", optimizer=[])
    for n in (2, 3):
        fitted(torch.ones(n, 4)).backward()
    remedy = fitted.forward._programs.remedy()
    assert "forward reads 'n' as the call before has left it" in remedy
    assert "'part.m'" not in remedy
