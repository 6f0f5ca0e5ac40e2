"""What a transformer layer saves for its backward pass, against formulas worked out by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.published.llama import LlamaLayer, linear
from graphs.graph import Graph
from graphs.model_calls import Call
from graphs.trace import trace_module
from tests.support.paths import ROOT

BF16 = torch.bfloat16


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


@pytest.mark.slow
def test_the_page_has_what_a_layer_of_llama_3_8b_saves():
    """The table's sum at the sizes that the page names, each row of it, and the figure in words."""
    b, s, h, a, n_kv, i = 1, 2048, 4096, 32, 8, 14336
    x = torch.empty(b, s, h, dtype=BF16, device="meta", requires_grad=True)
    angles = [torch.empty(1, s, h // a, dtype=BF16, device="meta") for _ in range(2)]
    found = saved_bytes(graph_of(LlamaLayer(h, a, n_kv, i), x, *angles))
    expected = found - sum(each.nbytes for each in angles)
    page = (ROOT / "docs" / "bytes.md").read_text()
    assert f"{expected:,}".replace(",", " ") + " bytes per layer" in page
    table = page.partition("| saved | bytes / (b·s) |")[2].partition("| **sum**")[0]
    rows = [line.split("|")[2] for line in table.splitlines()[2:] if line]
    sizes = {"h": h, "i": i, "a": a, "": 1}
    terms = re.findall(r"([0-9]+)([hia]?)", " ".join(rows))
    assert b * s * sum(int(n) * sizes[letter] for n, letter in terms) == expected


@pytest.mark.slow
def test_a_llama_layer_saves_what_the_documentation_counts():
    """`docs/bytes.md`: b s (24 h + 8 i + 4 a + 8), and the tables of the rotation."""
    b, s, h, a, n_kv, i = 2, 96, 64, 4, 2, 160
    x = torch.empty(b, s, h, dtype=BF16, device="meta", requires_grad=True)
    angles = [torch.empty(1, s, h // a, dtype=BF16, device="meta") for _ in range(2)]
    graph = graph_of(LlamaLayer(h, a, n_kv, i), x, *angles)
    tables = sum(each.nbytes for each in angles)
    assert saved_bytes(graph) == b * s * (24 * h + 8 * i + 4 * a + 8) + tables
