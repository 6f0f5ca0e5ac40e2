"""The models of `examples/` at sizes that a small machine runs in a second."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"

SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        {"n_layers": 3, "width": 128, "n_heads": 4, "n_tokens": 1000, "dropout": 0.1},
        {"batch_size": 4, "seq_length": 128, "n_tokens": 1000},
    ),
    "llama": (
        {
            "n_layers": 2,
            "width": 128,
            "mlp_width": 256,
            "n_heads": 4,
            "n_kv_heads": 2,
            "n_tokens": 1000,
            "dtype": torch.float32,
        },
        {"batch_size": 2, "seq_length": 128, "n_tokens": 1000},
    ),
    "resnet50": (
        {"depths": (1, 2, 1, 1), "width": 16, "n_classes": 10},
        {"batch_size": 4, "image_size": 64, "n_classes": 10},
    ),
    "unet": ({"width": 8, "n_levels": 3}, {"batch_size": 2, "image_size": 64}),
    "vit": (
        {
            "n_layers": 3,
            "width": 96,
            "n_heads": 4,
            "image_size": 64,
            "patch_size": 8,
            "n_classes": 10,
        },
        {"batch_size": 8, "image_size": 64, "n_classes": 10},
    ),
    "lstm": (
        {"n_tokens": 200, "width": 64},
        {"batch_size": 16, "seq_length": 20, "n_tokens": 200},
    ),
    "force_field": (
        {"width": 32, "n_layers": 3, "n_distances": 16},
        {"batch_size": 4, "n_atoms": 20},
    ),
    "gradient_penalty": ({"width": 8, "n_stages": 3}, {"batch_size": 4, "image_size": 32}),
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(name: str) -> tuple[nn.Module, Any]:
    """The example's model and batch at a small size, with the same weights and data each time."""
    module = load(name)
    model_size, batch_size = SIZES[name]
    torch.manual_seed(0)
    return module.get_model(**model_size), module.get_batch(**batch_size)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    make = getattr(load(name), "get_optimizer", None)
    return torch.optim.AdamW(model.parameters()) if make is None else make(model)
