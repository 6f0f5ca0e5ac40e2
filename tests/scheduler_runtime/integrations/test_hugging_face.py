"""`FitCallback` in the Trainer of transformers: the losses and weights of the plain Trainer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from scheduler_runtime import CheckpointedAlreadyError, FitError, fit, plans_of, remove
from scheduler_runtime.integrations.hugging_face import FitCallback
from tests.support.bitwise import assert_equal
from tests.support.tiny_transformers import tiny_gpt2

BUDGET, SMALLER_BUDGET = "1.8MB", "1.5MB"
"""Below what a step takes without a plan; the smaller for bfloat16 and for adapters."""


language_model = functools.partial(tiny_gpt2, use_cache=False)


def adapted_model() -> Any:
    torch.manual_seed(0)
    return get_peft_model(
        language_model(), LoraConfig(target_modules=["c_attn"], lora_dropout=0.1, r=4)
    )


def sentence(index: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(64) * (index + 1) % 100
    return {"input_ids": tokens, "labels": tokens}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control
        self.values += [
            kwargs["logs"][key] for key in ("loss", "grad_norm") if key in kwargs["logs"]
        ]


def trainer(
    model: Any, folder: Path, callbacks: list[Any], make: Any = Trainer, **options: Any
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    data: Any = [sentence(index) for index in range(24)]
    return make(model=model, args=arguments, train_dataset=data, callbacks=callbacks)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("make", "options", "budget", "n_plans"),
    [
        (language_model, {}, BUDGET, 1),
        (language_model, {"bf16": True}, SMALLER_BUDGET, 1),
        (language_model, {"gradient_accumulation_steps": 2}, BUDGET, 2),
        (language_model, {"label_smoothing_factor": 0.1}, BUDGET, 1),
        (adapted_model, {}, SMALLER_BUDGET, 1),
    ],
    ids=["plain", "bf16", "accumulation", "loss outside", "lora"],
)
def test_the_trainer_has_the_same_losses_and_weights(
    make: Any, options: dict[str, Any], budget: str, n_plans: int, tmp_path: Path
) -> None:
    callback = FitCallback(budget=budget)
    results = []
    for callbacks in ([], [callback]):
        model, losses = make(), Losses()
        trainer(model, tmp_path, [*callbacks, losses], **options).train()
        assert len(losses.values) == 6
        results.append((losses.values, list(model.parameters())))
    (expected, parameters), (got, fitted_parameters) = results
    assert got == expected
    assert_equal(parameters, fitted_parameters)
    assert len(callback.plans) == n_plans
    for plan in callback.plans:
        assert plan.solution.simulation.n_recomputed > 0
        assert plan.solution.environment["optimizer"]["name"] == "AdamW"
    with pytest.raises(ValueError, match="fit was not called"):
        plans_of(model)  # it is as it was


class ByItsParts(Trainer):
    """Calls the transformer and the head, never the model."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = model.lm_head(model.transformer(inputs["input_ids"]).last_hidden_state)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_trainer_that_never_calls_the_model(tied: bool, tmp_path: Path) -> None:
    """The transformer holds the head's weight or does not."""
    model, callback = language_model(), FitCallback(budget="1GB")
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    each = trainer(model, tmp_path, [callback], make=ByItsParts)
    if tied:
        each.train()
        assert [plan.solution.graph.meta.model for plan in callback.plans] == ["GPT2Model"]
    else:
        with pytest.raises(FitError, match="The gradients are those of transformer, lm_head"):
            each.train()


@pytest.mark.slow
def test_one_call_before_train_does_the_same(tmp_path: Path) -> None:
    results = []
    for fitted in (False, True):
        losses = Losses()
        each = trainer(language_model(), tmp_path, [losses])
        if fitted:
            fit(each.model, budget=BUDGET, optimizer=each.create_optimizer())
        each.train()
        results.append((losses.values, *(p.sum().item() for p in each.model.parameters())))
    assert results[0] == results[1]
    (note,) = plans_of(each.model)[0].notes
    assert "drops outputs of the model, such as logits," in note


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_the_trainers_own_checkpointing_is_refused(name: str, tmp_path: Path) -> None:
    each = trainer(language_model(), tmp_path, [FitCallback(budget="1GB")], **{name: True})
    with pytest.raises(FitError, match="activation_checkpointing=True"):
        each.train()


def test_checkpointing_that_is_on_in_the_model_is_refused() -> None:
    model = language_model()
    model.activation_checkpointing_enable()
    with pytest.raises(CheckpointedAlreadyError, match="activation_checkpointing_disable"):
        fit(model, budget="1GB")
    model.activation_checkpointing_disable()
    fit(model, budget="1GB")
    model.activation_checkpointing_enable()  # after fit: found at the first step
    batch = {name: value[None] for name, value in sentence(0).items()}
    with pytest.raises(CheckpointedAlreadyError, match="activation_checkpointing_disable"):
        model.train()(**batch)


def test_compilation_by_the_trainer_is_refused(tmp_path: Path) -> None:
    each = trainer(language_model(), tmp_path, [FitCallback(budget="1GB")], torch_compile=True)
    with pytest.raises(FitError, match="torch_compile"):
        each.train()


def test_the_optimizer_is_the_trainers() -> None:
    with pytest.raises(ValueError, match="leave it out"):
        FitCallback(budget="1GB", optimizer=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "mixed_precision"),
    [("before prepare", "no"), ("before prepare", "bf16"), ("after prepare", "bf16")],
)
def test_accelerate_has_the_same_losses_and_weights(when: str, mixed_precision: str) -> None:
    budget = BUDGET if mixed_precision == "no" else SMALLER_BUDGET
    results = []
    for fitted in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)  # one of them for each process
        accelerator = Accelerator(mixed_precision=mixed_precision, cpu=True)
        model: Any = language_model().train()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        inner = model
        if fitted and when == "before prepare":
            fit(model, budget=budget, optimizer=optimizer)
        model, optimizer = accelerator.prepare(model, optimizer)
        if fitted and when == "after prepare":
            fit(
                accelerator.unwrap_model(model),
                budget=budget,
                optimizer=optimizer,
            )
        torch.manual_seed(1)
        values = []
        for step in range(3):
            rows = [sentence(4 * step + index) for index in range(4)]
            batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            values.append(loss.detach())
        results.append([*values, *inner.parameters()])
    assert_equal(*results)
    assert not torch.is_autocast_enabled("cpu")
    if when == "after prepare":
        (plan,) = plans_of(inner)
        assert plan.solution.simulation.n_recomputed > 0
        remove(inner)
