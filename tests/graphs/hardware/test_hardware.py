"""Known devices: plausible rates, and lookup by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from graphs.hardware import DEVICES, Hardware, named

CARDS = [device for device in DEVICES.values() if device.kind == "cuda"]
MATRIX_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16")


def test_what_people_train_on_is_there() -> None:
    assert {"cpu", "t4", "rtx3090", "rtx4090", "a100-40gb", "a100-80gb"} <= set(DEVICES)
    assert {"h100", "h100-pcie", "gh200", "h200", "b200"} <= set(DEVICES)
    assert all(device.name == name for name, device in DEVICES.items())
    assert len({device.title for device in DEVICES.values()}) == len(DEVICES)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_figure_is_a_rate_that_a_device_can_have(device: Hardware) -> None:
    for dtype in MATRIX_DTYPES:
        assert 1e10 <= device.rate(dtype) <= 1e16
    assert 1e10 <= device.bytes_per_s <= 2e13
    copies = device.host_copies
    for rate in (copies.out_bytes_per_s, copies.in_bytes_per_s):
        assert 1e9 <= rate <= device.bytes_per_s / 2
    assert 0 <= copies.latency_s <= 1e-4
    assert copies.source
    assert device.kind in ("cpu", "cuda")
    assert device.source


@pytest.mark.parametrize("device", CARDS, ids=lambda device: device.name)
def test_a_card_is_no_slower_in_fewer_bits(device: Hardware) -> None:
    rate = device.rate
    assert rate("float64") <= rate("float32") <= rate("tfloat32") <= rate("float16")
    assert rate("float32") <= rate("bfloat16") <= rate("float16")


@pytest.mark.parametrize("device", CARDS, ids=lambda device: device.name)
def test_a_card_does_more_arithmetic_than_it_moves_numbers(device: Hardware) -> None:
    """From about ten to a few hundred operations per byte (most: 106 and 419 of an L40S), else a
    unit has slipped."""
    assert 5 <= device.rate("float32") / device.bytes_per_s <= 110
    assert 50 <= device.rate("float16") / device.bytes_per_s <= 420
    assert 1e-3 <= device.capacity_bytes / device.bytes_per_s <= 0.1  # seconds to read all of it


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("cpu", "t4"),
        ("t4", "rtx3090"),
        ("rtx3090", "rtx4090"),
        ("rtx4090", "a100-40gb"),
        ("a100-40gb", "a100-80gb"),
        ("a100-80gb", "h100-pcie"),
        ("h100-pcie", "h100"),
        ("h100", "h200"),
        ("h200", "b200"),
    ],
)
def test_later_cards_are_no_slower(slower: str, faster: str) -> None:
    one, other = DEVICES[slower], DEVICES[faster]
    assert one.rate("bfloat16") <= other.rate("bfloat16")
    assert one.host_copies.in_bytes_per_s <= other.host_copies.in_bytes_per_s
    assert (one.capacity_bytes or 0) <= (other.capacity_bytes or 0)
    if other.name != "h100-pcie":  # HBM2e, as the A100 before it has
        assert one.bytes_per_s < other.bytes_per_s


def test_makers_figures_to_the_digit() -> None:
    a100, h100 = DEVICES["a100-80gb"], DEVICES["h100"]
    assert (a100.rate("float32"), a100.rate("tfloat32")) == (19.5e12, 156e12)
    assert (a100.rate("bfloat16"), a100.bytes_per_s) == (312e12, 2039e9)
    assert (h100.rate("float32"), h100.bytes_per_s) == (67e12, 3350e9)
    assert h100.rate("float16") == 1979e12 / 2  # the datasheet's figure is for sparse matrices
    assert DEVICES["t4"].rate("bfloat16") == DEVICES["t4"].rate("float32")


def test_capacities_are_those_that_the_titles_name() -> None:
    for device in CARDS:
        assert f" {device.capacity_bytes // 10**9} GB" in device.title
        assert device.capacity_bytes % 10**9 == 0
    assert DEVICES["cpu"].capacity_bytes is None


def test_a_dtype_that_is_not_listed_runs_at_the_rate_of_float32() -> None:
    for device in DEVICES.values():
        assert device.rate("complex64") == device.rate("float32")
    assert DEVICES["cpu"].rate("tfloat32") == DEVICES["cpu"].rate("float32")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("H100-SXM", "h100"),
        ("h100 sxm", "h100"),
        ("H100 PCIe", "h100-pcie"),
        ("a100", "a100-80gb"),
        ("A100_40GB", "a100-40gb"),
        ("RTX 4090", "rtx4090"),
        ("rtx-3090", "rtx3090"),
        (" cpu ", "cpu"),
    ],
)
def test_names_however_they_are_written(name: str, expected: str) -> None:
    assert named(name) is DEVICES[expected]


@pytest.mark.parametrize("name", ["z80", "", "h10", "h100x", "nvidia"])
def test_unknown_names_are_answered_with_those_that_there_are(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"device is '.*'; one of cpu, t4, .*h200, b200, a100"
    ) as e:
        named(name)
    assert repr(name) in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops_per_s": {"float16": 1e12}}, "no float32"),
        ({"flops_per_s": {"float32": 0.0}}, "float32"),
        ({"flops_per_s": {"float32": float("nan")}}, "float32"),
        ({"bytes_per_s": -1.0}, "bytes_per_s"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
    ],
)
def test_illegal_hardware_figures_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DEVICES["t4"], **change)


def test_it_needs_no_torch() -> None:
    code = "import sys, graphs.hardware; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
