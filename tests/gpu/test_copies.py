"""Copies beside the computation: the same bits, the planned bytes, and streams of their own."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import scheduler_runtime
from benchmarks.gpu.bench import measure_step, optimizer_of, step_of
from benchmarks.same_bits import solution_of
from benchmarks.zoo import tiny
from graphs.trace import trace
from scheduler_runtime.verifying import differences
from solver.schedule import Link, Place, Places, baseline, keep, simulate
from tests.support.schedules_with_copies import copy_away, unused_gaps

PLACES = Places(host=Place(10**12, Link(2e10, 2e10, 1e-5)))


def with_copies(graph, schedule):
    """Whatever lies idle for long is on the host meanwhile."""
    chosen = [gap for gap in unused_gaps(graph, schedule) if gap.stop - gap.start > 6]
    copied = copy_away(graph, schedule, chosen)
    plain = solution_of(graph, schedule)
    return dataclasses.replace(
        plain,
        schedule=copied,
        simulation=simulate(graph, copied, places=PLACES),
        request=dataclasses.replace(plain.request, places=PLACES),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["all", "none"])
@pytest.mark.parametrize("name", ["gpt2 with dropout", "batch norm"])
def test_copies_keep_the_bits(device, name, kept, finding):
    """Several steps one right after the other, so that each meets the copies of the last."""
    model, batch = tiny(name, device).model_and_batch(device)
    graph = trace(model, batch)
    solution = with_copies(graph, baseline(graph) if kept == "all" else keep(graph, ()))
    plain = copy.deepcopy(model)
    scheduler_runtime.apply(model, solution)
    torch.use_deterministic_algorithms(True, warn_only=True)
    runs = []
    for each in (copy.deepcopy(plain), copy.deepcopy(plain), model):
        for seed in range(4):
            torch.manual_seed(seed)
            each(*batch).backward()
        runs.append(
            {name: p.grad for name, p in each.named_parameters()} | dict(each.named_buffers())
        )
    expected, second, planned = runs
    unsteady = differences(expected, second)
    assert differences(expected, planned).keys() <= unsteady.keys()
    finding(f"{solution.simulation.host_peak_bytes} bytes on the host")


@pytest.mark.slow
def test_what_is_away_takes_no_device_memory(device, finding):
    """Up to what the allocator rounds and libraries keep: 1 MB for each tensor of the step."""
    model, batch = tiny("gpt2 with dropout", device).model_and_batch(device)
    optimizer = optimizer_of(model)
    graph = trace(model, batch, optimizer=optimizer)
    solution = with_copies(graph, baseline(graph))
    scheduler_runtime.apply(model, solution)
    figures = measure_step(step_of(model, batch, optimizer), model, batch, optimizer, n_timed=2)
    finding(f"predicted {solution.simulation.peak_bytes}, {figures}")
    beside = (figures.other_bytes or 0) + len(graph.tensors) * 10**6
    assert figures.peak_bytes <= solution.simulation.peak_bytes + beside


@pytest.mark.slow
def test_a_copy_beside_a_product(cuda, finding):
    """The copy arrives whole; how far the two overlap is a finding."""
    from scheduler_runtime.execute.copy_streams import CudaCopyStreams

    factor = torch.randn(8192, 8192, device=cuda)
    source = torch.empty(2**28, dtype=torch.uint8, device=cuda)
    target = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    streams = CudaCopyStreams(cuda)

    def seconds(*, with_product: bool, with_copy: bool) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(cuda)
        start.record()
        if with_copy:
            streams.to_host(target, source, ())
        if with_product:
            for _ in range(4):
                factor @ factor
        streams.settle()
        end.record()
        torch.cuda.synchronize(cuda)
        return start.elapsed_time(end) / 1e3

    seconds(with_product=True, with_copy=True)
    product_s = seconds(with_product=True, with_copy=False)
    copy_s = seconds(with_product=False, with_copy=True)
    both_s = seconds(with_product=True, with_copy=True)
    finding(f"product {product_s:.4f} s, copy {copy_s:.4f} s, both {both_s:.4f} s")
    assert torch.equal(target, source.cpu())
