"""Memory of optimizers against real steps under the profiler; the user's optimizer is unchanged."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from graphs.costs.memory_events import cpu_peak_bytes
from graphs.costs.models import Cost, Roofline
from graphs.costs.operators import OpCall
from graphs.hardware import named
from graphs.model_calls.call import TraceError
from graphs.trace import trace
from graphs.training_step.optimizer import optimizer_costs

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

SCALARS_BYTES = 64
"""Scalars that real kernels briefly wrap into tensors; on fake tensors they do not exist."""

OPTIMIZERS: dict[str, Make] = {
    "AdamW": optim.AdamW,
    "AdamW, foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, fused=True),
    "AdamW, learning rate in a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(1e-3)),
    "Adam, amsgrad and decay": lambda p: optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "Adam, amsgrad, foreach": lambda p: optim.Adam(p, amsgrad=True, foreach=True),
    "Adam, maximize": lambda p: optim.Adam(p, maximize=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "SGD, nesterov, foreach": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "SGD, fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": optim.RMSprop,
    "RMSprop, centered, momentum": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "Adafactor": optim.Adafactor,
    "Adagrad": optim.Adagrad,  # makes its state when constructed
    "Adadelta": optim.Adadelta,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Rprop": optim.Rprop,
}


def model() -> nn.Module:
    """Parameters of one, two and four dimensions; the largest is none of the first two."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(300, 400), nn.LayerNorm(400), nn.Linear(400, 500, bias=False), nn.Conv2d(3, 8, 3)
    )


def costs_of(optimizer: Any, of: nn.Module, *, card: str = "cpu") -> dict[str, Any]:
    costs = Roofline(named(card))
    return optimizer_costs(optimizer, of, device=torch.device("cpu"), costs=costs)


