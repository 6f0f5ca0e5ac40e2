"""`--emit`: settings of other systems, their simulated cost, and that the systems accept them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.emitted_settings import N_LAYERS, check_system, layered_graph
from checkpoint_solver.cli.command import main
from graphs.graph import Graph
from graphs.trace import trace
from scheduler_runtime.measuring import measure
from solver.module_checkpointing.for_other_frameworks.closest_setting import nearest
from solver.module_checkpointing.for_other_frameworks.forecasts import forecast
from solver.module_checkpointing.for_other_frameworks.model_layers import NoLayersError, layers
from solver.module_checkpointing.for_other_frameworks.systems import SYSTEMS
from solver.module_checkpointing.regions import CheckpointRegion
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from tests.support.command import failed, write_model
from tests.support.paths import GPT2, ROOT
from tests.support.synthetic_graphs import random_dag

CHECKED = ROOT / "benchmarks" / "results" / "emitted_settings.json"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """checkpointed: how many of the first layers; reentrant: which of PyTorch's two ways."""

    def __init__(self, *, checkpointed: int = 0, reentrant: bool = False, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(6))
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index, layer in enumerate(self.layers):
            if index < self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            else:
                x = layer(x)
        return x.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(1024, 64)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(Net(), batch(), device="cpu")


HANDED_ON_BYTES = 1024 * 64 * 4
"""What a layer hands on: the reentrant way makes it again and holds it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_layers", "reentrant", "more_bytes"),
    [(3, False, 0), (6, False, 0), (6, True, HANDED_ON_BYTES)],
)
def test_a_forecast_is_what_a_checkpointed_model_takes(graph, n_layers, reentrant, more_bytes):
    regions = [CheckpointRegion(layer.names, stops_early=not reentrant) for layer in layers(graph)]
    predicted = simulate(graph, forecast(graph, regions[:n_layers]))
    model = Net(checkpointed=n_layers, reentrant=reentrant)
    measured = measure(model, batch(), n_steps=1)
    assert predicted.peak_bytes + more_bytes == pytest.approx(measured.peak_bytes, abs=10**5)


@pytest.mark.slow
def test_without_regions_the_step_is_the_baseline(graph):
    assert forecast(graph, []) == baseline(graph)


def test_every_layer_runs_once_more(graph):
    found = layers(graph)
    assert [layer.path for layer in found] == [f"layers.{i}" for i in range(6)]
    schedule = forecast(graph, [CheckpointRegion(layer.names, stops_early=True) for layer in found])
    n_runs = {name: 0 for layer in found for name in layer.names}
    for op in schedule.ops:
        if getattr(op, "node", "") in n_runs:
            n_runs[op.node] += 1
    products = [n.name for layer in found for n in layer.nodes if n.op == "aten.addmm.default"]
    again = [n_runs[name] for name in products]
    assert again == [2, 1] * 6  # the last product's output is read by the sum alone: never needed


@given(seed=st.integers(0, 10**6), n_regions=st.integers(1, 4), early=st.booleans())
@settings(max_examples=60, deadline=None)
def test_regions_of_any_graph_make_a_legal_schedule(seed, n_regions, early):
    graph = random_dag(n_forward=12, n_later=12, seed=seed)
    names = [node.name for node in graph.forward_nodes]
    size = -(-len(names) // n_regions)
    regions = [
        CheckpointRegion(
            tuple(names[start : start + size]),
            saved=frozenset(names[start : start + size : 3]) if seed % 2 else frozenset(),
            drops_output=bool(seed % 3 == 0),
            stops_early=early,
        )
        for start in range(0, len(names), size)
    ]
    simulation = simulate(graph, forecast(graph, regions))  # raises where a rule is broken
    assert simulation.time_s >= graph.baseline_time_s


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_nearest_setting_is_the_fastest_that_fits(graph, system):
    plain = simulate(graph, baseline(graph))
    roomy = nearest(graph, system=system, budget_bytes=plain.peak_bytes)
    tight = nearest(graph, system=system, budget_bytes=int(0.7 * plain.peak_bytes))
    none = nearest(graph, system=system, budget_bytes=graph.resident_bytes)
    assert roomy.fits
    assert roomy.simulation.n_recomputed == 0
    assert tight.fits
    assert tight.simulation.peak_bytes <= 0.7 * plain.peak_bytes
    assert tight.simulation.time_s > plain.time_s
    assert not none.fits
    candidates = [c for f in SYSTEMS[system].families(graph, layers(graph)) for c in f]
    simulated = [simulate(graph, forecast(graph, c.regions)) for c in candidates]
    fitting = [t.time_s for t in simulated if t.peak_bytes <= 0.7 * plain.peak_bytes]
    assert tight.simulation.time_s == min(fitting)
    assert none.simulation.peak_bytes == min(t.peak_bytes for t in simulated)


def test_a_long_family_is_searched_by_halves():
    graph = layered_graph(40)
    found = nearest(graph, system="megatron", budget_bytes=graph.resident_bytes)
    assert found.n_layers == 40
    assert found.n_judged < 40


def test_selective_settings_are_of_what_the_layers_have():
    texts = [c.text for f in SYSTEMS["megatron"].families(None, ()) for c in f]
    assert not any("selective" in text for text in texts)
    graph = layered_graph(2)
    texts = [c.text for f in SYSTEMS["megatron"].families(graph, layers(graph)) for c in f]
    assert "--recompute-granularity selective --recompute-modules core_attn layernorm mlp" in texts


def test_a_graph_that_names_no_modules_is_refused(capsys):
    graph = GPT2
    with pytest.raises(NoLayersError, match="give the model file instead"):
        layers(Graph.load(graph))
    line = failed(capsys, "--budget", "9GB", "--emit", "megatron", str(graph), code=2)
    assert "--emit megatron" in line


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_shows_it_beside_the_plan(tmp_path, capsys, as_json):
    path = write_model(tmp_path)
    options = ["--budget", "1MB", "--device", "cpu", "--emit", "axolotl"]
    assert main([*options, *(["--json"] if as_json else []), path]) == 0
    out = capsys.readouterr().out
    if as_json:
        emitted = json.loads(out)["emitted"]
        assert emitted["setting"] == "gradient_checkpointing: false"
        assert emitted["fits"]
        assert emitted["n_layers"] == 4
    else:
        assert "Setting  for axolotl" in out
        assert "gradient_checkpointing: false" in out
        assert "this plan" in out


def test_the_systems_took_these_settings():
    """The committed result is of what is offered now; here no system need be installed."""
    found = json.loads(CHECKED.read_text())["systems"]
    graph = layered_graph(N_LAYERS)
    assert set(found) == set(SYSTEMS)
    for system, asked in SYSTEMS.items():
        offered = [c.text for f in asked.families(graph, layers(graph)) for c in f]
        assert [s["setting"] for s in found[system]["settings"]] == offered
        assert all(s["taken"] for s in found[system]["settings"])


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_that_is_here_takes_them(system):
    found = check_system(system, layered_graph(N_LAYERS))
    if found["version"] is None:
        pytest.skip(f"{found['reason']}; benchmarks/results/emitted_settings.json has the result")
    assert all(s["taken"] for s in found["settings"])
