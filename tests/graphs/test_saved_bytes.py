"""What a transformer layer saves for its backward pass, against formulas worked out by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from graphs.calls import Call
from graphs.graph import Graph
from graphs.trace import trace_module

BF16 = torch.bfloat16


def linear(n_in: int, n_out: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=bias, dtype=BF16, device="meta")


class UnfusedLayer(nn.Module):
    """Of Korthikanti et al. 2022, figure 2: attention written out, dropout three times."""

    def __init__(self, h: int, a: int) -> None:
        super().__init__()
        self.a = a
        self.before_attention = nn.LayerNorm(h, dtype=BF16, device="meta")
        self.before_mlp = nn.LayerNorm(h, dtype=BF16, device="meta")
        self.qkv, self.projection = linear(h, 3 * h), linear(h, h)
        self.widen, self.narrow = linear(h, 4 * h), linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        heads = self.qkv(self.before_attention(x)).view(b, s, 3, self.a, h // self.a)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(h // self.a)
        context = dropped(scores.softmax(-1)) @ v
        context = context.transpose(1, 2).reshape(b, s, h)
        x = x + dropped(self.projection(context))
        return x + dropped(self.narrow(F.gelu(self.widen(self.before_mlp(x)))))


def dropped(x: torch.Tensor) -> torch.Tensor:
    """By CUDA's operator, whose mask has one byte; the CPU's keeps its noise in bfloat16."""
    return torch.native_dropout(x, 0.1, True)[0]


class Norm(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(h, dtype=BF16, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class LlamaLayer(nn.Module):
    """As the transformers library writes it, with fused attention."""

    def __init__(self, h: int, a: int, n_kv: int, i: int) -> None:
        super().__init__()
        self.a, self.n_kv, self.head = a, n_kv, h // a
        self.before_attention, self.before_mlp = Norm(h), Norm(h)
        n = n_kv * self.head
        self.q, self.o = linear(h, h, bias=False), linear(h, h, bias=False)
        self.k, self.v = linear(h, n, bias=False), linear(h, n, bias=False)
        self.gate, self.up = linear(h, i, bias=False), linear(h, i, bias=False)
        self.down = linear(i, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        y = self.before_attention(x)
        q, k, v = (
            project(y).view(b, s, -1, self.head).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = (rotated(each, cos, sin) for each in (q, k))
        k, v = (self.for_all_heads(each) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, h))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def for_all_heads(self, x: torch.Tensor) -> torch.Tensor:
        b, n_kv, s, head = x.shape
        shared = x[:, :, None].expand(b, n_kv, self.a // n_kv, s, head)
        return shared.reshape(b, self.a, s, head)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def graph_of(layer: nn.Module, *batch: torch.Tensor) -> Graph:
    return trace_module(
        layer,
        Call.of(batch, {}),
        device=torch.device("cpu"),
        choose=lambda _output: (0,),
        gradients="fresh",
        costs=None,
    ).graph


def saved_bytes(graph: Graph, *, without: str = "") -> int:
    """Of activations, the layer's input among them, that the backward pass reads.

    without: a name of an operator; its second and further outputs do not count.
    """
    read = {name for node in graph.later_nodes for name in node.inputs}
    made = {
        name
        for node in graph.forward_nodes
        for name in (node.outputs[:1] if without and without in node.op else node.outputs)
    }
    inputs = {tensor.name for tensor in graph.resident if tensor.kind == "input"}
    return sum(graph.tensor_by_name[name].size_bytes for name in read & (made | inputs))


def test_an_unfused_layer_saves_what_korthikanti_et_al_count():
    """Section 4.1, equation 1: s b h (34 + 5 a s / h); means and deviations of norms left out."""
    b, s, h, a = 2, 96, 64, 4
    x = torch.empty(b, s, h, dtype=BF16, device="meta", requires_grad=True)
    graph = graph_of(UnfusedLayer(h, a), x)
    expected = s * b * h * 34 + 5 * a * s * s * b
    assert saved_bytes(graph, without="native_layer_norm") == expected


def test_a_llama_layer_saves_what_the_documentation_counts():
    """`docs/bytes.md`: b s (24 h + 8 i + 4 a + 8), and the tables of the rotation."""
    b, s, h, a, n_kv, i = 2, 96, 64, 4, 2, 160
    x = torch.empty(b, s, h, dtype=BF16, device="meta", requires_grad=True)
    angles = [torch.empty(1, s, h // a, dtype=BF16, device="meta") for _ in range(2)]
    graph = graph_of(LlamaLayer(h, a, n_kv, i), x, *angles)
    tables = sum(each.nbytes for each in angles)
    assert saved_bytes(graph) == b * s * (24 * h + 8 * i + 4 * a + 8) + tables
