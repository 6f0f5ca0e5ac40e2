"""The models of the GPU benchmark: LARGE ones of real sizes, SMALL ones for a CPU, and TINY ones.

Every model returns its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.zoo.written import AttentionWithDropout, DeepResNet, Llama
from examples import gpt2, lstm, resnet50, unet, vit


@dataclass(frozen=True)
class Subject:
    """A model to train.

    build: makes the model.
    batch: number of samples -> the tensors of a batch, on the CPU.
    batch_size: number of samples to measure with.
    dtype: of parameters and floating-point inputs.
    blocks: model -> the modules that per-block checkpointing wraps.
    with_layers: number of layers -> the same subject with so many (None: fixed).
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    batch_size: int
    dtype: torch.dtype = torch.float32
    blocks: Callable[[nn.Module], list[nn.Module]] = lambda model: list(model.blocks)
    with_layers: Callable[[int], Subject] | None = None

    def model_and_batch(
        self, device: torch.device, *, batch_size: int | None = None, seed: int = 0
    ) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """The model in training mode and a batch, on the device. Parameters are initialized there,
        so that the host does not hold them."""
        torch.manual_seed(seed)
        with device:
            model = self.build()
        model = model.to(dtype=self.dtype).train()
        batch = self.batch(self.batch_size if batch_size is None else batch_size)
        return model, tuple(
            t.to(device, self.dtype if t.is_floating_point() else None) for t in batch
        )


def _llama(n_layers: int, length: int, *, batch_size: int = 1) -> Subject:
    return Subject(
        build=lambda: Llama(
            n_layers=n_layers,
            width=4096,
            mlp_width=14336,
            n_heads=32,
            n_kv_heads=8,
            n_tokens=128256,
        ),
        batch=lambda n: gpt2.get_batch(n, length, 128256),
        batch_size=batch_size,
        dtype=torch.bfloat16,
        with_layers=lambda n: _llama(n, length, batch_size=batch_size),
    )


N_LAYERS_OF_8B = 32
LLAMA_LAYER_BYTES, LLAMA_REST_BYTES = 2_960_000_000, 12_900_000_000
"""Peak of a step without a plan (8192 tokens, bf16, AdamW): bytes per layer, and bytes of
embedding, head and loss. From the predicted peaks for 2 and 4 layers."""


def llama_layers(memory_bytes: int) -> int:
    """How many layers of Llama-3-8B train without a plan on a card with this memory; at least 1."""
    n_layers = (int(0.95 * memory_bytes) - LLAMA_REST_BYTES) // LLAMA_LAYER_BYTES
    return max(1, min(N_LAYERS_OF_8B, n_layers))


LARGE: Mapping[str, Subject] = {
    "gpt2": Subject(gpt2.get_model, gpt2.get_batch, 16, torch.bfloat16),
    "gpt2-xl": Subject(
        lambda: gpt2.get_model(n_layers=48, width=1600, n_heads=25),
        gpt2.get_batch,
        8,
        torch.bfloat16,
    ),
    "llama-8b-2048": _llama(N_LAYERS_OF_8B, 2048, batch_size=4),
    "llama-8b-8192": _llama(N_LAYERS_OF_8B, 8192),
    "resnet101": Subject(lambda: resnet50.get_model(depths=(3, 4, 23, 3)), resnet50.get_batch, 128),
    "resnet-1001": Subject(
        lambda: DeepResNet(n_blocks=111, width=16),
        lambda n: (torch.randn(n, 3, 32, 32), torch.arange(n) % 10),
        64,
    ),
    "vit-large-384": Subject(
        lambda: vit.get_model(n_layers=24, width=1024, n_heads=16, image_size=384),
        lambda n: vit.get_batch(n, 384),
        32,
        torch.bfloat16,
    ),
    "unet-512": Subject(
        lambda: unet.get_model(width=64),
        lambda n: unet.get_batch(n, 512),
        8,
        blocks=lambda model: [*model.down, *model.merge],
    ),
    "lstm-2000": Subject(
        lstm.get_model, lambda n: lstm.get_batch(n, 2000), 64, blocks=lambda _model: []
    ),
}

SMALL: Mapping[str, Subject] = {
    "gpt2": Subject(
        lambda: gpt2.get_model(n_layers=3, width=32, n_heads=2, n_tokens=64, max_length=64),
        lambda n: gpt2.get_batch(n, 64, 64),
        4,
    ),
    "llama": Subject(
        lambda: Llama(n_layers=2, width=32, mlp_width=96, n_heads=4, n_kv_heads=2, n_tokens=64),
        lambda n: gpt2.get_batch(n, 32, 64),
        4,
    ),
    "unet": Subject(
        lambda: unet.get_model(width=4, n_levels=2),
        lambda n: unet.get_batch(n, 32),
        2,
        blocks=lambda model: [*model.down, *model.merge],
    ),
    "lstm": Subject(
        lambda: lstm.get_model(n_tokens=20, width=16),
        lambda n: lstm.get_batch(n, 10, 20),
        4,
        blocks=lambda _model: [],
    ),
}

QUICK = ("gpt2", "gpt2-xl", "llama-8b-8192", "resnet101", "vit-large-384")
"""The LARGE models in the benchmark's quick set."""

TINY = ("attention with dropout", "attention in float32", "gpt2 with dropout", "batch norm")


def tiny(name: str, device: torch.device) -> Subject:
    """A model for comparing bits and for tests/gpu; name: one of TINY.

    It is larger on CUDA, where the workspaces of libraries would outweigh a small step.
    """
    on_cuda = device.type == "cuda"
    scale = 8 if on_cuda else 1
    if name == "gpt2 with dropout":
        sizes = {"n_layers": 3, "width": 64 * scale, "n_heads": 2, "n_tokens": 128}
        return Subject(
            lambda: gpt2.get_model(**sizes, max_length=64 * scale, dropout=0.1),
            lambda n: gpt2.get_batch(n, 64 * scale, 128),
            2 * scale,
        )
    if name == "batch norm":
        half = 4 if on_cuda else 1
        return Subject(
            lambda: unet.get_model(width=8 * half, n_levels=2),
            lambda n: unet.get_batch(n, 32 * half),
            2 * half,
        )
    # On CUDA, attention takes the memory-efficient kernel for float32, and flash attention's or
    # cuDNN's kernel for bfloat16.
    is_half = on_cuda and name == "attention with dropout"
    width, n_heads = (512, 8) if on_cuda else (64, 4)
    return Subject(
        lambda: AttentionWithDropout(width, n_heads),
        lambda n: (torch.randn(n, width, width),),
        2,
        torch.bfloat16 if is_half else torch.float32,
    )


def subjects(device: torch.device) -> Mapping[str, Subject]:
    return SMALL if device.type == "cpu" else LARGE


def with_fitting_layers(subject: Subject, memory_bytes: int) -> Subject:
    """The subject with as many layers as fit a card with this memory, if their number can vary."""
    if subject.with_layers is None:
        return subject
    return subject.with_layers(llama_layers(memory_bytes))
