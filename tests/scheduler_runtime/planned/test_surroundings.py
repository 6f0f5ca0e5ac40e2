"""What is around a planned step: other threads and plans, transforms, settings of torch, hooks."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

from graphs.model_calls import Call
from graphs.trace import TraceError
from scheduler_runtime import fit, plans_of, remove
from scheduler_runtime.planned.guards import changed_setting, kind_of
from tests.support.bitwise import assert_equal, assert_same_gradients

pytestmark = pytest.mark.filterwarnings("ignore:fit. the optimizer's state is not counted")


class Small(nn.Module):
    """New numbers and attention: what settings of torch have a say in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).view(-1, 64, 3, 2, 16).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (attended * torch.full((16,), 1.1)).square().mean()


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 64, 32, generator=generator, dtype=torch.float32)


def gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of the first weight, in one step; the random state before it is set."""
    model.zero_grad()
    torch.manual_seed(1)
    model(x).backward()
    weight = next(model.parameters())
    return weight.grad.clone()


@contextmanager
def _double_numbers() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _doubling_hook() -> Iterator[None]:
    """A hook for all modules that changes what some of them return."""

    def doubled(module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * 2 if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(doubled)
    try:
        yield
    finally:
        handle.remove()


def _doubled(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v * 2 if isinstance(v, torch.Tensor) else v for v in values)


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("register", "hook"),
    [
        ("forward_hook", lambda _m, _x, y: y * 2 if isinstance(y, torch.Tensor) else None),
        ("forward_pre_hook", lambda _m, x: _doubled(x)),
        ("full_backward_pre_hook", lambda _m, dy: _doubled(dy)),
    ],
    ids=["forward", "forward_pre", "full_backward_pre"],
)
def test_hooks_of_all_modules_run_once_for_each_module(
    register: str, hook: Callable[..., Any]
) -> None:
    """Not for the modules that a trace puts around the model."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    planned, x = copy.deepcopy(plain), torch.randn(3, 4)
    handle = getattr(nn.modules.module, f"register_module_{register}")(hook)
    try:
        for model in (plain, fit(planned, budget="1GB")):
            model(x).square().sum().backward()
    finally:
        handle.remove()
    assert_same_gradients(plain, planned)


class _Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dtype of new numbers": _double_numbers,
    "kernels of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "hook for all modules": _doubling_hook,
    "mode of torch functions": _Doubling,
}


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_setting_of_torch_is_another_program(
    setting: Callable[[], AbstractContextManager[Any]],
) -> None:
    plain = Small()
    model = fit(copy.deepcopy(plain), budget="1GB")
    for _ in range(2):  # each way, and back
        assert torch.equal(gradient(model, batch()), gradient(plain, batch()))
        with setting():
            assert torch.equal(gradient(model, batch()), gradient(plain, batch()))
    assert len(plans_of(model)) == 2


class Tagged(torch.Tensor):
    """A tensor of the user."""


def test_a_tensor_of_another_class_is_no_plain_tensor() -> None:
    """The trace of a plain one knows nothing of what its class does to functions of torch."""
    model = fit(Small(), budget="1GB")
    model(batch()).backward()
    model.zero_grad()
    with pytest.raises(TraceError, match=r"type Tagged are not supported: pass a plain tensor"):
        model(batch().as_subclass(Tagged))
    model(nn.Parameter(batch(), requires_grad=False)).backward()
    assert len(plans_of(model)) == 1


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(torch.backends.cudnn, "enabled", False), (torch.backends.opt_einsum, "strategy", "greedy")],
)
def test_a_setting_of_a_backend_is_compared(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if owner is torch.backends.opt_einsum:  # settable without the package
        owner = types.SimpleNamespace(enabled=True, strategy="auto")
        monkeypatch.setattr(torch.backends, "opt_einsum", owner)
    model, call = Small(), Call.of((batch(),), {})
    before = kind_of(model, call)
    assert before == kind_of(model, call)
    monkeypatch.setattr(owner, name, value)
    found = changed_setting(before, kind_of(model, call), model)
    assert f"{owner.__name__ if name == 'enabled' else 'torch.backends.opt_einsum'}" in found


def test_transforms_of_torch_func_pass_the_plan_by() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model = fit(copy.deepcopy(plain), budget="1GB")
    rows = torch.randn(5, 4)

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor, of: nn.Module) -> Any:
        return torch.func.functional_call(of, parameters, (row,)).square().sum()

    def shown(of: nn.Module) -> list[torch.Tensor]:
        own = {name: p.detach() for name, p in of.named_parameters()}
        each = torch.func.vmap(torch.func.grad(lambda p, row: loss(p, row, of)), (None, 0))
        return [*each(own, rows).values(), torch.func.vmap(of)(rows), torch.func.jacrev(of)(rows)]

    assert_equal(shown(model), shown(plain))
    assert plans_of(model) == ()


