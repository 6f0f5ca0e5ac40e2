"""A callback for the Trainer of Hugging Face transformers that calls `fit` when training begins.

    Trainer(model=model, args=args, ..., callbacks=[FitCallback(budget="16GB")]).train()

By then the model is on its device and the Trainer has created the optimizer. Importing this file
imports transformers.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from scheduler_runtime.fitting import FitError, Fitted
from scheduler_runtime.integrations.fitted_model import FittedModel


class FitCallback(TrainerCallback):
    """Fits the Trainer's model for the duration of the training. Takes the options of `fit`.

    plans: the plans made so far in this training, or those of the last one.
    """

    def __init__(self, *, budget: int | float | str = "auto", **options: Any) -> None:
        self._fitted = FittedModel({"budget": budget, **options})

    @property
    def plans(self) -> tuple[Fitted, ...]:
        return self._fitted.plans

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call `fit`. Raises what it raises, and FitError for options of the Trainer with which it
        does not run the model's own forward."""
        _refuse_arguments(args)
        self._fitted.begin(kwargs["model"], kwargs["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model its own forward back, ready to be saved or trained further."""
        self._fitted.end()


def _refuse_arguments(args: Any) -> None:
    """Raise FitError for TrainingArguments with which the Trainer changes how the model runs."""
    if args.activation_checkpointing:
        raise FitError(
            "TrainingArguments has activation_checkpointing=True (gradient_checkpointing, its "
            "older name, sets it too), and the plan decides what is recomputed: leave it out"
        )
    if args.torch_compile:
        raise FitError(
            "TrainingArguments has torch_compile=True, and the compiler decides what is saved for "
            "backward: leave it out"
        )
    if args.fsdp or args.deepspeed:
        raise FitError(
            "TrainingArguments has fsdp or deepspeed, which gather parameters in hooks of "
            "submodules that a planned step does not run; use one device or data parallelism"
        )
    if args.n_gpu > 1:
        raise FitError(
            f"the Trainer would run copies of the model in threads on {args.n_gpu} devices "
            "(DataParallel); start one process for each with torchrun, or make only one visible "
            "(CUDA_VISIBLE_DEVICES=0)"
        )
