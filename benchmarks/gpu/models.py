"""The models of the GPU benchmark: as they are trained, and small ones for the same code on a CPU.

Needs torch alone. Every model returns its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo_written import DeepResNet
from examples import gpt2, lstm, resnet50, unet, vit


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


class LlamaBlock(nn.Module):
    """Grouped queries, rotary positions, a gated MLP (Llama 3, Grattafiori et al. 2024)."""

    def __init__(self, width: int, mlp_width: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head = n_heads, n_kv_heads, width // n_heads
        self.attention_norm = RootMeanSquareNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, n_kv_heads * self.head, bias=False)
        self.value = nn.Linear(width, n_kv_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = RootMeanSquareNorm(width)
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (batch, length, -1, self.head)
        q = _turned(self.query(x).view(heads).transpose(1, 2), turn)
        k = _turned(self.key(x).view(heads).transpose(1, 2), turn)
        v = self.value(x).view(heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.n_heads != self.n_kv_heads
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = turn
    one, other = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-other, one), dim=-1) * sine


class Llama(nn.Module):
    def __init__(
        self,
        *,
        n_layers: int,
        width: int,
        mlp_width: int,
        n_heads: int,
        n_kv_heads: int,
        n_tokens: int,
    ) -> None:
        super().__init__()
        self.head_width = width // n_heads
        self.embedding = nn.Embedding(n_tokens, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, mlp_width, n_heads, n_kv_heads) for _ in range(n_layers)
        )
        self.norm = RootMeanSquareNorm(width)
        self.head = nn.Linear(width, n_tokens, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        turn = self._turn(tokens.shape[1], x)
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _turn(self, length: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.arange(0, self.head_width, 2, device=x.device).float() / self.head_width
        angles = torch.arange(length, device=x.device).float()[:, None] / 500000.0**steps
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@dataclass(frozen=True)
class Subject:
    """A model to train.

    build: the model; batch: tensors of a batch of that many samples; both on the CPU.
    batch_size: the one that is measured. dtype: of parameters and floating-point inputs.
    blocks: what per-block checkpointing wraps. with_layers: the same with so many layers.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    batch_size: int
    dtype: torch.dtype = torch.float32
    blocks: Callable[[nn.Module], list[nn.Module]] = lambda model: list(model.blocks)
    with_layers: Callable[[int], Subject] | None = None

    def made(
        self, device: torch.device, *, batch_size: int | None = None, seed: int = 0
    ) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """Model and batch on the device; parameters are drawn there, so the host holds none."""
        torch.manual_seed(seed)
        with device:
            model = self.build()
        model = model.to(dtype=self.dtype).train()
        batch = self.batch(self.batch_size if batch_size is None else batch_size)
        return model, tuple(
            t.to(device, self.dtype if t.is_floating_point() else None) for t in batch
        )


def _units_of_unet(model: nn.Module) -> list[nn.Module]:
    return [*model.down, *model.merge]


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
"""Of a step of 8192 tokens without a plan, in bf16 with AdamW: what a layer adds to its peak, and
what embedding, head and loss take. As planned for 2 and 4 layers."""


def llama_layers(memory_bytes: int) -> int:
    """As many layers of Llama-3-8B as train on such a card without a plan."""
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
        blocks=_units_of_unet,
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
        blocks=_units_of_unet,
    ),
    "lstm": Subject(
        lambda: lstm.get_model(n_tokens=20, width=16),
        lambda n: lstm.get_batch(n, 10, 20),
        4,
        blocks=lambda _model: [],
    ),
}

QUICK = ("gpt2", "llama-8b-2048", "resnet101")
"""Of the large ones: what the quick set measures."""


def subjects(device: torch.device) -> Mapping[str, Subject]:
    return SMALL if device.type == "cpu" else LARGE


def fitted(subject: Subject, memory_bytes: int) -> Subject:
    """The subject with as many layers as fit a card, where it has a number of them to choose."""
    if subject.with_layers is None:
        return subject
    return subject.with_layers(llama_layers(memory_bytes))