def step_for_real(optimizer: optim.Optimizer, *, n_steps: int = 8) -> tuple[int, int]:
    """State bytes after some steps (RAdam takes more from the sixth on), workspace of the next."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
    for _ in range(n_steps):
        optimizer.step()
    leaves = pytree.tree_leaves(list(optimizer.state.values()))
    storages = [item.untyped_storage() for item in leaves if isinstance(item, torch.Tensor)]
    state_bytes = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    return state_bytes, cpu_peak_bytes(optimizer.step).peak_bytes


def parameter_bytes(of: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in of.parameters())


@pytest.mark.slow(sample=5)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_and_workspace_are_those_of_a_real_step(make: Make) -> None:
    net = model()
    optimizer = make(net.parameters())
    cost = costs_of(optimizer, net)
    state_bytes, workspace_bytes = step_for_real(optimizer)
    assert cost["name"] == type(optimizer).__name__
    assert cost["state_bytes"] == state_bytes
    assert cost["workspace_bytes"] == pytest.approx(workspace_bytes, abs=SCALARS_BYTES)
    assert cost["time_s"] > 0


@pytest.mark.parametrize("shape", [(256, 64), (64, 256)])
def test_muon_adds_products_to_transposed_matrices(shape: tuple[int, int]) -> None:
    """A matrix with more rows than columns is orthogonalized transposed, in bfloat16."""
    net = nn.Linear(*shape, bias=False)
    cost = costs_of(optim.Muon, net)
    state_bytes, workspace_bytes = step_for_real(optim.Muon(net.parameters()))
    assert cost["state_bytes"] == state_bytes
    # What such a product takes itself is not estimated: nothing without AVX-512.
    matrix = torch.randn(256, 64, dtype=torch.bfloat16).T
    product_bytes = cpu_peak_bytes(lambda: matrix @ matrix.T).peak_bytes - 64 * 64 * 2
    assert workspace_bytes - product_bytes <= cost["workspace_bytes"]
    assert cost["workspace_bytes"] <= workspace_bytes + SCALARS_BYTES


@pytest.mark.parametrize("t0", [1e6, 0.0])
def test_asgd_before_and_while_it_averages(t0: float) -> None:
    """Averaging, from the step after `t0` on, takes a tensor as large as the parameter. The twin
    looks ahead to the millionth step."""
    net = model()

    def make(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.ASGD(parameters, t0=t0)

    cost = costs_of(make, net)
    state_bytes, workspace_bytes = step_for_real(make(net.parameters()), n_steps=2)
    assert cost["state_bytes"] == state_bytes
    assert cost["workspace_bytes"] == pytest.approx(workspace_bytes, abs=SCALARS_BYTES)
    assert (workspace_bytes > 400 * 500 * 4) == (t0 == 0)


def test_adamw_by_hand() -> None:
    """Two moments per parameter and a step count; a loop holds two tensors of the largest."""
    net = model()
    cost = costs_of(optim.AdamW, net)
    n_parameters = len(list(net.parameters()))
    largest = 400 * 500 * 4
    assert cost["state_bytes"] == 2 * parameter_bytes(net) + 4 * n_parameters
    assert 2 * largest <= cost["workspace_bytes"] <= 2 * largest + 4096  # a bias too


def test_foreach_takes_a_copy_of_all_parameters() -> None:
    net = model()
    found = costs_of(optim.AdamW, net, card="h100")
    assert found == costs_of(lambda p: optim.AdamW(p, foreach=True), net, card="h100")
    assert found["workspace_bytes"] == parameter_bytes(net)


@pytest.mark.parametrize("choice", [{"fused": True}, {"foreach": False}])
def test_the_device_does_not_overrule_the_users_choice(choice: dict[str, bool]) -> None:
    net = model()

    def make(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.AdamW(parameters, **choice)

    on_card, here = costs_of(make, net, card="h100"), costs_of(make, net)
    expected = pytest.approx(here["workspace_bytes"], abs=SCALARS_BYTES)  # numbers are on the host
    assert on_card["workspace_bytes"] == expected


def test_groups_with_different_options() -> None:
    net = model()
    first, *rest = net.parameters()
    groups = [
        {"params": [first], "amsgrad": True},
        {"params": rest, "foreach": True, "weight_decay": 0.0},
    ]
    optimizer = optim.AdamW(groups, lr=1e-3)
    cost = costs_of(optimizer, net)
    state_bytes, workspace_bytes = step_for_real(optimizer)
    assert cost["state_bytes"] == state_bytes
    assert cost["workspace_bytes"] == pytest.approx(workspace_bytes, abs=SCALARS_BYTES)


@pytest.mark.parametrize("as_function", [True, False])
def test_frozen_parameters_have_no_state(as_function: bool) -> None:
    net = model()
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    trained_bytes = sum(p.numel() * p.element_size() for p in trained)
    optimizer = optim.AdamW if as_function else optim.AdamW(net.parameters())
    cost = costs_of(optimizer, net)
    assert cost["state_bytes"] == 2 * trained_bytes + 4 * len(trained)
    state_bytes, workspace_bytes = step_for_real(optim.AdamW(net.parameters()))
    assert cost["state_bytes"] == state_bytes
    assert cost["workspace_bytes"] == pytest.approx(workspace_bytes, abs=SCALARS_BYTES)


def test_tied_weights_have_state_once() -> None:
    tied = nn.Sequential(nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False))
    tied[1].weight = tied[0].weight
    assert costs_of(optim.AdamW, tied)["state_bytes"] == 2 * 20 * 20 * 4 + 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_has_the_dtype_of_its_parameter(dtype: torch.dtype) -> None:
    net = model().to(dtype)
    optimizer = optim.AdamW(net.parameters())
    cost = costs_of(optimizer, net)
    state_bytes, workspace_bytes = step_for_real(optimizer)
    assert cost["state_bytes"] == state_bytes
    assert cost["workspace_bytes"] == pytest.approx(workspace_bytes, abs=SCALARS_BYTES)


def test_a_model_that_holds_no_memory_is_planned_as_the_real_one() -> None:
    with torch.device("meta"):
        planned = model()
    assert costs_of(optim.AdamW, planned) == costs_of(optim.AdamW, model())
    assert costs_of(optim.AdamW(planned.parameters()), planned) == costs_of(optim.AdamW, model())


# The user's optimizer is looked at, and no more.


def everything(optimizer: optim.Optimizer, net: nn.Module) -> Any:
    parameters = list(net.parameters())
    numbers = [p.detach().clone() for p in parameters]
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    versions = [p._version for p in parameters]
    return numbers, gradients, versions, copy.deepcopy(optimizer.state_dict())


def same(one: Any, other: Any) -> bool:
    flat, spec = pytree.tree_flatten(one)
    flat_other, spec_other = pytree.tree_flatten(other)
    return spec == spec_other and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(flat, flat_other, strict=True)
    )


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("n_steps", [0, 3], ids=["fresh", "with state"])
@pytest.mark.parametrize("make", [optim.AdamW, OPTIMIZERS["SGD, momentum"], optim.Adagrad])
def test_the_users_optimizer_is_untouched(make: Make, n_steps: int) -> None:
    net = model()
    optimizer = make(net.parameters())
    if n_steps:
        step_for_real(optimizer, n_steps=n_steps)
    before = everything(optimizer, net)
    random_state = torch.get_rng_state()
    cost = costs_of(optimizer, net)
    assert same(before, everything(optimizer, net))
    assert torch.equal(random_state, torch.get_rng_state())
    assert cost == costs_of(make, model())  # the state that is there already counts once
    step_for_real(optimizer)  # and it still steps


def test_hooks_and_schedulers_hear_nothing() -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters())
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    rates = scheduler.get_last_lr()
    n_counted = getattr(optimizer, "_opt_called", False)
    assert costs_of(optimizer, net) == costs_of(optim.AdamW, model())
    assert heard == []
    assert scheduler.get_last_lr() == rates
    assert getattr(optimizer, "_opt_called", False) == n_counted
    step_for_real(optimizer, n_steps=1)
    assert heard == ["before", "after"] * 2


def test_a_function_is_given_the_parameters_that_are_trained() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    given: list[nn.Parameter] = []

    def make(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        given.extend(parameters)
        return optim.SGD(given, lr=0.1)

    costs_of(make, net)
    assert [id(p) for p in given] == [id(p) for p in net.parameters() if p.requires_grad]


class Shampooish(optim.Optimizer):
    """A user's optimizer with a state matrix per parameter and further state of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.helper = torch.zeros(7)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.dim() != 2:
                    continue
                state = self.state[p]
                if not state:
                    state["left"] = torch.zeros(p.shape[0], p.shape[0], device=p.device)
                state["left"].addmm_(p.grad, p.grad.T)
                p.add_(state["left"] @ p.grad, alpha=-group["lr"])


