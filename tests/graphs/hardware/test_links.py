"""Links between devices: plausible figures, and the times of collectives against a ring by hand."""

from __future__ import annotations

import dataclasses

import pytest

from graphs.hardware import (
    DEVICES,
    LINKS,
    Link,
    all_gather_s,
    all_reduce_s,
    link_between,
    link_named,
    reduce_scatter_s,
)

SIMPLE = Link("simple", "a link", bytes_per_s=1e9, call_s=1e-3, step_s=1e-4, source="made up")


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_every_figure_is_one_that_a_link_can_have(link: Link) -> None:
    assert 1e9 <= link.bytes_per_s <= 1e12
    assert 1e-6 <= link.call_s <= 1e-3
    assert 0 < link.step_s <= link.call_s * 2
    assert link.source


def test_links_of_one_machine_are_slower_than_their_devices_memory() -> None:
    for device in DEVICES.values():
        assert link_between(device).bytes_per_s < device.bytes_per_s / 2


def test_names_are_found_whatever_their_spelling() -> None:
    assert link_named("NVLink 4") is LINKS["nvlink4"]
    assert link_named("IB_NDR") is LINKS["ib-ndr"]
    with pytest.raises(ValueError, match=r"the link is 'nvlink9'; one of nvlink2, "):
        link_named("nvlink9")


def ring_s(n_bytes: int, n_ranks: int, *, reduces: bool, gathers: bool) -> float:
    """Messages of a ring, one after the other: in each step every rank passes on one part."""
    part_s = SIMPLE.step_s + n_bytes / n_ranks / SIMPLE.bytes_per_s
    holds = {(rank, rank) for rank in range(n_ranks)}  # rank has part
    elapsed_s = SIMPLE.call_s
    for _ in range(reduces + gathers):
        have = set(holds)
        while len(have) < n_ranks * n_ranks:
            have |= {((rank + 1) % n_ranks, part) for rank, part in have}
            elapsed_s += part_s
    return elapsed_s


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_times_are_those_of_a_ring(n_ranks: int) -> None:
    n_bytes, where = 24_000_000, {"n_ranks": n_ranks, "link": SIMPLE}
    once = pytest.approx(ring_s(n_bytes, n_ranks, reduces=False, gathers=True))
    assert all_gather_s(n_bytes, **where) == once
    assert reduce_scatter_s(n_bytes, **where) == once
    both = pytest.approx(ring_s(n_bytes, n_ranks, reduces=True, gathers=True))
    assert all_reduce_s(n_bytes, **where) == both


def test_one_rank_sends_nothing() -> None:
    assert all_reduce_s(10**9, n_ranks=1, link=SIMPLE) == 0.0
    with pytest.raises(ValueError, match="n_ranks is 0"):
        all_gather_s(10**9, n_ranks=0, link=SIMPLE)


def test_an_h100_reduces_what_a_layer_of_llama_sends_in_a_tenth_of_a_millisecond_or_two() -> None:
    """4096 tokens of 4096 bfloat16 numbers on eight cards: 33.5 MB, at 371 GB/s on the bus."""
    seconds = all_reduce_s(4096 * 4096 * 2, n_ranks=8, link=LINKS["nvlink4"])
    assert 1.5e-4 < seconds < 3e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"bytes_per_s": 0}, "above 0"), ({"call_s": -1.0}, "call_s"), ({"step_s": -1.0}, "step_s")],
)
def test_figures_that_no_link_has_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SIMPLE, **changes)
