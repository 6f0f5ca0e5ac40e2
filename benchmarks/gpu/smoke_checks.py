"""Checks of whole steps: traced, planned, applied, recorded, compiled, fitted."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import scheduler_runtime
from benchmarks.gpu import bits
from benchmarks.gpu.bench import emptied, measured, optimizer_of, step_of
from benchmarks.gpu.operators import hardware_of
from benchmarks.gpu.smoke_device import Bench, must
from graphs.costs import CostCache, Measured, Roofline
from graphs.trace import trace
from scheduler_runtime.by_submodule import plan_chain
from scheduler_runtime.verifying import verify
from solver import solve
from solver.schedule import Solution

_TOLD = ("attention", "norm", "dropout", "convolution", "rnn")


def made(name: str, bench: Bench) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, batch = bits.SUBJECTS[name](bench.device)
    return model.to(bench.device).train(), tuple(t.to(bench.device) for t in batch)


def tight(
    model: nn.Module, batch: tuple[torch.Tensor, ...], *, share: float = 0.75, **options: Any
) -> Solution:
    """A plan that has to run something again."""
    free = solve(model, batch, budget="1TB", reserve=0, time_limit_s=5.0, **options)
    resident = free.graph.resident_bytes
    budget = resident + int(share * (free.baseline.peak_bytes - resident))
    found = solve(model, batch, budget=budget, reserve=0, time_limit_s=5.0, **options)
    if found.simulation is None:
        raise ValueError(f"nothing fits {budget} bytes of {free.baseline.peak_bytes}")
    return found


# ---- plans -------------------------------------------------------------------------------------


def traced_operators_are_those_of_eager_mode(bench: Bench) -> str:
    """Of attention, norms, dropout and convolutions: the same kernels, as often."""
    words = []
    for name in bits.SUBJECTS:
        model, batch = made(name, bench)
        seen = _Counted()
        with seen:
            model(*batch).backward()
        graph = trace(model, batch, costs=Roofline(hardware_of(bench.device)))
        planned: dict[str, int] = {}
        for node in graph.nodes:
            kind = _kind(node.op)
            planned[kind] = planned.get(kind, 0) + 1
        told = {k: n for k, n in seen.counts.items() if any(word in k for word in _TOLD)}
        other = {k: (n, planned.get(k, 0)) for k, n in told.items() if planned.get(k, 0) != n}
        must(not other, f"{name}: eager and planned runs of {other}, planned {planned}")
        words.append(f"{name}: {', '.join(sorted(told)) or 'none of these'}")
    return "; ".join(words)


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(str(func))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def _kind(operator: str) -> str:
    """One name for the forms that an operator has in eager mode and in a functional graph."""
    name = operator.removeprefix("aten.").split(".")[0]
    if "batch_norm" in name:
        return "batch_norm_backward" if "backward" in name else "batch_norm"
    return {"dropout_noise": "dropout", "native_dropout": "dropout"}.get(name, name)


def bits_with_dropout_in_attention(bench: Bench) -> str:
    return _same_bits("attention with dropout", "ours", bench)


def bits_in_float32(bench: Bench) -> str:
    return _same_bits("attention in float32", "ours", bench)


def bits_with_dropout(bench: Bench) -> str:
    return _same_bits("gpt2 with dropout", "ours", bench)


def bits_with_batch_norm(bench: Bench) -> str:
    return _same_bits("batch norm", "ours", bench)


def _same_bits(name: str, way: str, bench: Bench) -> str:
    row = bits.compare(name, way, bench.device, backend="aot_eager")
    must(row["n_different"] == 0, f"{row['n_different']} differ: {row}")
    must(row["n_again"] > 0, "the plan runs nothing again")
    return ", ".join(f"{key} {row[key]}" for key in row if key.startswith(("n_", "all_")))


def autocast_bits(bench: Bench) -> str:
    """bfloat16 by autocast, of a tied weight: cast once, as eager mode does."""
    model, batch = made("gpt2 with dropout", bench)
    twin = copy.deepcopy(model)
    gradients = []
    torch.use_deterministic_algorithms(bench.on_cuda)
    try:
        for each in (twin, model):
            with torch.autocast(bench.device.type, dtype=torch.bfloat16):
                if each is model:
                    scheduler_runtime.apply(model, tight(model, batch))
                torch.manual_seed(7)
                loss = each(*batch)
            loss.backward()
            gradients.append({name: p.grad for name, p in each.named_parameters()})
    finally:
        torch.use_deterministic_algorithms(False)
    one, other = gradients
    different = [name for name in one if not torch.equal(one[name], other[name])]
    must(not different, f"{len(different)} of {len(one)} gradients differ: {different[:4]}")
    return f"{len(one)} gradients"


PLAN: tuple[Callable[[Bench], str], ...] = (
    traced_operators_are_those_of_eager_mode,
    bits_with_dropout_in_attention,
    bits_in_float32,
    bits_with_dropout,
    bits_with_batch_norm,
    autocast_bits,
)


# ---- memory ------------------------------------------------------------------------------------


def predicted_and_measured_peaks(bench: Bench) -> str:
    """Told, and held to what the allocator rounds and libraries keep: 1 MB a tensor of the step."""
    words = []
    for name in ("gpt2 with dropout", "batch norm"):
        model, batch = made(name, bench)
        optimizer = optimizer_of(model)
        solution = tight(model, batch, optimizer=optimizer)
        scheduler_runtime.apply(model, solution)
        assert solution.simulation is not None
        predicted = solution.simulation.peak_bytes
        figures = measured(step_of(model, batch, optimizer), model, batch, optimizer, n_timed=2)
        beside = (figures.other_bytes or 0) + len(solution.graph.tensors) * 10**6
        words.append(
            f"{name}: predicted {predicted}, measured {figures.peak_bytes} (requested "
            f"{figures.requested_bytes}, beside {figures.other_bytes}, reserved "
            f"{figures.reserved_bytes}, context {figures.context_bytes})"
        )
        must(figures.peak_bytes <= predicted + beside, words[-1])
        scheduler_runtime.remove(model)
        del model, batch, optimizer, solution, figures
        emptied(bench.device)
    return "; ".join(words)


def optimizers_take_what_is_predicted(bench: Bench) -> str:
    words = []
    for kind, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ):
        model, batch = made("gpt2 with dropout", bench)
        optimizer = kind(model.parameters(), lr=1e-5, **options)
        graph = trace(model, batch, optimizer=optimizer, costs=Roofline(hardware_of(bench.device)))
        predicted = graph.meta.environment["optimizer"]
        model(*batch).backward()
        optimizer.step()
        state = sum(
            item.numel() * item.element_size()
            for each in optimizer.state.values()
            for item in each.values()
            if isinstance(item, torch.Tensor) and item.device.type == bench.device.type
        )
        words.append(f"{kind.__name__} {options}: state {predicted['state_bytes']}, real {state}")
        must(predicted["state_bytes"] == state, words[-1])
        if bench.on_cuda:
            emptied(bench.device)
            before = torch.cuda.memory_allocated(bench.device)
            torch.cuda.reset_peak_memory_stats(bench.device)
            optimizer.step()
            taken = torch.cuda.max_memory_allocated(bench.device) - before
            words[-1] += f", step {predicted['workspace_bytes']}, real {taken}"
    return "; ".join(words)


def verified_on_the_device(bench: Bench) -> str:
    model, batch = made("batch norm", bench)
    found = verify(
        tight(model, batch, optimizer=optimizer_of(model)),
        model=lambda: bits.SUBJECTS["batch norm"](bench.device)[0],
        batch=lambda: bits.SUBJECTS["batch norm"](bench.device)[1],
        loss=None,
        inputs=None,
        optimizer=optimizer_of,
        device=bench.device.type,
        autocast=None,
    )
    must(not found.differences, f"{len(found.differences)} differ: {found.differences[:3]}")
    return (
        f"peak {found.measured_peak_bytes}, predicted {found.predicted_peak_bytes}; not the same "
        f"from run to run without a plan: {len(found.unsteady)}"
    )


def costs_are_kept_on_disk(bench: Bench) -> str:
    model, batch = made("gpt2 with dropout", bench)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        costs = Measured(bench.device, cache=CostCache(path, bench.device))
        trace(model, batch, costs=costs)
        costs.save()
        n_kept = len(CostCache(path, bench.device))
    described = costs.description
    must(described["n_fallbacks"] == 0, f"{described['n_fallbacks']} were not measured")
    return f"{n_kept} kept, {described['n_distinct']} measured on {described['title']}"


MEMORY: tuple[Callable[[Bench], str], ...] = (
    predicted_and_measured_peaks,
    optimizers_take_what_is_predicted,
    verified_on_the_device,
    costs_are_kept_on_disk,
)


# ---- compiled, fitted --------------------------------------------------------------------------


def compiled_operator_by_operator(bench: Bench) -> str:
    return _compiled(bench, "aot_eager")


def compiled_by_the_chosen_backend(bench: Bench) -> str:
    return _compiled(bench, bench.backend)


def compiled_bits(bench: Bench) -> str:
    return _same_bits("attention with dropout", "ours, compiled", bench)


def _compiled(bench: Bench, backend: str) -> str:
    torch._dynamo.reset()
    model, batch = made("gpt2 with dropout", bench)
    options = {"reserve": 0, "backend": backend, "time_limit_s": 5.0}
    scheduler_runtime.compile(model, batch, budget="100GB", **options)
    (report,) = scheduler_runtime.compile_reports(model)
    budget = (report.chosen.measured_bytes or 0) - int(0.2 * report.chosen.partition.saved_bytes)
    scheduler_runtime.uncompile(model)
    scheduler_runtime.compile(model, batch, budget=budget, max_attempts=3, **options)
    (report,) = scheduler_runtime.compile_reports(model)
    model(*batch).backward()
    must((report.chosen.measured_bytes or 2**60) <= budget, f"over {budget}: {report}")
    return str(report).replace("\n", ";")


COMPILED: tuple[Callable[[Bench], str], ...] = (
    compiled_operator_by_operator,
    compiled_by_the_chosen_backend,
    compiled_bits,
)


def fitted_with_what_is_free(bench: Bench) -> str:
    model, batch = made("gpt2 with dropout", bench)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    budget = "auto" if bench.on_cuda else "1GB"
    scheduler_runtime.fit(model, budget=budget, optimizer=optimizer, time_limit_s=5.0)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        model(*batch).backward()
        optimizer.step()
    (plan,) = scheduler_runtime.plans_of(model)
    return str(plan).replace("\n", "; ")


def fitted_to_what_is_tight(bench: Bench) -> str:
    model, batch = made("batch norm", bench)
    budget = tight(model, batch).request.budget_bytes
    with warnings.catch_warnings(action="ignore"):
        scheduler_runtime.fit(model, budget=budget, reserve=0, time_limit_s=5.0)
        model(*batch).backward()
    (plan,) = scheduler_runtime.plans_of(model)
    return repr(plan.solution)


def planned_by_submodules(bench: Bench) -> str:
    model, batch = made("gpt2 with dropout", bench)
    found = plan_chain(model, batch, budget="100GB")
    held = found.baseline.peak_bytes - found.graph.resident_bytes
    must(held > 0, "no memory was seen")
    words = f"{len(found.blocks)} submodules, baseline {found.baseline.peak_bytes}"
    if bench.on_cuda:
        for parameter in model.parameters():
            parameter.grad = None
        emptied(bench.device)
        torch.cuda.reset_peak_memory_stats(bench.device)
        model(*batch).backward()
        words += f", measured {torch.cuda.max_memory_allocated(bench.device)}"
    return words


FIT: tuple[Callable[[Bench], str], ...] = (
    fitted_with_what_is_free,
    fitted_to_what_is_tight,
    planned_by_submodules,
)
