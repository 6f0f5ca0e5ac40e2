"""Are gradients the same bits as without a plan? Dropout inside fused attention included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import scheduler_runtime
from examples import gpt2, unet
from solver import solve

TIME_LIMIT_S = 5.0
"""Of a search: which bits come out does not depend on how good the plan is."""


class AttentionWithDropout(nn.Module):
    """Dropout inside the fused attention, between its products, where no mask is ever stored."""

    def __init__(self, width: int = 64, n_heads: int = 4, n_layers: int = 3) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(n_layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            x = x + out(y.transpose(1, 2).reshape(batch, length, width))
        return x.float().square().mean()


def _attention(device: torch.device) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """On CUDA: flash attention or cuDNN's."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return _attention_of(dtype, device)


def _attention_in_float32(device: torch.device) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """On CUDA: memory-efficient attention, the fused kernel that takes float32."""
    return _attention_of(torch.float32, device)


def _attention_of(
    dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Large on CUDA, where the workspaces of libraries would outweigh a small step."""
    width, length = (512, 512) if device.type == "cuda" else (64, 64)
    model = AttentionWithDropout(width, width // 16 if width == 64 else 8)
    return model.to(dtype), (torch.randn(2, length, width, dtype=dtype),)


def _gpt2(device: torch.device) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    size = 8 if device.type == "cuda" else 1
    model = gpt2.get_model(
        n_layers=3, width=64 * size, n_heads=2, n_tokens=128, max_length=64 * size, dropout=0.1
    )
    return model, gpt2.get_batch(2 * size, 64 * size, 128)


def _unet(device: torch.device) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    size = 4 if device.type == "cuda" else 1
    return unet.get_model(width=8 * size, n_levels=2), unet.get_batch(2 * size, 32 * size)


SUBJECTS: Mapping[str, Callable[[torch.device], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "attention with dropout": _attention,
    "attention in float32": _attention_in_float32,
    "gpt2 with dropout": _gpt2,
    "batch norm": _unet,
}


def compare(name: str, way: str, device: torch.device, *, backend: str) -> dict[str, Any]:
    """Two steps without a plan and with one; how many tensors differ in any bit.

    "ours" is compared with eager, "ours, compiled" with the same backend of torch.compile.
    Operators whose sums have no fixed order are made to have one, where PyTorch can: fused
    attention on CUDA only when it may raise for other operators, so that is tried first. What
    differs between two runs without a plan all the same (n_unsteady) tells nothing of the plan.
    """
    try:
        return _compared(name, way, device, backend=backend, warn_only=device.type != "cuda")
    except RuntimeError as error:
        if device.type != "cuda" or "deterministic" not in str(error):
            raise
    return _compared(name, way, device, backend=backend, warn_only=True)


def _compared(
    name: str, way: str, device: torch.device, *, backend: str, warn_only: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = SUBJECTS[name](device)
    model, batch = model.to(device).train(), tuple(t.to(device) for t in batch)
    twin = copy.deepcopy(model)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        n_recomputed_in, plain = _prepare(way, model, twin, batch, backend)
        buffers = {name: buffer.clone() for name, buffer in twin.named_buffers()}
        before = _bits(twin, batch, plain)
        with torch.no_grad():
            for name, buffer in twin.named_buffers():
                buffer.copy_(buffers[name])
        second = _bits(twin, batch, plain)
        after = _bits(model, batch, model)
    finally:
        torch.use_deterministic_algorithms(False)
    unsteady = [key for key in before if not torch.equal(before[key], second[key])]
    different = [
        key for key in before if key not in unsteady and not torch.equal(before[key], after[key])
    ]
    return {
        "status": "ran",
        "n_again": n_recomputed_in,
        "n_compared": len(before),
        "n_unsteady": len(unsteady),
        "n_different": len(different),
        "different": different[:8],
        "unsteady": unsteady[:8],
        "all_deterministic": not warn_only,
    }


def _prepare(
    way: str, model: nn.Module, twin: nn.Module, batch: tuple[torch.Tensor, ...], backend: str
) -> tuple[int, Callable[..., Any]]:
    """Plan `model` for about two thirds of its activations; what its twin is called by."""
    if way == "ours":
        free = solve(model, batch, budget="1TB", reserve=0, time_limit_s=TIME_LIMIT_S)
        resident = free.graph.resident_bytes
        budget = resident + int(0.67 * (free.baseline.peak_bytes - resident))
        solution = solve(model, batch, budget=budget, reserve=0, time_limit_s=TIME_LIMIT_S)
        if solution.simulation is None:
            raise ValueError(f"nothing fits {budget} bytes")
        scheduler_runtime.apply(model, solution)
        return solution.simulation.n_recomputed, twin
    options = {"reserve": 0, "backend": backend, "time_limit_s": TIME_LIMIT_S}
    scheduler_runtime.compile(twin, batch, budget="1TB", **options)
    (report,) = scheduler_runtime.compile_reports(twin)
    attempt = report.chosen
    budget = (attempt.measured_bytes or 0) - int(0.25 * attempt.partition.saved_bytes)
    scheduler_runtime.compile(model, batch, budget=budget, **options)
    (report,) = scheduler_runtime.compile_reports(model)
    return report.chosen.partition.n_recomputed_in, twin


def _bits(
    model: nn.Module, batch: tuple[torch.Tensor, ...], call: Callable[..., Any]
) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(2):
        loss = call(*batch)
        loss.backward()
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= dict(model.named_buffers())
    found["random numbers after it"] = torch.rand(4, device=loss.device)
    return {
        "loss": loss.detach(),
        **{name: t.detach().clone() for name, t in found.items() if t is not None},
    }
