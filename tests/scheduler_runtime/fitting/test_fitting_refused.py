"""What fit refuses, and with which words."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from graphs.model_calls import TraceError
from scheduler_runtime import CheckpointedAlreadyError, FitError, apply, fit, plans_of, remove
from scheduler_runtime.fitting.options import nothing_fits
from solver import report, solve
from solver.sizes_deadlines_progress.sizes import BudgetError
from tests.scheduler_runtime.fitting.test_fitting import Tower, adamw, numbers, tower
from tests.support.bitwise import assert_equal


def test_a_budget_without_its_unit_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"invalid budget '16': 16 bytes, .* write 16GB for"):
        fit(tower(), budget="16")


def test_nothing_fits_is_an_error_with_the_least_budget_and_the_op() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    fit(model, budget="20KB", optimizer=adamw(model.parameters()))
    with pytest.raises(FitError, match=r"minimum budget found: .*, proven.*; bottleneck op: "):
        model(numbers(512)[0])


def test_the_error_says_what_may_help_and_the_budget_that_it_names_fits() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    fit(model, budget="20KB", optimizer=adamw(model.parameters()))
    with pytest.raises(FitError) as refused:
        model(numbers(512)[0])
    helps = str(refused.value).partition(". What may help: ")[2]
    for each in ("loss_reserve=", 'host_budget="64GB"', 'rewrites="allclose"', "a smaller batch"):
        assert each in helps
    budget = re.match(r'budget="(.*?)" or more; ', helps)
    assert budget is not None
    fit(remove(model), budget=budget[1], optimizer=adamw(model.parameters()))
    model(numbers(512)[0]).sum().backward()


def test_nothing_fits_beside_the_gradients_of_the_last_step() -> None:
    """zero_grad() after the forward pass, as in many loops of reinforcement learning."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    fit(model, budget="20KB", optimizer=adamw(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(FitError, match=r"call zero_grad\(\) before the forward pass, not after it"):
        model(numbers(512)[0])


class _WithHidden(nn.Module):
    """Returns its loss, and what a training loop may add terms of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            hidden = x = torch.tanh(layer(x))
        return {"loss": x.square().mean(), "hidden": hidden}


@pytest.mark.slow
def test_a_step_that_holds_two_forward_passes_names_its_remedy() -> None:
    def step(budget: int, **options: Any) -> None:
        model = fit(_WithHidden(), budget=budget, rewrites="none", **options)
        output = model(torch.randn(512, 32))
        (output["loss"] + output["hidden"].norm()).backward()

    x = torch.randn(512, 32)
    model = _WithHidden()
    found = solve(model, x, budget=1000, rewrites="none", loss=lambda output, _: output["loss"])
    enough = found.minimum_budget_bytes * 6 // 5  # for one forward pass
    with pytest.raises(
        FitError, match=r"two forward passes, .* fit\(\.\.\., loss_outputs="
    ) as caught:
        step(enough)
    assert "for this step alone" in str(caught.value)
    step(enough, loss_reserve=0, loss_outputs=lambda output: (output["loss"], output["hidden"]))


@pytest.mark.slow
def test_too_little_time_names_the_option() -> None:
    late = dataclasses.replace(
        solve(_WithHidden(), torch.randn(512, 32), budget=1000), status="time_limit"
    )
    assert "(time_limit: raise time_limit_s=)" in str(nothing_fits("Model", late))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"type function, not a torch\.nn\.Module: fit\(model"):
        fit(lambda x: x, budget="1MB")
    with pytest.raises(ValueError, match="already has a plan, from fit; call remove"):
        fit(fit(tower(), budget="1MB"), budget="1MB")


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the refusal is for machines without CUDA; on a CUDA device the budget is what is free",
)
def test_auto_without_cuda_is_refused_with_what_to_give() -> None:
    with pytest.raises(BudgetError, match=r"fit\(model, budget='16GB'\)"):
        fit(tower())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_forward_that_checkpoints_is_refused(use_reentrant: bool) -> None:
    class Checkpointed(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return self.head(x)

    model = fit(Checkpointed(2), budget="1GB")
    x = numbers(8)[0].requires_grad_()
    with pytest.raises(CheckpointedAlreadyError, match="forward calls torch"):
        model(x)
    remove(model)(x).sum().backward()  # PyTorch's own function is back in its place
    assert x.grad is not None


@pytest.mark.slow
def test_solve_says_that_a_model_checkpoints_by_itself(capsys: Any) -> None:
    class Checkpointed(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x).sum()

    class Plain(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    said = []
    for make in (Checkpointed, Plain):
        solution = solve(make(2), numbers(8)[:1], budget="1GB")
        report(solution)
        said.append(
            "already uses torch.utils.checkpoint" in " ".join(capsys.readouterr().out.split())
        )
    assert said == [True, False]


def test_wrapped_blocks_are_refused() -> None:
    model = tower()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    with pytest.raises(CheckpointedAlreadyError, match=r"blocks\.1.*CheckpointWrapper"):
        fit(model, budget="1GB")


@pytest.mark.slow
def test_compiled_modules_are_refused() -> None:
    with pytest.raises(FitError, match=r"before torch\.compile"):
        fit(torch.compile(tower()), budget="1GB")
    model = tower()
    model.compile()
    with pytest.raises(FitError, match=r"before torch\.compile"):
        fit(model, budget="1GB")


class _PassesAttributesOn(nn.Module):
    """Sets what is set on it on the module inside, too, as Lightning Fabric's wrapper does."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __setattr__(self, name: str, value: Any) -> None:
        if "inside" in self.__dict__.get("_modules", {}):
            setattr(self.inside, name, value)
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


