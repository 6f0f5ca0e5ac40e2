"""Refusals say what forward does, not what inside of torch has failed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphs.trace import TraceError, trace


class Doing(nn.Module):
    """Does something with x, and returns its loss."""

    def __init__(self, what: Callable[[Doing, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.state: Any = None
        self.cache: dict[str, torch.Tensor] = {}
        self.count = torch.zeros(4)
        self.what = what
        self.register_buffer("positions", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, x).square().mean()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.layer(x).mean()


def keeps_state(self: Doing, x: torch.Tensor) -> torch.Tensor:
    h = self.layer(x) if self.state is None else self.layer(x) + self.state
    self.state = h.detach()
    return h


def keeps_in_a_dict(self: Doing, x: torch.Tensor) -> torch.Tensor:
    h = self.layer(x) + self.cache.get("state", 0.0)
    self.cache["state"] = h.detach()
    return h


def fills_cache(self: Doing, x: torch.Tensor) -> torch.Tensor:
    if self.state is None:
        self.state = x.square().mean(0)
    return self.layer(x) * self.state


@pytest.mark.parametrize(
    ("what", "attribute"),
    [(keeps_state, "state"), (keeps_in_a_dict, "cache"), (fills_cache, "state")],
)
def test_a_tensor_kept_for_the_next_call_is_named_with_its_remedies(
    what: Any, attribute: str
) -> None:
    model = Doing(what)
    message = f"changes the attribute '{attribute}' of 'Doing'.*returned, .*called once before"
    with pytest.raises(TraceError, match=message):
        trace(model, torch.randn(8, 4))
    assert model.state is None
    assert model.cache == {}


@pytest.mark.slow
def test_it_is_named_in_a_submodule() -> None:
    with pytest.raises(TraceError, match="changes the attribute 'state' of 'inner'"):
        trace(Outer(Doing(keeps_state)), torch.randn(8, 4))


def test_a_cache_is_planned_where_the_model_was_called_once() -> None:
    model, x = Doing(fills_cache), torch.randn(8, 4)
    model(x)
    assert trace(model, x).nodes


def replaces_buffer(self: Doing, x: torch.Tensor) -> torch.Tensor:
    if self.positions.shape != x.shape[1:]:
        self.positions = torch.arange(x.shape[1]) / x.shape[1]
    return self.layer(x) * self.positions


def test_a_buffer_that_the_first_call_replaces() -> None:
    model, x = Doing(replaces_buffer), torch.randn(8, 4)
    with pytest.raises(TraceError, match=r"replaces buffer 'positions'.*call the model once"):
        trace(model, x)
    model(x)
    assert trace(model, x).nodes


def counts(self: Doing, x: torch.Tensor) -> torch.Tensor:
    self.count.add_(1)
    return self.layer(x) * self.count


@pytest.mark.parametrize("make", [Doing, pytest.param(lambda w: Outer(Doing(w)), id="inside")])
def test_a_tensor_in_a_plain_attribute_that_is_written_keeps_its_values(make: Any) -> None:
    model = make(counts)
    with pytest.raises(TraceError, match="changes in place a tensor that it has not made"):
        trace(model, torch.randn(8, 4))
    assert getattr(model, "inner", model).count.tolist() == [0.0] * 4


class _RunsAgain(torch.autograd.Function):
    """Calls a module once more in the backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> Any:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


def runs_again(self: Doing, x: torch.Tensor) -> torch.Tensor:
    return _RunsAgain.apply(self.layer(x), self.norm)


