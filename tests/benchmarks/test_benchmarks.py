"""The benchmarks' own arithmetic, on graphs small enough for a test. Nothing here is timed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import deep_chains, harness, offload, peers, plan_quality
from benchmarks.zoo.graphs import captured
from graphs.synthetic.nets import residual


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(torch.tanh(layer(x)))
        return x.square().mean()


@pytest.mark.slow
def test_a_report_has_a_row_for_each_share_and_lists_its_misses() -> None:
    found = plan_quality.measure_graph(
        "net", residual(n_blocks=5), shares=(0.8, 0.0), time_limit_s=600
    )
    assert [row["share"] for row in found["rows"]] == [0.8, 0.0]
    generous = found["rows"][0]
    assert generous["peak_bytes"] <= generous["budget_bytes"]
    assert generous["bound"] - 1e-9 <= generous["overhead"]
    assert not plan_quality.missed(generous)
    assert plan_quality.missed({**generous, "gap": 0.002})
    assert not plan_quality.missed({**generous, "share": 0.4, "gap": 0.002})
    assert plan_quality.missed({**generous, "gap": None})
    circumstances = harness.circumstances(5.0)
    text = plan_quality.markdown({"circumstances": circumstances, "graphs": {"net": found}})
    assert "| net | " in text
    assert "## net" in text


@pytest.mark.slow
def test_what_pytorchs_partitioner_saves_is_simulated() -> None:
    with torch.device("meta"):
        model, batch = Tower(), torch.empty(256, 64)
    step = captured(model, batch)
    found = peers.partitioned(step, time_limit_s=60.0)
    assert set(found) == {"torch dp", "torch greedy", "torch ilp"}
    for simulations in found.values():
        assert len(simulations) == len(peers.RATIOS)
        assert any(simulation.n_recomputed for simulation in simulations)
        roomy = peers.best_overhead(step.graph, simulations, budget_bytes=10**9)
        tight = peers.best_overhead(
            step.graph, simulations, budget_bytes=min(s.peak_bytes for s in simulations)
        )
        assert roomy is not None
        assert tight is not None
        assert 0.0 <= roomy <= tight
        assert peers.best_overhead(step.graph, simulations, budget_bytes=1) is None


@pytest.mark.slow
def test_a_deep_chain_is_planned_beside_the_exact_chain_program() -> None:
    row = deep_chains.measure(residual(n_blocks=60), share=0.2, limit_s=20.0)
    ours, exact = row["auto"], row["chain"]
    assert ours["peak_bytes"] <= row["budget_bytes"]
    assert exact["n_blocks"] >= 60
    assert ours["bound"] - 1e-9 <= ours["overhead"] <= exact["overhead"]


def test_offload_measures_and_names_its_misses() -> None:
    graph = residual(n_blocks=6)
    found = offload.measure_graph("net", graph, shares=[0.5], time_limit_s=60.0)
    (row,) = found["rows"]
    assert 0.0 <= row["both_450"]["bound"] <= row["both_450"]["overhead"] + 1e-9
    assert row["both_450"]["overhead"] <= row["recompute"]["overhead"] + 1e-3
    report = {"circumstances": harness.circumstances(60.0), "graphs": {"net": found}}
    row["both_50"]["gap"], row["both_450"]["gap"] = 0.002, 0.0
    assert [text for text in offload.misses(report) if "gap" in text] == [
        "net at 0.5, 50 GB/s: gap 0.20"
    ]
    assert "Misses: " in offload.markdown(report)
