"""The models that the matrix runs: name, how to build one with its batch, how its step goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import zoo_libraries as libraries
from benchmarks import zoo_written as written


@dataclass(frozen=True)
class Entry:
    """A model of the matrix.

    build: the model in training mode and its batch, the same for the same random state.
    loss, inputs: as in `solve`: the loss outside of the model, what of the batch it is called with.
    large: its search takes minutes; the quick part of the tests leaves it out.
    """

    build: Callable[[], tuple[nn.Module, Any]]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    inputs: Callable[[Any], Any] | None = None
    large: bool = False

    def made(self, seed: int = 0) -> tuple[nn.Module, Any]:
        """The model, in training mode, and its batch."""
        torch.manual_seed(seed)
        model, batch = self.build()
        return model.train(), batch

    @property
    def options(self) -> dict[str, Any]:
        """Those of `solve`."""
        return {"loss": self.loss, "inputs": self.inputs}


ZOO: dict[str, Entry] = {
    "GPT-2": Entry(libraries.gpt2),
    "Llama": Entry(libraries.llama),
    "Qwen3": Entry(libraries.qwen3),
    "Mixtral": Entry(libraries.mixtral),
    "Mamba": Entry(libraries.mamba),
    "BERT": Entry(libraries.bert),
    "T5": Entry(libraries.t5),
    "ViT": Entry(libraries.vit),
    "ConvNeXt": Entry(libraries.convnext),
    "ResNet": Entry(libraries.resnet),
    "CLIP": Entry(libraries.clip),
    "UNet2DConditionModel": Entry(
        libraries.unet2d_condition,
        loss=libraries.denoising_loss,
        inputs=libraries.denoising_inputs,
    ),
    "ResNet-1001": Entry(written.resnet_1001, large=True),
    "VGG": Entry(written.vgg, loss=written.classification_loss, inputs=written.first_of),
    "U-Net": Entry(written.unet),
    "DenseNet": Entry(written.densenet),
    "LSTM cells, 1000 steps": Entry(written.lstm_1000, large=True),
    "GRU cells, 1000 steps": Entry(written.gru_1000, large=True),
    "graph network": Entry(written.graph_network),
    "several losses": Entry(written.several_losses, loss=written.sum_of_losses),
}
