"""Layers in the benchmark scripts of linkedin/Liger-Kernel, made of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.published.errors import NotPredictedError
from benchmarks.published.scripts.script import FunctionModule, Script, indices, linear, tensor
from benchmarks.published.scripts.settings import Settings

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def mlp(settings: Settings) -> Script:
    """The gated MLP of transformers' Llama, for swiglu, geglu and their tiled versions."""
    width, inner = settings.size("hidden_size"), settings.size("intermediate_size")
    dtype, activation = settings.dtype(), settings.one_of("hidden_act", _ACTIVATIONS)
    n_batch = settings.size("bsz", "B")
    module = FunctionModule(
        lambda m: m.down(activation(m.gate(m.x)) * m.up(m.x)),
        x=tensor(n_batch, settings.size("T"), width, dtype=dtype),
        gate=linear(width, inner, dtype),
        up=linear(width, inner, dtype),
        down=linear(inner, width, dtype),
    )
    return Script(module, gradient="made", retains_graph=True, drops_x_gradient=True)


# ---- norms -------------------------------------------------------------------------------------


def rms_norm(settings: Settings) -> Script:
    """Llama's RMS norm, written out, with float32 weights. The script builds a second one."""
    eps, width, dtype = settings.number("eps"), settings.size("H"), settings.dtype()
    shape = (settings.size("M"), width)

    def normed(m: Any) -> torch.Tensor:
        x = m.x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return m.weight * x.to(m.x.dtype)

    module = FunctionModule(normed, x=tensor(*shape, dtype=dtype), weight=tensor(width))
    return _norm_script(module, (tensor(width), *_narrower_gradient(shape, dtype)))


def _norm_script(module: nn.Module, unused_tensors: tuple[torch.Tensor, ...]) -> Script:
    return Script(
        module,
        unused_tensors=unused_tensors,
        gradient="held",
        retains_graph=True,
        drops_x_gradient=True,
    )


