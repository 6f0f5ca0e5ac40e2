"""`FitCallback` in the Trainer of Lightning: the losses and weights of the plain Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scheduler_runtime import FitError, plans_of
from scheduler_runtime.integrations.lightning import FitCallback
from tests.scheduler_runtime.fitting.test_fitting import Tower, numbers
from tests.support.bitwise import assert_equal
from tests.support.full_device import FailingOperators

pytestmark = pytest.mark.usefixtures("nothing_frozen")  # the modules fill a list


class Whole(LightningModule):
    """Its own forward runs the network; the loss is computed in training_step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Tower(4)
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class InPart(Whole):
    """training_step calls a part; its forward is for prediction."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.losses.append(loss.detach())
        return loss


class WithoutForward(InPart):
    forward = LightningModule.forward


class InTurn(WithoutForward):
    """training_step calls several parts: none of them is all of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 32)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(self.first(x)), y)


def train(module: Whole, callbacks: list[Callback], **options: Any) -> list[torch.Tensor]:
    trainer = Trainer(
        max_steps=options.pop("max_steps", 3),
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(TensorDataset(*numbers(768)), batch_size=128))
    return [*module.losses, *(p.detach() for p in module.parameters())]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("make", "callback", "options", "gradients"),
    [
        (Whole, FitCallback(budget="1.2MB"), {}, ["fresh"]),
        (Whole, FitCallback(budget="900KB"), {"precision": "bf16-mixed"}, ["fresh"]),
        (
            Whole,
            FitCallback(budget="1.2MB"),
            {"accumulate_grad_batches": 2},
            ["fresh", "accumulate"],
        ),
        (InPart, FitCallback(budget="1.2MB", part=lambda module: module.model), {}, ["fresh"]),
        (InPart, FitCallback(budget="1.2MB"), {}, ["fresh"]),
        (WithoutForward, FitCallback(budget="1.2MB"), {}, ["fresh"]),
        (
            Whole,
            FitCallback(budget="1.2MB", host_budget="1GB", host_link="1TB/s"),
            {},
            ["fresh"],
        ),
    ],
    ids=["whole", "bf16", "accumulation", "part", "part found", "no forward", "host"],
)
def test_the_trainer_has_the_same_losses_and_weights(
    make: Any, callback: FitCallback, options: dict[str, Any], gradients: list[str]
) -> None:
    expected = train(make(), [], **options)
    fitted = make()
    got = train(fitted, [callback], **options)
    assert len(got) == len(expected)
    assert_equal(expected, got)
    environments = [plan.solution.environment for plan in callback.plans]
    assert [environment["gradients"] for environment in environments] == gradients
    for plan in callback.plans:
        simulation = plan.solution.simulation
        assert simulation.n_recomputed + simulation.host_peak_bytes > 0
        assert (simulation.host_peak_bytes > 0) == (plan.solution.request.places is not None)
        assert plan.solution.environment["optimizer"]["name"] == "AdamW"
    with pytest.raises(ValueError, match="fit was not called"):
        plans_of(fitted)  # it is as it was


@pytest.mark.slow
def test_the_part_that_training_step_calls_is_found() -> None:
    callback = FitCallback(budget="1.2MB")
    module = InPart()
    train(module, [callback])
    (plan,) = callback.plans
    assert plan.solution.graph.meta.model == "Tower"
    assert not any("forward" in vars(each) for each in module.modules())


def test_a_step_of_several_parts_is_refused_by_their_names() -> None:
    with pytest.raises(FitError, match="The gradients are those of model, first"):
        train(InTurn(), [FitCallback(budget="1GB")])


def test_a_part_in_evaluation_mode_is_refused() -> None:
    """As from_pretrained of transformers returns it; Lightning keeps the mode of submodules."""
    module = InPart()
    module.model.eval()
    with pytest.raises(FitError, match=r"model is in evaluation mode, .* call train\(\)"):
        train(module, [FitCallback(budget="1GB")])


def test_the_optimizer_is_the_trainers() -> None:
    with pytest.raises(ValueError, match="leave it out"):
        FitCallback(budget="1GB", optimizer=None)


class TwoOptimizers(WithoutForward):
    """Each part has its own, and steps in turn, as in a GAN."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.other = Tower(1)

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        for part, optimizer in zip((self.model, self.other), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = F.cross_entropy(part(x), y)
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach())

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters()) for part in (self.model, self.other)]


def test_a_part_is_planned_with_the_optimizer_that_trains_it() -> None:
    callback = FitCallback(budget="1.2MB", part=lambda module: module.model)
    expected, got = train(TwoOptimizers(), []), train(TwoOptimizers(), [callback])
    assert_equal(expected, got)
    assert len(callback.plans) == 1


class ShortOfMemory(Whole):
    """Of the memory that the second forward pass needs."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        with FailingOperators([5] if len(self.losses) == 1 else []):
            output = self(x)
        loss = F.cross_entropy(output, y)
        self.losses.append(loss.detach())
        return loss


@pytest.mark.slow
def test_a_step_that_is_short_of_memory_runs_again() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(ShortOfMemory(), [FitCallback(budget="10MB")])
    callback = FitCallback(budget="10MB", on_pressure="replan")
    got, expected = train(ShortOfMemory(), [callback]), train(Whole(), [])
    assert_equal(expected, got)
    assert len(callback.plans) == 2


class Adversarial(Whole):
    """training_step asks for the gradient of the batch, and trains on a batch that it worsens."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(self(x), y), x)
        return super().training_step(((x + 0.1 * gradient.sign()).detach(), y), index)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("make", [Whole, InPart, Adversarial])
def test_the_epoch_that_updates_batch_norm_is_not_planned(make: Any) -> None:
    """Each of its batches has another momentum, which is a number in the program."""

    def trained(callbacks: list[Callback]) -> list[torch.Tensor]:
        module = make()
        norm = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.1))
        module.model = nn.Sequential(norm, module.model)
        averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
        losses = train(module, [averaging, *callbacks], max_steps=-1, max_epochs=2)
        return [*losses, *module.buffers()]

    callback = FitCallback(budget="1.2MB")
    expected, got = trained([]), trained([callback])
    assert len(callback.plans) == 1 + (make is Adversarial)
    assert all(map(torch.equal, expected, got))
