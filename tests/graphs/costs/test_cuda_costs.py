"""The costs of a plan for a CUDA device, with the driver mocked."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from torch import nn

from graphs.costs.cache import CostCache, default_cache_file
from graphs.costs.models import (
    Measured,
    Roofline,
    default_costs,
    finish_measuring,
    from_description,
    measured,
)
from graphs.trace import trace
from scheduler_runtime import apply
from scheduler_runtime.by_submodule import observe
from solver import solve
from solver.device_and_costs import DeviceError, find_target
from solver.reporting import describe_costs

CARDS = ("NVIDIA H200", "NVIDIA Z9000")


@pytest.fixture
def cards(monkeypatch, tmp_path):
    """Two cards, the second of unknown rates; the cache paths that were requested."""

    def properties(device):
        index = device.index or 0 if isinstance(device, torch.device) else device
        size = 10**9 * (index + 1)
        return types.SimpleNamespace(name=CARDS[index], total_memory=size, major=9, minor=0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(CARDS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_card_that_is_here_is_measured_unless_something_else_is_asked_for(cards):
    for device in (None, "cuda", "cuda:0"):
        target = find_target(device)
        assert isinstance(target.costs, Measured)
        assert target.costs.device.type == torch.device(target.torch_device).type == "cuda"
        assert target.hardware.capacity_bytes == 10**9
        assert target.notes == ()
    assert isinstance(find_target("cuda", "roofline").costs, Roofline)
    assert isinstance(find_target("h100").costs, Roofline)
    assert isinstance(find_target("cpu").costs, Roofline)
    assert find_target("cpu").torch_device == "cpu"
    assert find_target("h100").torch_device == "cuda"


def test_the_second_card_is_named_by_its_index(cards):
    target = find_target("cuda:1")
    assert target.costs.device == torch.device("cuda:1")
    assert target.torch_device == target.local_device == "cuda:1"
    assert target.hardware.capacity_bytes == 2 * 10**9
    with pytest.raises(DeviceError, match="2 CUDA devices, from cuda:0"):
        find_target("cuda:2")
    again = from_description(target.costs.roofline.description, device=torch.device("cuda:1"))
    assert isinstance(again, Roofline)
    described = {"model": "measured", "device": "cuda", "fallback": "h200"}
    assert from_description(described, device=torch.device("cuda:1")).device.index == 1
    assert from_description(described, device=torch.device("cpu")).device.index is None


def test_a_card_of_unknown_rates_is_measured_and_has_no_roofline_of_its_own(cards):
    target = find_target("cuda:1")
    assert target.hardware.title == "NVIDIA Z9000"
    with pytest.raises(DeviceError, match="no rates are known for NVIDIA Z9000"):
        find_target("cuda:1", "roofline")


def test_in_python_a_card_is_measured_too(cards):
    for device in ("cuda:1", torch.device("cuda:1")):
        target = find_target(device)
        assert isinstance(target.costs, Measured)
        assert target.costs.device == torch.device("cuda:1")
        assert target.hardware.capacity_bytes == 2 * 10**9
    assert isinstance(find_target("cuda", "roofline").costs, Roofline)
    assert isinstance(default_costs(torch.device("cuda")), Measured)


@pytest.mark.parametrize("name", ["mps", "xpu", "mps:0"])
def test_devices_whose_peak_cannot_be_measured_are_refused_on_the_command_line(name):
    with pytest.raises(DeviceError, match="planned for cpu and cuda only"):
        find_target(name)


class Loss(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def test_measured_costs_are_compared_with_the_roofline():
    graph = trace(Loss(16, 16), torch.randn(4, 16), costs=Measured("cpu"))
    described = graph.meta.costs
    total_s = sum(node.time_s for node in graph.nodes)
    assert described["measured_s"] == pytest.approx(total_s)
    plain = trace(Loss(16, 16), torch.randn(4, 16), costs=Measured("cpu").roofline)
    assert described["roofline_s"] == pytest.approx(sum(node.time_s for node in plain.nodes))
    assert "roofline_s" not in plain.meta.costs
    words = describe_costs({**described, "measured_s": 3e-3, "roofline_s": 2e-3})
    assert words.endswith("; 3.00 ms, 1.50 times the roofline's 2.00 ms")
    assert "times" not in describe_costs(
        {**described, "measured_s": "a", "roofline_s": float("nan")}
    )


def test_measured_costs_are_saved_and_their_memory_released(tmp_path, monkeypatch):
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    path = tmp_path / "costs.json"
    costs = Measured("cpu", cache=CostCache(path, "cpu"))
    trace(Loss(16, 16), torch.randn(4, 16), costs=costs)
    assert len(CostCache(path, "cpu")) > 3
    assert not emptied
    costs.device = torch.device("cuda")
    finish_measuring(costs)
    assert emptied == [True]


def test_a_corrupt_cost_file_is_only_warned_of(cards, caplog):
    path = default_cache_file("cuda")
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert isinstance(measured(torch.device("cuda")), Measured)
    assert "not a file of measured costs" in caplog.text


def test_an_unwritable_folder_is_only_warned_of(tmp_path, monkeypatch, caplog):
    costs = Measured("cpu", cache=CostCache(tmp_path / "costs.json", "cpu"))

    def refused(*_args):
        raise OSError("read-only file system")

    monkeypatch.setattr("graphs.costs.cache.write_json", refused)
    trace(Loss(16, 16), torch.randn(4, 16), costs=costs)
    assert "read-only file system" in caplog.text


def test_replanning_measures_on_the_device_of_the_model(monkeypatch):
    module = vars(sys.modules["scheduler_runtime.applying"])
    model, batch = Loss(16, 16), torch.randn(4, 16)
    solution = solve(model, batch, budget="1GB", device="cpu", costs="measured")
    asked_for: list[torch.device] = []
    own = module["from_description"]

    def noted(description, *, device):
        json.dumps(dict(description))
        asked_for.append(device)
        return own(description, device=device)

    monkeypatch.setitem(module, "from_description", noted)
    apply(model, solution, on_mismatch="replan")
    model(torch.randn(5, 16)).backward()
    assert asked_for == [torch.device("cpu")]


def test_submodules_are_timed_on_the_device_that_they_are_on(monkeypatch):
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    watch = observe._Watch(nn.Sequential(nn.Linear(2, 2)), ["0"])
    watch.mark("forward 0")
    assert waited == []
    watch._cuda_devices = {torch.device("cuda:1")}
    watch.mark("forward 0")
    assert waited == [torch.device("cuda:1")]