def test_a_wrapper_that_passes_attributes_on_is_refused() -> None:
    wrapper = _PassesAttributesOn(nn.Linear(10, 10))
    with pytest.raises(FitError, match=r"passes .*'inside'.*: call fit on the wrapped module"):
        fit(wrapper, budget="1GB")
    assert not {"forward"} & {*vars(wrapper), *vars(wrapper.inside)}


def test_a_module_that_must_be_compiled_whole_afterwards_is_refused() -> None:
    # PyTorch remembers that a frame could not be compiled, and then runs it eagerly in silence
    torch._dynamo.reset()
    model = fit(tower(), budget="1GB")
    with pytest.raises(RuntimeError, match=r"remove\(model\) undoes it"):
        torch.compile(model, backend="eager", fullgraph=True)(numbers(8)[0])


@pytest.mark.slow
class _Graph(nn.Module):
    """A sparse matrix of edges in a buffer."""

    edges: torch.Tensor

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("edges", torch.eye(16).to_sparse(layout=layout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.edges @ self.linear(x)).square().mean()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_is_refused_by_name(layout: torch.layout) -> None:
    model = fit(_Graph(layout), budget="1GB", optimizer=[])
    with pytest.raises(TraceError, match=f"layout {layout} is not supported"):
        model(torch.randn(16, 8))


def test_a_scripted_submodule_is_planned() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.GELU()))
    model = nn.Sequential(scripted, nn.Linear(32, 1))
    x = numbers(16)[0]
    expected = model(x)
    expected.sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    fit(model, budget="1GB", optimizer=[])
    output = model(x)
    output.sum().backward()
    assert torch.equal(output, expected)
    assert_equal(before, [p.grad for p in model.parameters()])


def test_options_that_are_none_are_refused() -> None:
    model = tower()
    with pytest.raises(ValueError, match="method is 'best'"):
        fit(model, budget="1GB", method="best")
    with pytest.raises(BudgetError, match="invalid budget 'much': write 16GB"):
        fit(model, budget="much")
    with pytest.raises(ValueError, match=r"not a class of torch\.optim"):
        fit(model, budget="1GB", optimizer="adamw")
    fit(model, budget="1GB")
    with pytest.raises(ValueError, match="remove"):
        fit(model, budget="1GB")
    with pytest.raises(ValueError, match="remove"):
        apply(model, solve(tower(), numbers(8)[0], budget="1GB", loss=lambda o, _: o.sum()))
    with pytest.raises(ValueError, match="fit was not called"):
        plans_of(tower())
