"""Which device a plan is for: what drivers call their cards, and what is refused."""

from __future__ import annotations

import pytest

from graphs.hardware import DEVICES
from solver.device_and_costs import DeviceError, card_called, find_hardware
from solver.reporting import describe_costs


@pytest.mark.parametrize(
    ("torch_name", "capacity_gib", "name"),
    [
        ("Tesla T4", 15, "t4"),
        ("NVIDIA GeForce RTX 3090", 24, "rtx3090"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", 39.5, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA B200", 178, "b200"),
    ],
)
def test_what_drivers_call_their_cards(torch_name, capacity_gib, name):
    assert card_called(torch_name, capacity_bytes=int(capacity_gib * 2**30)) is DEVICES[name]


@pytest.mark.parametrize("torch_name", ["NVIDIA GeForce RTX 2080", "AMD Instinct MI300X", ""])
def test_a_card_that_nobody_listed_is_not_guessed(torch_name):
    assert card_called(torch_name, capacity_bytes=24 * 2**30) is None


def test_a_device_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(DeviceError, match=r"'z80'.*one of cpu, t4, .*, cuda"):
        find_hardware("z80")


def test_costs_are_told_in_words():
    assert describe_costs({"model": "roofline", "title": "generic CPU"}) == "roofline, generic CPU"
    assert describe_costs({"model": "measured", "device": "cpu", "n_fallbacks": 2}) == (
        "measured, cpu; 2 ops not measured, from the roofline"
    )
    assert describe_costs("by hand") == "by hand"
    assert describe_costs(None) == ""
