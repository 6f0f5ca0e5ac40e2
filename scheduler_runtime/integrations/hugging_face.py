"""A callback for the Trainer of Hugging Face transformers: `fit` when the training begins.

    Trainer(model=model, args=args, ..., callbacks=[FitCallback(budget="16GB")]).train()

At that moment the model is on its device and the Trainer has made the optimizer. Importing this
file imports transformers.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from scheduler_runtime.applying import remove
from scheduler_runtime.fitting import FitError, Fitted, FittedForward, fit, plans_of


class FitCallback(TrainerCallback):
    """Fits the Trainer's model for the time of the training. Takes the options of `fit`.

    plans: those that were made until now, or in the last training.
    """

    def __init__(self, *, budget: int | str = "auto", **options: Any) -> None:
        if "optimizer" in options:
            raise ValueError("optimizer= is the Trainer's own: leave it out")
        self._options = {"budget": budget, **options}
        self._model: Any = None
        self._plans: tuple[Fitted, ...] = ()

    @property
    def plans(self) -> tuple[Fitted, ...]:
        return self._plans if self._model is None else plans_of(self._model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises what `fit` raises, and FitError for what the Trainer does to the model itself."""
        del state, control
        _refuse_arguments(args)
        model = kwargs["model"]
        if isinstance(model.__dict__.get("forward"), FittedForward):
            remove(model)  # of a training that ended with an error
        fit(model, optimizer=kwargs["optimizer"], **self._options)
        self._model = model

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is as it was, ready to be saved or trained again."""
        del args, state, control, kwargs
        if self._model is not None:
            self._plans = plans_of(self._model)
            remove(self._model)
            self._model = None


def _refuse_arguments(args: Any) -> None:
    """TrainingArguments under which the Trainer runs something else than the model's forward."""
    if args.activation_checkpointing:
        raise FitError(
            "TrainingArguments has activation_checkpointing=True (gradient_checkpointing, its "
            "older name, sets it too), and the plan decides what is recomputed: leave it out"
        )
    if args.torch_compile:
        raise FitError(
            "TrainingArguments has torch_compile=True, and the compiler decides what is kept: "
            "leave it out"
        )
    if args.fsdp or args.deepspeed:
        raise FitError(
            "TrainingArguments has fsdp or deepspeed, which gather parameters in hooks of "
            "submodules that a planned step would not run; use one device or data parallelism"
        )
    if args.n_gpu > 1:
        raise FitError(
            f"the Trainer would run copies of the model in threads on {args.n_gpu} devices "
            "(DataParallel); start one process for each with torchrun, or show it one device "
            "(CUDA_VISIBLE_DEVICES=0)"
        )