def test_an_optimizer_that_torch_does_not_know() -> None:
    net = model()
    optimizer = Shampooish(net.parameters())
    cost = costs_of(optimizer, net)
    state_bytes, workspace_bytes = step_for_real(optimizer, n_steps=1)
    assert cost["name"] == "Shampooish"
    assert cost["state_bytes"] == state_bytes == 4 * (400**2 + 500**2)
    assert cost["workspace_bytes"] == pytest.approx(workspace_bytes, abs=SCALARS_BYTES)


class Lion(optim.Optimizer):
    """A user's own, that makes its state when constructed and steps a list of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.all = [p for group in self.param_groups for p in group["params"]]
        for p in self.all:
            self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.all:
            momentum = self.state[p]["momentum"].lerp_(p.grad, 0.1)
            p.sub_(momentum.sign() * self.defaults["lr"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_in_an_attribute_are_the_twins_own(device: str) -> None:
    with torch.device(device):
        net = model()
        optimizer = Lion(net.parameters())
    before = [p._version for p in net.parameters()]
    cost = costs_of(optimizer, net)
    assert [p._version for p in net.parameters()] == before
    assert cost["state_bytes"] == parameter_bytes(net)
    number_bytes = 8 + 4  # the factor of the update, in 64 bits and as float32
    largest = max(p.numel() * 4 for p in net.parameters())
    assert cost["workspace_bytes"] == 2 * largest + number_bytes


def test_hooks_of_all_optimizers_hear_nothing() -> None:
    heard: list[str] = []
    handle = register_optimizer_step_post_hook(lambda *_: heard.append("after"))
    try:
        costs_of(optim.AdamW, model())
    finally:
        handle.remove()
    assert heard == []


def test_workspace_of_the_optimizers_operators_counts() -> None:
    class Wasteful(Roofline):
        def cost(self, call: OpCall) -> Cost:
            return Cost(time_s=1.0, workspace_bytes=1_000_000)

    net = model()
    cost = optimizer_costs(
        OPTIMIZERS["SGD"], net, device=torch.device("cpu"), costs=Wasteful(named("cpu"))
    )
    assert cost["workspace_bytes"] == 1_000_000
    assert cost["time_s"] == len(list(net.parameters()))  # an addition for each


def test_an_optimizer_that_needs_a_closure_is_refused_by_name() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"^LBFGS steps with a closure, .* reserve="):
        costs_of(optim.LBFGS(net.parameters()), net)
    step_for_real(optim.SGD(net.parameters(), lr=0.1))  # no fake mode is left behind


def test_a_model_that_was_cast_in_training_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 4)
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.double()
    with pytest.raises(TraceError, match=r"state in float32 for parameters in float64, .*cast"):
        costs_of(optimizer, model)
    assert "Traceback" not in capfd.readouterr().err


def test_an_optimizer_of_another_model_is_refused_and_one_of_more_parameters_warned_of() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    call = {"loss": lambda output, _: output.mean()}
    with pytest.raises(
        TraceError, match=r"Adam has none of this Linear's parameters; its 2 .* Adam\(model\."
    ):
        trace(model, torch.ones(2, 4), optimizer=torch.optim.Adam(other.parameters()), **call)
    both = torch.optim.Adam([*model.parameters(), *other.parameters()])
    with pytest.warns(UserWarning, match="has 2 parameters of this Linear and 2 others"):
        trace(model, torch.ones(2, 4), optimizer=both, **call)
    part = torch.optim.Adam([model.weight])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trace(model, torch.ones(2, 4), optimizer=part, **call)
