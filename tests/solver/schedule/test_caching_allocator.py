"""The model of PyTorch's caching allocator: constants, documented behaviour, random traces."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from pathlib import Path

import pytest

from benchmarks.allocator.traces import outcomes
from solver.schedule import caching_allocator
from solver.schedule.caching_allocator import (
    ALLOCATION_BYTES,
    MIB,
    Block,
    CachingAllocator,
    DeviceFullError,
    ExpandableAllocator,
)
from tests.support.paths import DATA

KINDS = [CachingAllocator, ExpandableAllocator]
RECORDED = json.loads((DATA / "allocator.json").read_text())
"""Played through the allocator of torch 2.13.0 by `python -m benchmarks.allocator`."""


def test_the_constants_are_those_of_the_installed_pytorch():
    spec = importlib.util.find_spec("torch")
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "include/c10/core/AllocatorConfig.h").read_text()
    found = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", text))
    assert int(found["kMinBlockSize"]) == caching_allocator.ALLOCATION_BYTES
    assert int(found["kSmallSize"]) == caching_allocator.SMALL_BYTES
    assert int(found["kSmallBuffer"]) == caching_allocator.SMALL_SEGMENT_BYTES
    assert int(found["kMinLargeAlloc"]) == caching_allocator.OWN_SEGMENT_BYTES
    assert int(found["kRoundLarge"]) == caching_allocator.SEGMENT_STEP_BYTES


@pytest.mark.parametrize("each", RECORDED)
def test_every_byte_is_that_of_pytorchs_own_allocator(each):
    found = outcomes(
        each["trace"], expandable=each["expandable"], capacity_bytes=each["capacity_bytes"]
    )
    assert found == each["outcomes"]


def test_what_was_recorded_is_not_trivial():
    """Both settings, several streams, full devices, memory given back to them."""
    assert {each["expandable"] for each in RECORDED} == {False, True}
    assert {each["n_streams"] for each in RECORDED} == {1, 3}
    limited = [each["outcomes"] for each in RECORDED if each["capacity_bytes"]]
    assert all(len(outcomes) > 100 for outcomes in limited)
    assert any(failed for outcomes in limited for *_, failed in outcomes)
    assert any(n_returns for outcomes in limited for *_, n_returns, _ in outcomes)


@pytest.mark.parametrize(
    ("size_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (12 * MIB + MIB // 2, 12 * MIB + MIB // 2, 14 * MIB),  # 1.5 MiB are split off
        (13 * MIB, 14 * MIB, 14 * MIB),  # 1 MiB is not
    ],
)
def test_one_request(size_bytes: int, allocated_bytes: int, reserved_bytes: int):
    allocator = CachingAllocator()
    allocator.allocate(size_bytes)
    assert allocator.allocated_bytes == allocated_bytes
    assert allocator.reserved_bytes == reserved_bytes


@pytest.mark.parametrize(
    ("size_bytes", "reserved_bytes"),
    [(1, 2 * MIB), (MIB + 1, 20 * MIB), (13 * MIB, 20 * MIB), (30 * MIB, 40 * MIB)],
)
def test_one_request_with_expandable_segments(size_bytes: int, reserved_bytes: int):
    allocator = ExpandableAllocator()
    allocator.allocate(size_bytes)
    assert allocator.allocated_bytes == max(512, size_bytes + -size_bytes % 512)
    assert allocator.reserved_bytes == reserved_bytes


def test_the_smallest_free_block_is_taken_and_freed_neighbours_are_one():
    allocator = CachingAllocator()
    big, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.free(big)
    allocator.free(small)
    first = allocator.allocate(30 * MIB)
    assert first.address == small.address
    halves = [allocator.allocate(32 * MIB) for _ in range(2)]  # of the one of 64
    assert allocator.reserved_bytes == 96 * MIB
    for block in halves:
        allocator.free(block)
    allocator.allocate(64 * MIB)
    assert allocator.reserved_bytes == 96 * MIB


def test_growing_requests_lose_segments_and_expandable_segments_do_not():
    """The case that PyTorch's documentation gives for expandable segments: the batch size changes
    a little from step to step."""
    taken = []
    for kind in KINDS:
        allocator = kind()
        for n in range(100, 110):
            for block in [allocator.allocate(n * 3 * MIB) for _ in range(4)]:
                allocator.free(block)
        taken.append(allocator.reserved_bytes)
        assert allocator.max_allocated_bytes == pytest.approx(4 * 327 * MIB, rel=0.01)
    default, expandable = taken
    assert default > 10 * 4 * 300 * MIB  # each size took new segments
    assert expandable < 4 * 327 * MIB + 20 * MIB


def test_a_full_device_gets_free_segments_back_before_memory_runs_out():
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    first, second = allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)
    with pytest.raises(DeviceFullError, match="83886080 of 104857600 are reserved"):
        allocator.allocate(40 * MIB)
    allocator.free(first)
    allocator.allocate(60 * MIB)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(second)
    allocator.allocate(20 * MIB)  # leaves the rest of that segment, which cannot be given back
    with pytest.raises(DeviceFullError):
        allocator.allocate(30 * MIB)


def test_a_full_device_gets_the_free_pages_of_expandable_segments():
    allocator = ExpandableAllocator(capacity_bytes=100 * MIB)
    blocks = [allocator.allocate(20 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(60 * MIB)  # no 60 side by side: pages move to the end
    assert allocator.reserved_bytes == 100 * MIB
    assert allocator.allocated_bytes == 100 * MIB


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity_bytes", [float("inf"), 400 * MIB])
def test_random_traces(kind: type[CachingAllocator], capacity_bytes: float):
    n_full = 0
    for seed in range(30):
        rng = random.Random(seed)
        allocator = kind(capacity_bytes=capacity_bytes)
        held: list[Block] = []
        for _ in range(300):
            if held and rng.random() < 0.45:
                allocator.free(held.pop(rng.randrange(len(held))))
            else:
                size_bytes = int(10 ** rng.uniform(1, 8))
                try:
                    held.append(allocator.allocate(size_bytes))
                    assert held[-1].size_bytes >= size_bytes
                except DeviceFullError:
                    n_full += 1
            check(allocator, held)
        for block in held:
            allocator.free(block)
        allocator._return_free_memory()
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
    assert (n_full > 0) == (capacity_bytes < float("inf"))


def check(allocator: CachingAllocator, held: list[Block]) -> None:
    """Blocks lie side by side without overlap, nothing free stands beside something free, and what
    is in use, free and reserved adds up."""
    pools = list(allocator.pools.values())
    free = [block for pool in pools for block in pool.free]
    unmapped = [block for pool in pools for block in pool.unmapped_blocks]
    assert sum(block.size_bytes for block in held) == allocator.allocated_bytes
    assert sum(b.size_bytes for b in [*held, *free]) == allocator.reserved_bytes
    assert allocator.reserved_bytes <= allocator.max_reserved_bytes
    assert allocator.max_reserved_bytes <= allocator.capacity_bytes
    for block in [*held, *free, *unmapped]:
        assert block.is_free == (block not in held)
        after = block.after
        if after is not None:
            assert after.before is block
            assert after.address == block.stop
            assert not (block.is_free and after.is_free and block.mapped == after.mapped)
    if isinstance(allocator, ExpandableAllocator):
        for pool in pools:
            assert all(block.address % pool.page_bytes == 0 for block in pool.unmapped_blocks)
    assert all(block.size_bytes % ALLOCATION_BYTES == 0 for block in [*held, *free])
