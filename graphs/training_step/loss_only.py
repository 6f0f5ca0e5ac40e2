"""A Hugging Face model whose forward returns only its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class LossOnly(nn.Module):
    """Calls the model and returns only `output.loss`, so that the logits can be freed.

    The logits of a language model can be the largest tensor of the step; if they are returned, the
    caller holds them to the end of the step.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        """The loss (a scalar) of a batch that holds `labels`."""
        loss = self.model(**batch).loss
        if loss is None:
            raise ValueError(
                f"{type(self.model).__name__} returned no loss; give it a batch that holds labels"
            )
        assert isinstance(loss, torch.Tensor)
        return loss
