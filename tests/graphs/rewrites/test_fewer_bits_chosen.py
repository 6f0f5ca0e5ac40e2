"""What the words for storages in fewer bits plan, and that they are chosen where it pays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint_solver.cli import main
from graphs.rewrites import results_of, variants_of
from graphs.trace import trace
from scheduler_runtime import fit
from scheduler_runtime.fitting import plans_of
from solver import solve
from solver.bound import lower_bound_s


def test_what_a_word_plans() -> None:
    assert variants_of("lossless")[:4] == variants_of("bitwise")
    assert {name for variant in variants_of("lossless") for name in variant} == {
        *("in_place", "chunked_loss", "chunked_loss_backward", "packed_masks")
    }
    assert variants_of("int8")[-1] == (
        *("chunked_loss", "packed_masks", "waiting_in_int8", "in_place"),
    )
    assert not any("packed_masks" in variant for variant in variants_of("bitwise"))
    assert results_of(("packed_masks", "in_place")) == "bitwise"
    assert results_of(("packed_masks", "waiting_in_bf16")) == "lossy"


class Wide(nn.Module):
    """Products that take long to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.silu(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_it_is_chosen_where_it_pays() -> None:
    wide = torch.randn(2048, 512)
    plain, rounded = (
        solve(Wide(), wide, budget="40MB", rewrites=word) for word in ("bitwise", "int8")
    )
    assert rounded.graph.meta.rewrites == ["packed_masks", "waiting_in_int8", "in_place"]
    assert rounded.status == "optimal"
    assert rounded.overhead == pytest.approx(0.100, abs=0.005)
    assert plain.lower_bound_overhead > 0.12
    assert rounded.lower_bound_overhead < plain.lower_bound_overhead


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("part", "n_products", "n_others"),
    [("_16th", 0, 0), ("_4th", 3, 0), ("_half", 6, 0), ("", 6, 6)],
)
def test_a_part_of_the_bytes_waits_packed(part: str, n_products: int, n_others: int) -> None:
    """Of twelve equal storages those that take long to compute again come first."""
    graph = trace(Wide(), torch.randn(2048, 512), rewrites=(f"waiting_in_bf16{part}",))
    packed = [node.inputs[0] for node in graph.nodes if node.op == "pack(bf16)"]
    makers = [graph.producer[name].op for name in packed]
    assert makers.count("aten.addmm.default") == n_products
    assert makers.count("aten.silu.default") == n_others
    assert len(makers) == n_products + n_others


@pytest.mark.slow
def test_a_part_is_chosen_where_all_would_cost_more() -> None:
    wide = torch.randn(2048, 512)
    found = solve(Wide(), wide, budget="42MB", rewrites="bf16")
    assert "waiting_in_bf16_half" in found.graph.meta.rewrites
    assert found.status == "optimal"
    for graph in found.variants.planned:  # what is proven holds for every choice
        bound_s = lower_bound_s(graph, budget_bytes=42_000_000)
        assert found.lower_bound_s <= bound_s * (1 + 1e-6)
        if "waiting_in_bf16" in graph.meta.rewrites:
            assert found.simulation.time_s < bound_s


@pytest.mark.slow
def test_fit_takes_the_word() -> None:
    torch.manual_seed(0)
    model, wide = Wide(), torch.randn(2048, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, budget="37MB", optimizer=optimizer, rewrites="int8")
    before = [p.detach().clone() for p in model.parameters()]
    model(wide).backward()
    optimizer.step()
    (plan,) = plans_of(model)
    assert "waiting_in_int8" in plan.solution.graph.meta.rewrites
    assert not any(map(torch.equal, before, model.parameters()))


FILE = """
import torch
from tests.graphs.rewrites.test_fewer_bits_chosen import Wide
get_model, get_batch = Wide, lambda: torch.randn(2048, 512)


def get_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE)
    arguments = ["--budget", "40MB", str(path), "--json", "--rewrites", "int8", "--verify"]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rewrites"]["results"] == "lossy"
    assert answer["verification"]["results"] == "lossy"
