"""A callback for the Trainer of PyTorch Lightning that calls `fit` when training begins.

    Trainer(callbacks=[FitCallback(budget="16GB")]).fit(module, data)

By then the module is on its device and its optimizers exist. Importing this file imports lightning,
or pytorch_lightning where that is installed instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

from scheduler_runtime.fitting import Fitted
from scheduler_runtime.integrations.fitted_model import FittedModel


class FitCallback(Callback):
    """Fits the module for the duration of the training. Takes the options of `fit`.

    part: a function of the LightningModule that returns the part to plan (`lambda module:
        module.model`). None: whatever training_step calls, the module itself or a submodule that
        holds everything that is trained. If it calls something else, the first backward pass raises
        FitError.
    plans: the plans made so far in this training, or those of the last one.
    """

    def __init__(
        self,
        *,
        budget: int | float | str = "auto",
        part: Callable[[Any], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        self._fitted = FittedModel({"budget": budget, **options})
        self._part = part
        self._n_steps = 0

    @property
    def plans(self) -> tuple[Fitted, ...]:
        return self._fitted.plans

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Call `fit`. Raises what it raises."""
        model, optimizers = pl_module, trainer.optimizers
        if self._part is not None:
            model = self._part(pl_module)
            # A GAN has one optimizer for each part. If none is of this part, fit says so.
            optimizers = [each for each in optimizers if _trains(each, model)] or optimizers
        self._fitted.begin(model, optimizers)
        self._n_steps = trainer.global_step

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Free the gradients of the last step before the next forward pass.

        Lightning frees them after the forward pass, so they would take memory during it.

        In its last epoch, StochasticWeightAveraging runs forward passes only, for batch norm. The
        optimizer then makes one more step with the last gradients, so they are not freed.
        """
        is_automatic = pl_module.automatic_optimization
        has_backward = not (is_automatic and trainer.fit_loop._skip_backward)
        self._fitted.expect_backward(has_backward)
        if is_automatic and has_backward and trainer.global_step != self._n_steps:
            for optimizer in trainer.optimizers:
                pl_module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
        self._n_steps = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the module its own forward back, ready to be saved or trained further."""
        self._fitted.end()


def _trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = {id(p) for p in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])
