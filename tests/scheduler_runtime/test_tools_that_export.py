"""Tools that write down a model's operators see a planned model as if it had no plan."""

from __future__ import annotations

import copy
import inspect
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint_solver import apply, fit, remove, solve
from checkpoint_solver.export import to_torch_checkpoint
from tests.support.bitwise import assert_equal

WIDTH, N_ROWS = 16, 64


class Scaled(nn.Module):
    """A layer with an argument of its own, dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.dropout(torch.relu(self.norm(self.linear(x)))) * scale


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(), Scaled()

    def forward(self, x: torch.Tensor, shift: float = 1.0) -> torch.Tensor:
        return self.second(self.first(x), scale=3.0) + shift


def batch() -> torch.Tensor:
    return torch.randn(N_ROWS, WIDTH)


def summed(output: torch.Tensor, _batch: torch.Tensor) -> torch.Tensor:
    return output.sum()


def fitted(model: nn.Module) -> nn.Module:
    return fit(model, budget="1MB", optimizer=torch.optim.SGD(model.parameters(), 0.1))


def trained(model: nn.Module) -> nn.Module:
    fitted(model)(batch()).sum().backward()
    return model


def applied(model: nn.Module) -> nn.Module:
    return apply(model, solve(model, batch(), loss=summed, budget="1MB"))


def checkpointed(model: nn.Module) -> nn.Module:
    solution = solve(model, batch(), loss=summed, budget="60.5KB")
    assert to_torch_checkpoint(model, solution).modules
    return model


PLANS = [fitted, trained, applied, checkpointed]
Way = Callable[[nn.Module], nn.Module]


def pair(way: Way, *, training: bool) -> tuple[nn.Module, nn.Module]:
    """(without, with) a plan, of the same values."""
    planned = way(Tower())
    plain = remove(copy.deepcopy(planned))
    assert "forward" not in vars(plain)
    return plain.train(training), planned.train(training)


def exported(model: nn.Module, **options: Any) -> torch.export.ExportedProgram:
    return torch.export.export(model, (batch(),), **options)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", PLANS)
def test_torch_export_sees_the_modules_own_forward(way: Way, training: bool) -> None:
    plain, planned = pair(way, training=training)
    expected, got = exported(plain), exported(planned)
    assert str(got.graph) == str(expected.graph)
    assert got.graph_signature == expected.graph_signature
    assert got.state_dict.keys() == expected.state_dict.keys()
    copied = exported(copy.deepcopy(planned))
    assert str(copied.graph) == str(expected.graph)
    x = batch()
    torch.manual_seed(0)
    from_plain = expected.module()(x)
    torch.manual_seed(0)
    assert torch.equal(got.module()(x), from_plain)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("way", PLANS)
def test_strict_export_sees_it_too(way: Way) -> None:
    plain, planned = pair(way, training=False)
    x = batch()
    assert torch.equal(exported(planned, strict=True).module()(x), plain(x))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("way", PLANS)
def test_dynamic_shapes_and_hooks_are_exported(way: Way) -> None:
    plain, planned = pair(way, training=False)
    for model in (plain, planned):
        model.register_forward_hook(lambda _module, _inputs, output: output + 1)
        model.get_submodule("first").register_forward_hook(lambda _m, _i, output: output * 2)
        model.register_forward_pre_hook(lambda _module, inputs: (inputs[0] - 1,))
    program = exported(planned, dynamic_shapes=({0: torch.export.Dim("rows")},))
    for n_rows in (3, N_ROWS):
        x = torch.randn(n_rows, WIDTH)
        assert torch.equal(program.module()(x), plain(x))


def test_a_model_around_a_planned_one_is_exported() -> None:
    plain, planned = (nn.Sequential(each) for each in pair(fitted, training=False))
    x = batch()
    assert torch.equal(exported(planned).module()(x), plain(x))


def test_the_plan_goes_on_after_an_export() -> None:
    plain, planned = pair(trained, training=True)
    exported(planned)
    x = batch()
    gradients = []
    for model in (plain, planned):
        model.zero_grad()
        torch.manual_seed(0)
        model(x).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert_equal(*gradients)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", PLANS)
def test_jit_trace_sees_the_modules_own_forward(way: Way, training: bool) -> None:
    plain, planned = pair(way, training=training)
    expected, got = (torch.jit.trace(m, (batch(),), check_trace=False) for m in (plain, planned))
    assert _traced(got) == _traced(expected)
    x = batch()
    torch.manual_seed(0)
    from_plain = expected(x)
    torch.manual_seed(0)
    assert torch.equal(got(x), from_plain)


def _traced(script: Any) -> str:
    """The graph; classes that are traced again get numbers."""
    return re.sub(r"___torch_mangle_\d+\.", "", str(script.inlined_graph))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", PLANS)
def test_symbolic_traces_of_it_and_around_it(way: Way, training: bool) -> None:
    plain, planned = pair(way, training=training)
    for expected, got in ((plain, planned), (nn.Sequential(plain), nn.Sequential(planned))):
        assert torch.fx.symbolic_trace(got).code == torch.fx.symbolic_trace(expected).code


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", PLANS)
def test_jit_script_says_what_to_do(way: Way, training: bool) -> None:
    _, planned = pair(way, training=training)
    with pytest.raises(AttributeError, match=r"has a plan.*remove\(model\) before exporting"):
        torch.jit.script(planned)
    torch.jit.script(remove(planned))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("way", PLANS)
def test_what_the_forward_says_of_itself(way: Way) -> None:
    plain, planned = pair(way, training=True)
    for each in (planned, copy.deepcopy(planned)):
        assert inspect.signature(each.forward) == inspect.signature(plain.forward)
        assert inspect.unwrap(each.forward).__self__ is each
        assert each.forward.__name__ == "forward"
        assert each.forward.__code__ is Tower.forward.__code__


def test_parameters_in_host_memory_are_not_exported() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    solution = solve(
        model,
        torch.randn(8, 256),
        budget="100MB",
        optimizer=optimizer,
        host_budget="1GB",
        host_link="10GB/s",
        loss=summed,
        optimizer_state="host",
        parameters="host",
    )
    apply(model, solution, optimizer=optimizer)
    with pytest.raises(RuntimeError, match=r"host memory.*remove\(model\) before exporting"):
        exported(model)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("way", PLANS)
def test_functional_call_takes_the_given_values(way: Way) -> None:
    plain, planned = pair(way, training=False)
    values = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
    x = batch()
    expected, got = (torch.func.functional_call(m, values, (x,)) for m in (plain, planned))
    assert torch.equal(got, expected)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("way", PLANS)
def test_a_planned_model_is_saved_whole(way: Way) -> None:
    plain, planned = pair(way, training=True)
    file = io.BytesIO()
    torch.save(planned, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert str(exported(loaded).graph) == str(exported(plain).graph)
    planned.double()
    planned.half()
    assert {p.dtype for p in planned.parameters()} == {torch.float16}
