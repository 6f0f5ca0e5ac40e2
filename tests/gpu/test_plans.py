"""Planned steps: the kernels of eager mode, bitwise identical, within the predicted memory."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import scheduler_runtime
from benchmarks.gpu.bench import measure_step, optimizer_of, step_of
from benchmarks.gpu.bits import compare, tight_plan
from benchmarks.random_modules import WIDE_LOSSES, WIDTH, RandomModule, Recipe
from benchmarks.same_bits import solution_of, trained
from benchmarks.step_styles import STYLES, Training
from benchmarks.zoo import LOSS_INSIDE, TINY, tiny
from graphs.costs import CostCache, Measured
from graphs.graph import Graph
from graphs.trace import trace
from scheduler_runtime.measuring import free_unreferenced
from scheduler_runtime.verifying import differences, run_both_steps
from solver.schedule import baseline

N_EAGER = 8
"""Runs of eager mode that show which values have no fixed bits."""
COMPARED = ("attention", "softmax", "bmm", "norm", "dropout", "convolution", "rnn")


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[kind_of(str(func))] += 1
        return func(*args, **(kwargs or {}))


def kind_of(operator: str) -> str:
    """One name for the forms that an operator has in eager mode and in a functional graph."""
    name = operator.removeprefix("aten.").split(".")[0]
    if "batch_norm" in name:
        return "batch_norm_backward" if "backward" in name else "batch_norm"
    return {"dropout_noise": "dropout", "native_dropout": "dropout"}.get(name, name)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("name", TINY)
def test_traced_operators_are_those_of_eager_mode(device, name, finding):
    """The same attention, norm, dropout and convolution kernels, as often."""
    model, batch = tiny(name, device).model_and_batch(device)
    with Counted() as eager:
        model(*batch).backward()
    graph = trace(model, batch, costs=Measured(device).roofline)
    planned = Counter(kind_of(node.op) for node in graph.nodes)
    compared = {k: n for k, n in eager.counts.items() if any(word in k for word in COMPARED)}
    assert compared
    assert {kind: planned[kind] for kind in compared} == compared
    finding(", ".join(sorted(compared)))


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_planned_step_is_bitwise_identical(device, name, finding):
    row = compare(name, "ours", device, backend="aot_eager")
    assert row["n_different"] == 0, row
    assert row["n_again"] > 0, "the plan recomputes nothing"
    finding(", ".join(f"{key} {row[key]}" for key in row if key.startswith(("n_", "all_"))))


def steady_bits_are_kept(model: nn.Module, batch: Any, graph: Graph) -> None:
    """Train with the plan without recomputation, so that it differs from eager mode in the graph's
    rewrites alone. Where an operator has no deterministic form, what differs between runs of eager
    mode may differ here too."""
    plain = copy.deepcopy(model)
    scheduler_runtime.apply(model, solution_of(graph, baseline(graph)))
    try:
        runs = trained_runs([plain, plain, model], batch, warn_only=False)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        runs = trained_runs([*[plain] * N_EAGER, model], batch, warn_only=True)
    for expected, *others, planned in zip(*runs, strict=True):
        unsteady = set().union(*(differences(expected, other) for other in others))
        assert differences(expected, planned).keys() <= unsteady


def trained_runs(models: list[nn.Module], batch: Any, *, warn_only: bool) -> list[Any]:
    """Steps of each, from the same state."""
    state = copy.deepcopy(models[0].state_dict())
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    runs = []
    try:
        for each in models:
            each.load_state_dict(state)
            runs.append(trained(Training(each, batch, LOSS_INSIDE), STYLES["plain"])[0])
    finally:
        torch.use_deterministic_algorithms(False)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_outputs_in_place_of_inputs_are_bitwise_identical(device, name, finding):
    model, batch = tiny(name, device).model_and_batch(device)
    graph = trace(model, batch, rewrites=("in_place",))
    steady_bits_are_kept(model, batch, graph)
    n_in_place = sum(node.overwrites is not None for node in graph.nodes)
    finding(f"{n_in_place} outputs in place of inputs")


@pytest.mark.slow
@pytest.mark.parametrize("rewrite", ["chunked_loss", "chunked_loss_backward"])
@pytest.mark.parametrize("loss", WIDE_LOSSES)
def test_losses_in_row_chunks_are_bitwise_identical(device, loss, rewrite, finding):
    """Or the device's kernels fail the probe of bits: then the rewrite is not offered."""
    recipe = Recipe((), (), (), n_rows=300, wide_loss=loss, n_classes=16_384)
    torch.manual_seed(0)
    model, batch = RandomModule(recipe).to(device), (torch.randn(300, WIDTH, device=device),)
    graph = trace(model, batch, rewrites=(rewrite, "in_place"))
    n_chunked = sum(node.op.startswith("row_chunks") for node in graph.nodes)
    steady_bits_are_kept(model, batch, graph)
    finding(f"{n_chunked} operators in row chunks" if n_chunked else "not offered")
    assert n_chunked or device.type == "cuda"


