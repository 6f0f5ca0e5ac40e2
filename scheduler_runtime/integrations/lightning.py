"""A callback for the Trainer of PyTorch Lightning: `fit` when the training begins.

    Trainer(callbacks=[FitCallback(budget="16GB")]).fit(module, data)

At that moment the module is on its device and its optimizers are made. Importing this file imports
lightning, or pytorch_lightning where that is what is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

try:
    from lightning.pytorch import Callback, LightningModule
except ModuleNotFoundError:
    from pytorch_lightning import Callback, LightningModule

from scheduler_runtime.applying import remove
from scheduler_runtime.fitting import FitError, Fitted, FittedForward, fit, plans_of


class FitCallback(Callback):
    """Fits the module for the time of the training. Takes the options of `fit`.

    part: which part of the LightningModule is planned, a function of it (`lambda module:
        module.model`). None: the whole, whose `forward` training_step calls.
    plans: those that were made until now, or in the last training.
    """

    def __init__(
        self,
        *,
        budget: int | str = "auto",
        part: Callable[[Any], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        if "optimizer" in options:
            raise ValueError("optimizer= is the Trainer's own: leave it out")
        self._part = part
        self._options = {"budget": budget, **options}
        self._model: nn.Module | None = None
        self._plans: tuple[Fitted, ...] = ()
        self._n_steps = 0

    @property
    def plans(self) -> tuple[Fitted, ...]:
        return self._plans if self._model is None else plans_of(self._model)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raises what `fit` raises, and FitError for a module that has no forward to plan."""
        model = pl_module if self._part is None else self._part(pl_module)
        if type(model).forward is LightningModule.forward:
            raise FitError(
                f"{type(model).__name__} has no forward of its own; name the part of it that "
                "training_step calls: FitCallback(part=lambda module: module.model)"
            )
        if isinstance(model.__dict__.get("forward"), FittedForward):
            remove(model)  # of a training that ended with an error
        fit(model, optimizer=trainer.optimizers, **self._options)
        self._model, self._n_steps = model, trainer.global_step

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Drop the gradients of the last step before the forward pass of the next.

        Lightning does it after the forward pass, so that they would take memory all along it.
        """
        del batch
        if pl_module.automatic_optimization and trainer.global_step != self._n_steps:
            for optimizer in trainer.optimizers:
                pl_module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
        self._n_steps = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The module is as it was, ready to be saved or trained again."""
        del trainer, pl_module
        if self._model is not None:
            self._plans = plans_of(self._model)
            remove(self._model)
            self._model = None