def test_a_gradient_penalty_is_taken_beside_the_plan() -> None:
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = fit(copy.deepcopy(plain), budget="1GB")
    rows = torch.randn(5, 8)

    def gradient(of: nn.Module) -> torch.Tensor:
        if of is model:
            return torch.func.grad(lambda x: of(x).sum())(rows)
        x = rows.clone().requires_grad_()
        return torch.autograd.grad(of(x).sum(), x, create_graph=True)[0]

    for each in (plain, model):
        (each(rows).mean() + (gradient(each).norm(dim=1) - 1).square().mean()).backward()
    assert_same_gradients(plain, model)
    assert len(plans_of(model)) == 1


def test_threads_plan_in_turns() -> None:
    plain = [Small().requires_grad_(True) for _ in range(2)]
    models = [fit(copy.deepcopy(each), budget="1GB") for each in plain]

    def steps(model: nn.Module) -> None:
        for _ in range(2):
            model(batch()).backward()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(steps, model) for model in models]:
            done.result()
    for model, each in zip(models, plain, strict=True):
        steps(each)
        assert torch.equal(model.linear.weight.grad, each.linear.weight.grad)


def test_a_plan_within_a_plan_is_refused() -> None:
    outer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    fit(outer[0], budget="1GB")
    fit(outer, budget="1GB")
    with pytest.raises(TraceError, match=r"submodule 0 has a plan already.*remove\(that submod"):
        outer(torch.randn(2, 4))


def test_weights_that_calls_share_are_refused() -> None:
    """Spectral norm changes its buffers once in all of the calls, and not once in each."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    fit(model, budget="1GB")
    x = torch.randn(2, 4)
    model(x).sum().backward()
    with parametrize.cached(), pytest.raises(TraceError, match=r"parametrize\.cached\(\) is on"):
        model(x)


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return self.linear(x).sum()


class Solving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(self.matrix, x.T).sum()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Clamped, r"forward changes parameter 'linear\.weight' in place"),
        (Solving, r"solve_ex\(a, b\)\.result"),
    ],
)
def test_what_cannot_be_planned_is_told_with_a_way_out(make: Any, words: str) -> None:
    model = fit(make(), budget="1GB")
    with pytest.raises(TraceError, match=words):
        model(torch.randn(2, 4))


class InitializedFromData(nn.Module):
    """As ActNorm of Glow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("is_ready", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.is_ready.item() == 0:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.is_ready.fill_(1)
        return (x * self.scale).square().sum()


def test_a_parameter_that_the_first_call_initializes_is_planned_after_that_call() -> None:
    x = torch.randn(8, 4)
    model = fit(InitializedFromData(), budget="1GB")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TraceError, match="call the model once before planning"):
        model(x)
    assert_equal(before.values(), model.state_dict().values())
    with torch.no_grad():
        model(x)
    plain = remove(copy.deepcopy(model))
    for each in (plain, model):
        each(x).backward()
    assert_same_gradients(plain, model)
