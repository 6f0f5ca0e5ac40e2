"""Check that training with a plan is bitwise identical, with dropout inside attention, too."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import scheduler_runtime
from benchmarks.same_bits import trained
from benchmarks.step_styles import STYLES, Training
from benchmarks.zoo import LOSS_INSIDE, tiny
from graphs.rewrites import Variants
from scheduler_runtime.verifying import differences
from solver import Solution, solve
from solver.schedule import baseline, simulate

TIME_LIMIT_S = 20.0
"""Of each search. It may be short: the bits must agree however good the plan is."""


def tight_plan(
    model: nn.Module, batch: tuple[torch.Tensor, ...], *, share: float = 0.75, **options: Any
) -> Solution:
    """A plan that has to recompute. Its budget is the resident bytes and a share of the
    activations, and less than any variant of the step takes without recomputation.

    share: tried first; then larger ones, if nothing fits.
    options: of `solve`.

    Raises ValueError if nothing fits.
    """
    options |= {"reserve": 0, "time_limit_s": TIME_LIMIT_S}
    unlimited = solve(model, batch, budget="1TB", **options)
    resident = unlimited.graph.resident_bytes
    variants = Variants.of(unlimited.variants or unlimited.graph).planned
    least_bytes = min(simulate(graph, baseline(graph)).peak_bytes for graph in variants)
    for tried_share in (share, 0.8, 0.9, 1.0):  # workspaces of operators may leave no room
        budget = resident + int(tried_share * (unlimited.baseline.peak_bytes - resident))
        solution = solve(model, batch, budget=min(budget, least_bytes - 1), **options)
        if solution.simulation is not None:
            return solution
    raise ValueError(f"nothing fits {least_bytes - 1} bytes of {unlimited.baseline.peak_bytes}")


def compare(name: str, way: str, device: torch.device, *, backend: str) -> dict[str, Any]:
    """Train three steps without a plan and with one, and count the tensors that differ.

    name: one of `benchmarks.zoo.TINY`.
    way: "ours" is compared with eager mode, "ours, compiled" with torch.compile.
    backend: of torch.compile.

    PyTorch is asked for deterministic algorithms. Fused attention on CUDA only uses one if PyTorch
    may raise an error for operators that have none, so that is tried first, and a warning only
    after such an error. Tensors that differ between two runs without a plan even so (n_unsteady)
    say nothing about the plan and are not counted.
    """
    try:
        return _compare_runs(name, way, device, backend=backend, warn_only=device.type != "cuda")
    except RuntimeError as error:
        if device.type != "cuda" or "deterministic" not in str(error):
            raise
    return _compare_runs(name, way, device, backend=backend, warn_only=True)


def _compare_runs(
    name: str, way: str, device: torch.device, *, backend: str, warn_only: bool
) -> dict[str, Any]:
    model, batch = tiny(name, device).model_and_batch(device)
    plain = copy.deepcopy(model)
    state = copy.deepcopy(model.state_dict())
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        if way == "ours":
            solution = tight_plan(model, batch, share=0.67)
            scheduler_runtime.apply(model, solution)
            assert solution.simulation is not None
            n_recomputed = solution.simulation.n_recomputed
        else:
            n_recomputed = _compile_both(model, plain, batch, backend=backend)
        runs = []
        for trainee in (plain, plain, model):  # the plain model twice: is it itself deterministic?
            trainee.load_state_dict(state)
            steps, _ = trained(Training(trainee, batch, LOSS_INSIDE), STYLES["plain"])
            runs.append(
                {f"step {i}: {name}": t for i, step in enumerate(steps) for name, t in step.items()}
            )
    finally:
        torch.use_deterministic_algorithms(False)
    expected, repeated, planned = runs
    unsteady = differences(expected, repeated)
    planned_differences = differences(expected, planned).items()
    texts = [words for name, words in planned_differences if name not in unsteady]
    return {
        "status": "ran",
        "n_again": n_recomputed,
        "n_compared": len(expected),
        "n_unsteady": len(unsteady),
        "n_different": len(texts),
        "different": texts[:8],
        "unsteady": list(unsteady.values())[:8],
        "all_deterministic": not warn_only,
    }


def _compile_both(
    model: nn.Module, plain: nn.Module, batch: tuple[torch.Tensor, ...], *, backend: str
) -> int:
    """Compile `plain` without a memory limit and `model` for a budget that forces recomputation;
    returns how many operators are recomputed."""
    options = {"reserve": 0, "backend": backend, "time_limit_s": TIME_LIMIT_S}
    scheduler_runtime.compile(plain, batch, budget="1TB", **options)
    (report,) = scheduler_runtime.compile_reports(plain)
    unlimited = report.chosen
    budget = (unlimited.measured_bytes or 0) - int(0.25 * unlimited.partition.saved_bytes)
    scheduler_runtime.compile(model, batch, budget=budget, **options)
    (report,) = scheduler_runtime.compile_reports(model)
    return report.chosen.partition.n_recomputed
