"""Devices and costs by name from Python, as on the command line; measured costs kept on disk."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from graphs.costs.cache import CostCache, default_cache_file
from graphs.costs.models import Measured, OpCall, Roofline
from graphs.files import FormatError
from graphs.hardware import named
from graphs.trace import trace
from solver import solve
from solver.device_and_costs import DeviceError, find_target
from solver.sizes_deadlines_progress.sizes import CUDA_RESERVE_BYTES


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    return Loss(16, 16), torch.randn(4, 16)


def test_a_named_card_gives_its_rates_and_its_memory():
    model, batch = model_and_batch()
    solution = solve(model, batch, budget="50%", device="h100")
    assert solution.graph.meta.costs["device"] == "h100"
    assert solution.request.budget_bytes == named("h100").capacity_bytes // 2
    assert solution.request.reserve_bytes == CUDA_RESERVE_BYTES  # as on the command line
    same = solve(model, batch, budget="1GB", device="H100", costs="roofline")
    assert same.graph.baseline_time_s == solution.graph.baseline_time_s


def test_a_graph_file_has_no_reserve_of_its_own(tmp_path):
    model, batch = model_and_batch()
    graph = trace(model, batch)
    graph = dataclasses.replace(graph, meta=graph.meta.with_environment(device="cuda"))
    path = tmp_path / "graph.json"
    graph.save(path)
    for problem in (graph, path):
        assert solve(problem, budget="1GB").request.reserve_bytes == 0


def test_costs_are_measured_on_the_device_that_is_here():
    model, batch = model_and_batch()
    solution = solve(model, batch, budget="1GB", device="cpu", costs="measured")
    assert solution.graph.meta.costs["model"] == "measured"
    with pytest.raises(ValueError, match="cannot be measured for 'h100'"):
        solve(model, batch, budget="1GB", device="h100", costs="measured")


def test_a_cost_model_is_taken_as_it_is():
    model, batch = model_and_batch()
    solution = solve(model, batch, budget="1GB", costs=Roofline(named("t4")))
    assert solution.graph.meta.costs["device"] == "t4"


@pytest.mark.parametrize(
    ("device", "costs", "message"),
    [
        ("h1000", None, "device is 'h1000'; one of cpu, t4, .*cuda:1"),
        ("cpu", "guessed", "'roofline', 'measured' or a cost model"),
    ],
)
def test_what_means_nothing_here_is_refused(device, costs, message):
    with pytest.raises(DeviceError, match=message):
        find_target(device, costs)


@pytest.mark.parametrize("device", ["mps", "xpu", torch.device("mps")])
def test_devices_whose_peak_nobody_can_measure_are_refused(device):
    model, batch = model_and_batch()
    with pytest.raises(ValueError, match="planned for cpu and cuda"):
        solve(model, batch, budget="1GB", device=device)


def product(n: int) -> OpCall:
    x = torch.randn(n, n)
    return OpCall(torch.ops.aten.mm.default, (x, x), {}, x @ x)


def test_measured_costs_are_kept_between_processes(tmp_path):
    path = tmp_path / "costs.json"
    first = Measured("cpu", cache=CostCache(path, "cpu"))
    cost = first.cost(product(32))
    assert not path.exists()
    first.save()
    again = Measured("cpu", cache=CostCache(path, "cpu"))
    assert again.cost(product(32)) == cost
    assert len(CostCache(path, "cpu")) == 1
    again.cost(product(33))
    again.save()
    assert len(CostCache(path, "cpu")) == 2


def test_costs_of_other_float32_products_are_kept_apart():
    before, path = torch.get_float32_matmul_precision(), default_cache_file("cpu")
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        assert default_cache_file("cpu") != path
    finally:
        torch.set_float32_matmul_precision(before)
    assert default_cache_file("cpu") == path


def test_a_file_of_another_device_or_none_at_all_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    measured = Measured("cpu", cache=CostCache(path, "cpu"))
    measured.cost(product(8))
    measured.save()
    path.write_text(path.read_text().replace(torch.__version__, "0.0"))
    with pytest.raises(FormatError, match="circumstances"):
        CostCache(path, "cpu")
    path.write_text("{}")
    with pytest.raises(FormatError, match="delete it"):
        CostCache(path, "cpu")


def test_costs_alone_are_for_the_device_of_the_model():
    model, batch = model_and_batch()
    solution = solve(model, batch, budget="1GB", costs="measured")
    assert solution.graph.meta.costs["model"] == "measured"


def test_a_class_in_the_place_of_a_module_is_refused():
    with pytest.raises(TypeError, match=r"Linear is a class; give a module: solve\(Linear"):
        solve(torch.nn.Linear, torch.ones(1), budget="1GB")


def test_a_function_in_the_place_of_a_module_is_refused():
    with pytest.raises(TypeError, match=r"an object of type function; give a torch\.nn\.Module"):
        solve(lambda x: x.sum(), torch.ones(1), budget="1GB")