@pytest.mark.slow
def test_a_planned_step_under_autocast_is_bitwise_identical(device):
    """The tied weight is cast once, as in eager mode."""
    model, batch = tiny("gpt2 with dropout", device).model_and_batch(device)
    plain = copy.deepcopy(model)
    gradients = []
    torch.use_deterministic_algorithms(device.type == "cuda")
    for each in (plain, model):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            if each is model:
                scheduler_runtime.apply(model, tight_plan(model, batch))
            torch.manual_seed(7)
            loss = each(*batch)
        loss.backward()
        gradients.append({name: p.grad for name, p in each.named_parameters()})
    expected, planned = gradients
    assert [n for n in expected if not torch.equal(expected[n], planned[n])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2 with dropout", "batch norm"])
def test_the_measured_peak_is_the_predicted_one(device, name, finding):
    """Up to what the allocator rounds and libraries keep: 1 MB for each tensor of the step."""
    model, batch = tiny(name, device).model_and_batch(device)
    optimizer = optimizer_of(model)
    solution = tight_plan(model, batch, optimizer=optimizer)
    scheduler_runtime.apply(model, solution)
    predicted = solution.simulation.peak_bytes
    figures = measure_step(step_of(model, batch, optimizer), model, batch, optimizer, n_timed=2)
    finding(f"predicted {predicted}, {figures}")
    beside = (figures.other_bytes or 0) + len(solution.graph.tensors) * 10**6
    assert figures.peak_bytes <= predicted + beside


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
    ids=["AdamW", "AdamW fused", "SGD momentum"],
)
def test_an_optimizer_takes_what_is_predicted(device, kind, options, finding):
    model, batch = tiny("gpt2 with dropout", device).model_and_batch(device)
    optimizer = kind(model.parameters(), lr=1e-5, **options)
    graph = trace(model, batch, optimizer=optimizer, costs=Measured(device).roofline)
    predicted = graph.meta.environment["optimizer"]
    model(*batch).backward()
    optimizer.step()
    state_bytes = sum(
        item.numel() * item.element_size()
        for each in optimizer.state.values()
        for item in each.values()
        if isinstance(item, torch.Tensor) and item.device.type == device.type
    )
    assert predicted["state_bytes"] == state_bytes
    if device.type == "cuda":
        free_unreferenced(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.step()
        taken = torch.cuda.max_memory_allocated(device) - before
        finding(f"workspace of a step {taken} bytes, predicted {predicted['workspace_bytes']}")


@pytest.mark.slow
def test_verify_finds_no_difference(device, finding):
    subject = tiny("batch norm", device)
    model, batch = subject.model_and_batch(device)
    found = run_both_steps(
        tight_plan(model, batch, optimizer=optimizer_of(model)),
        model=lambda: subject.model_and_batch(device)[0],
        batch=lambda: subject.model_and_batch(device)[1],
        loss=None,
        inputs=None,
        optimizer=optimizer_of,
        device=device.type,
        autocast=None,
    )
    assert not found.differences
    finding(f"peak {found.measured_peak_bytes}, predicted {found.predicted_peak_bytes}")
    finding(f"{len(found.unsteady)} tensors differ between two runs without a plan")


@pytest.mark.slow
def test_measured_costs_are_kept_on_disk(device, tmp_path, finding):
    model, batch = tiny("gpt2 with dropout", device).model_and_batch(device)
    path = tmp_path / "costs.json"
    costs = Measured(device, cache=CostCache(path, device))
    trace(model, batch, costs=costs)
    costs.save()
    described = costs.description
    assert described["n_fallbacks"] == 0
    assert len(CostCache(path, device)) > 0
    finding(f"{described['n_distinct']} measured on {described['title']}")