def test_a_backward_pass_that_calls_the_model_leaves_its_buffers() -> None:
    model = Doing(runs_again)
    model.norm = nn.BatchNorm1d(4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TraceError):
        trace(model, torch.randn(8, 4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def calls_backward(self: Doing, x: torch.Tensor) -> torch.Tensor:
    d = torch.zeros_like(x).requires_grad_()
    self.layer(x + d).sum().backward()
    return self.layer(x + d.grad)


def freezes(self: Doing, x: torch.Tensor) -> torch.Tensor:
    self.other.requires_grad_(False)
    y: torch.Tensor = self.other(self.layer(x))
    self.other.requires_grad_(True)
    return y


def freezes_by_assignment(self: Doing, x: torch.Tensor) -> torch.Tensor:
    self.other.weight.requires_grad = False
    y: torch.Tensor = self.other(self.layer(x))
    self.other.weight.requires_grad = True
    return y


def freezes_by_keyword(self: Doing, x: torch.Tensor) -> torch.Tensor:
    self.other.weight.requires_grad_(requires_grad=False)
    y: torch.Tensor = self.other(self.layer(x))
    self.other.weight.requires_grad_()
    return y


class Marked(torch.Tensor):
    pass


def subclass(self: Doing, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x.as_subclass(Marked)).as_subclass(torch.Tensor)


_compiled = torch.compile(lambda x: x.sin() * x.cos(), backend="aot_eager")


def compiled(self: Doing, x: torch.Tensor) -> torch.Tensor:
    return _compiled(self.layer(x))


def jagged(self: Doing, x: torch.Tensor) -> torch.Tensor:
    nested = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=torch.jagged)
    return torch.nested.to_padded_tensor(self.layer(nested), 0.0)


def random_number(self: Doing, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x) * torch.rand(()).item()


def random_mask(self: Doing, x: torch.Tensor) -> torch.Tensor:
    h: torch.Tensor = self.layer(x)
    return h[torch.rand(len(x)) < 0.5]


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (freezes_by_keyword, "switches requires_grad of a parameter"),
        (calls_backward, r"forward calls backward\(\).*torch.autograd.grad"),
        (jagged, "a nested tensor .*pad to one length"),
        (random_number, r"reads random numbers that it draws.*if torch.rand\(\[\]\) < p"),
        (random_mask, "reads random numbers that it draws"),
        (freezes, "switches requires_grad of a parameter"),
        (freezes_by_assignment, "switches requires_grad of a parameter"),
        (subclass, "a tensor of the class Marked"),
        (compiled, "a function compiled by torch.compile"),
    ],
)
def test_what_forward_does_is_said_with_its_line(what: Any, message: str) -> None:
    model = Doing(what)
    with pytest.raises(TraceError, match=rf"\(.*test_refused_trace.py, line \d+\): .*{message}"):
        trace(model, torch.randn(8, 4))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def sets_what_is_set(self: Doing, x: torch.Tensor) -> torch.Tensor:
    self.layer.requires_grad_(True)
    return self.layer(x.requires_grad_(True))


def test_flags_that_stay_and_those_of_arguments_may_be_set() -> None:
    assert trace(Doing(sets_what_is_set), torch.randn(8, 4)).nodes


class Piece(Doing):
    """Returns what it computes, not a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, x)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("what", [freezes, subclass, compiled])
def test_in_a_submodule_it_is_one_piece(what: Any) -> None:
    graph = trace(Outer(Piece(what)), torch.randn(8, 4), loss=lambda output, _: output.sum())
    assert [each["module"] for each in graph.meta.environment["opaque"]] == ["inner"]


class _Chooses:
    """Takes the place of a layer's forward, as AdaptiveLayerLoss of sentence-transformers does."""

    def __init__(self, forward: Any) -> None:
        self.forward, self.factor = forward, 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * self.forward(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_method", [False, True])
def test_an_object_in_place_of_a_submodules_forward_is_refused(is_method: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    chooses = _Chooses(model[0].forward)
    model[0].forward = chooses.__call__ if is_method else chooses
    with pytest.raises(TraceError, match=r"the forward of its submodule '0' .* type _Chooses"):
        trace(model, torch.randn(2, 4), loss=lambda made, _: made.sum())


def test_a_function_in_place_of_a_submodules_forward_is_traced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].forward = functools.partial(type(model[0]).forward, model[0])
    assert trace(model, torch.randn(2, 4), loss=lambda made, _: made.sum()).nodes


def test_a_tensor_kept_outside_of_the_model_is_named() -> None:
    """PyTorch fails with an assertion about a tensor without values, from the call before."""
    kept: dict[str, torch.Tensor] = {}

    def scaled(model: Doing, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in kept:
            kept["scale"] = torch.arange(4.0)
        return model.layer(x) * kept["scale"]

    with pytest.raises(TraceError, match="reads a tensor that an earlier call has kept in a glob"):
        trace(Doing(scaled), torch.randn(2, 4))
    kept.clear()
    Doing(scaled)(torch.randn(2, 4))  # as the message says
    assert trace(Doing(scaled), torch.randn(2, 4)).nodes