def _narrower_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The output's gradient that the script holds, in the input's dtype.

    Float32 weights make the output float32, so autograd converts this gradient to float32, and both
    are live. In float32 there is only one.
    """
    return () if dtype == torch.float32 else (tensor(*shape, dtype=dtype),)


def added_rms_norm(settings: Settings) -> Script:
    """A sum and its RMS norm, both returned, with float32 weights. The script builds three of these
    modules, one with a second weight."""
    eps, width, dtype = settings.number("eps"), settings.size("H"), settings.dtype()
    shape = (settings.size("M"), width)

    def normed(m: Any) -> tuple[torch.Tensor, ...]:
        hidden, residual = m.x.to(torch.float32), m.residual.to(torch.float32)
        hidden = hidden + residual
        residual = hidden
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + eps)
        return m.weight * hidden.to(dtype), residual.to(dtype)

    module = FunctionModule(
        normed,
        x=tensor(*shape, dtype=dtype),
        residual=tensor(*shape, dtype=dtype),
        weight=tensor(width),
    )
    unused_tensors = (*(tensor(width) for _ in range(3)), *_narrower_gradient(shape, dtype))
    return Script(module, unused_tensors=unused_tensors, gradient="held", drops_x_gradient=True)


def poly_norm(settings: Settings) -> Script:
    """A weighted sum of the first three powers, each normalized, in float32. The script builds a
    second one."""
    eps, dtype = settings.number("eps"), settings.dtype()

    def normed_power(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def normed(m: Any) -> torch.Tensor:
        x = m.x.to(torch.float32)
        cube, square, itself = x**3, x**2, x**1
        of_cube, of_square = normed_power(cube), normed_power(square)
        of_itself = normed_power(itself)
        output = m.weight[0] * of_cube + m.weight[1] * of_square + m.weight[2] * of_itself + m.bias
        return output.to(dtype)

    x = tensor(settings.size("M"), settings.size("H"), dtype=dtype)
    return _norm_script(
        FunctionModule(normed, x=x, weight=tensor(3), bias=tensor()), (tensor(3), tensor())
    )


def layer_norm(settings: Settings) -> Script:
    """nn.LayerNorm; the script builds a second one."""
    width, dtype = settings.size("N"), settings.dtype()
    module = FunctionModule(
        lambda m: m.norm(m.x),
        x=tensor(settings.size("M"), width, dtype=dtype),
        norm=nn.LayerNorm(width, dtype=dtype, device="meta"),
    )
    return _norm_script(module, (tensor(width, dtype=dtype), tensor(width, dtype=dtype)))


def group_norm(settings: Settings) -> Script:
    """nn.GroupNorm; the script builds a second one."""
    n_channels, dtype = settings.size("C"), settings.dtype()
    per_group = settings.size("channels_per_group")
    if n_channels % per_group:
        raise NotPredictedError(f"{n_channels} channels are no groups of {per_group}")
    module = FunctionModule(
        lambda m: m.norm(m.x),
        x=tensor(settings.size("M"), n_channels, settings.size("H"), dtype=dtype),
        norm=nn.GroupNorm(n_channels // per_group, n_channels, dtype=dtype, device="meta"),
    )
    return _norm_script(module, (tensor(n_channels, dtype=dtype), tensor(n_channels, dtype=dtype)))


def dynamic_tanh(settings: Settings) -> Script:
    """Dynamic tanh with float32 weights; the script builds three modules of it."""
    width, dtype = settings.size("hidden_size"), settings.dtype()
    shape = (settings.size("BT"), width)
    module = FunctionModule(
        lambda m: m.gamma * torch.tanh(m.x * m.alpha) + m.beta,
        x=tensor(*shape, dtype=dtype),
        alpha=tensor(1),
        gamma=tensor(width),
        beta=tensor(width),
    )
    others = (tensor(1), tensor(width), tensor(width))
    unused_tensors = (*others, *others, *_narrower_gradient(shape, dtype))
    return Script(
        module,
        unused_tensors=unused_tensors,
        gradient="held",
        retains_graph=True,
        drops_x_gradient=True,
        has_compiled_before=True,
    )


def embedding(settings: Settings) -> Script:
    """nn.Embedding; the script builds a second one."""
    n_rows, width, dtype = settings.size("V"), settings.size("D"), settings.dtype()
    module = FunctionModule(
        lambda m, tokens: m.embedding(tokens),
        embedding=nn.Embedding(n_rows, width, dtype=dtype, device="meta"),
    )
    batch = (indices(settings.size("B"), settings.size("T")),)
    unused_tensors = (tensor(n_rows, width, dtype=dtype),)
    return Script(
        module,
        batch=batch,
        unused_tensors=unused_tensors,
        gradient="made",
        has_compiled_before=True,
    )


def softmax(settings: Settings) -> Script:
    """nn.Softmax. When it measures memory, the script takes a single row, and ones as gradient."""
    n_rows, width, dtype = settings.size("M"), settings.size("N"), settings.dtype()
    shape = (n_rows, width) if settings.is_time else (width,)
    return Script(
        FunctionModule(lambda m: torch.softmax(m.x, dim=-1), x=tensor(*shape, dtype=dtype)),
        gradient="held" if settings.is_time else "made",
        retains_graph=True,
        drops_x_gradient=True,
    )


def neighborhood_attention(settings: Settings) -> Script:
    """Attention among neighbouring tokens, written out with a mask; the script builds a second
    module."""
    width, n_heads = settings.size("hidden_size"), settings.size("num_heads")
    dtype, has_bias = settings.dtype(), settings.flag("bias")
    for name in ("kernel_size", "dilation"):  # only change values of the mask: no effect on memory
        settings.size(name)
    if width % n_heads:
        raise NotPredictedError(f"{width} numbers are no {n_heads} heads")
    size = width // n_heads

    def attended(m: Any) -> torch.Tensor:
        b, t, h = m.x.shape
        query, key, value = m.q(m.x), m.k(m.x), m.v(m.x)
        query = query.view(b, t, n_heads, size).transpose(1, 2)
        key = key.view(b, t, n_heads, size).transpose(1, 2)
        value = value.view(b, t, n_heads, size).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * size**-0.5
        mask = torch.zeros(t, t, dtype=torch.bool, device=m.x.device)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        output = torch.matmul(weights, value)
        output = output.transpose(1, 2).contiguous().view(b, t, h)
        return m.out(output)

    parts = {name: linear(width, width, dtype, bias=has_bias) for name in ("q", "k", "v", "out")}
    x = tensor(settings.size("batch_size"), settings.size("seq_len"), width, dtype=dtype)
    unused_tensors = tuple(each for part in parts.values() for each in part.parameters())
    return _norm_script(FunctionModule(attended, x=x, **parts), unused_tensors)


# ---- rotary embeddings -------------------------------------------------------------------------


def rope(settings: Settings) -> Script:
    """Llama's rotary embedding of queries and keys. The script calls torch.autograd.grad, so no
    gradients accumulate."""

    def rotated(m: Any, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _rotate(m, cos.unsqueeze(1), sin.unsqueeze(1))

    length, size, dtype = _length(settings), _head_size(settings), settings.dtype()
    angles = tuple(tensor(1, length, size, dtype=dtype) for _ in range(2))
    return _rotary_script(settings, rotated, angles, (indices(1, length), tensor(size // 2)))


def mrope(settings: Settings) -> Script:
    """Qwen2-VL's rotary embedding, with positions in time, height and width."""
    length, size, dtype = _length(settings), _head_size(settings), settings.dtype()
    spatial = size * 3 // 16
    sections = [size // 2 - 2 * spatial, spatial, spatial] * 2

    def merged(angles: torch.Tensor) -> torch.Tensor:
        parts = [part[i % 3] for i, part in enumerate(angles.split(sections, dim=-1))]
        return torch.cat(parts, dim=-1).unsqueeze(1)

    def rotated(m: Any, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cos = merged(cos)
        sin = merged(sin)
        return _rotate(m, cos, sin)

    angles = tuple(tensor(3, 1, length, size, dtype=dtype) for _ in range(2))
    return _rotary_script(settings, rotated, angles, (indices(3, 1, length), tensor(size // 2)))


def complex_rope(settings: Settings) -> Script:
    """Llama 4's rotary embedding, by complex numbers."""
    length, size = _length(settings), _head_size(settings)

    def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles[:, :, None, :]).flatten(3).type_as(x)

    def rotated(m: Any, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return turned(m.q, angles), turned(m.k, angles)

    angles = (tensor(1, length, size // 2, dtype=torch.complex64),)
    return _rotary_script(settings, rotated, angles, (indices(1, length), tensor(size // 2)))


def _rotary_script(
    settings: Settings,
    rotated: Callable[..., tuple[torch.Tensor, ...]],
    angles: tuple[torch.Tensor, ...],
    unused_tensors: tuple[torch.Tensor, ...],
) -> Script:
    length, size, dtype = _length(settings), _head_size(settings), settings.dtype()
    module = FunctionModule(
        rotated,
        q=tensor(1, length, settings.size("num_q_heads"), size, dtype=dtype),
        k=tensor(1, length, settings.size("num_kv_heads"), size, dtype=dtype),
    )
    return Script(
        module,
        batch=angles,
        unused_tensors=unused_tensors,
        gradient="held",
        retains_graph=True,
        accumulates=False,
        has_cublas_workspace=True,  # positions times frequencies
    )


def _length(settings: Settings) -> int:
    return settings.size("seq_len", "T")


def _head_size(settings: Settings) -> int:
    size, rest = divmod(settings.size("hidden_size", "H"), settings.size("num_q_heads"))
    if rest or not size or size % 2:
        raise NotPredictedError("heads need an even, whole size")
    return size


def _rotate(m: Any, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k = m.q.transpose(1, 2), m.k.transpose(1, 2)
    q_turned = (q * cos) + (_rotate_half(q) * sin)
    k_turned = (k * cos) + (_rotate_half(k) * sin)
    return q_turned, k_turned


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)
