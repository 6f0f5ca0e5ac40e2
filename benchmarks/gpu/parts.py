"""The parts of the GPU benchmark: the cases of each, and what a case measures.

A case has a name of words with slashes between them, such as "gpt2/ours/0.5". Results are stored
under it, so that a run can be continued.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import bits, operators, smoke
from benchmarks.gpu.bench import measure_step, optimizer_of, run_way, step_of
from benchmarks.gpu.ways import WAYS, WITH_BUDGET, Setting
from benchmarks.zoo import QUICK, TINY, Subject, subjects, with_fitting_layers
from solver.sizes_deadlines_progress import CUDA_RESERVE_BYTES

SHARES = (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)
QUICK_SHARES = (1.0, 0.7, 0.5, 0.3, 0.15)
BUDGET_SHARES = (0.8, 0.6, 0.4)
ALL_BUDGET_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
EXPANDABLE = "/expandable"
"""Suffix of cases whose process is started with expandable segments."""
CARDS_BYTES = {"16 GB": 16 * 10**9, "24 GB": 24 * 10**9, "80 GB": 80 * 10**9}


@dataclass(frozen=True)
class Settings:
    """How the parts are run.

    device: the device to measure.
    full: all models and shares, instead of the quick set.
    backend: of torch.compile.
    time_limit_s: of one search.
    """

    device: torch.device
    full: bool = False
    backend: str = "inductor"
    time_limit_s: float = 20.0

    @property
    def names(self) -> list[str]:
        known = subjects(self.device)
        return list(known) if self.full or self.device.type == "cpu" else list(QUICK)

    @property
    def capacity_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return 10**12

    @property
    def reserve_bytes(self) -> int:
        return CUDA_RESERVE_BYTES if self.device.type == "cuda" else 0

    def subject(self, name: str, *, card_bytes: int | None = None) -> Subject:
        """A model of the benchmark, with as many layers as suit a card of `card_bytes` (None: of
        the device's memory)."""
        return with_fitting_layers(subjects(self.device)[name], card_bytes or self.capacity_bytes)

    def run(self, way: str, subject: Subject, **options: Any) -> dict[str, Any]:
        """A row of `run_way`; by default, the budget is all of the device."""
        options = {"budget_bytes": self.capacity_bytes, "time_limit_s": self.time_limit_s} | options
        return run_way(way, subject, self.device, backend=self.backend, **options)


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    title: what the part shows.
    cases: settings -> names of the cases, in order.
    run: (case, settings, figures of the cases before it) -> figures of the case.
    columns: of its table, with a space between them.
    is_alone: no other case may run at the same time, because cases limit the memory of their
        process or time the host.
    """

    title: str
    cases: Callable[[Settings], list[str]]
    run: Callable[[str, Settings, Mapping[str, Any]], dict[str, Any]]
    columns: str
    is_alone: bool = False


# ---- all ways ----------------------------------------------------------------------------------


def _ways_cases(settings: Settings) -> list[str]:
    """Cases without a budget first: budgets are shares of what eager mode takes."""
    cases = []
    for name in settings.names:
        cases += [f"{name}/{way}" for way in WAYS if way not in WITH_BUDGET]
        shares = SHARES if settings.full else QUICK_SHARES
        cases += [f"{name}/{way}/{share}" for share in shares for way in WITH_BUDGET]
    return cases


def _run_ways_case(case: str, settings: Settings, earlier: Mapping[str, Any]) -> dict[str, Any]:
    name, way, *rest = case.split("/")
    share = float(rest[0]) if rest else None
    subject = settings.subject(name)
    budget_bytes = settings.capacity_bytes
    if share is not None:
        plain = earlier.get(f"{name}/eager") or settings.run("eager", subject)
        if plain["status"] != "ran":
            return {"status": "refused", "reason": "eager does not run: there is no peak to share"}
        budget_bytes = _share_bytes(plain, share)
    row = settings.run(way, subject, share=share, budget_bytes=budget_bytes)
    plain_s = earlier.get(f"{name}/eager", {}).get("time_s")
    if plain_s and row["status"] == "ran":
        row["measured_overhead"] = row["time_s"] / plain_s - 1.0
    return row


def _share_bytes(plain: Mapping[str, Any], share: float) -> int:
    """The budget for a share: resident bytes plus that share of what eager mode takes above them.

    plain: figures of the eager step.
    """
    resident: int = plain["resident_bytes"]
    return int(resident + share * (plain["peak_bytes"] - resident))


# ---- budgets are respected ---------------------------------------------------------------------


def _budget_cases(settings: Settings) -> list[str]:
    """On CUDA also with expandable segments, which fragment less than the default allocator."""
    allocators = ("", EXPANDABLE) if settings.device.type == "cuda" else ("",)
    shares = ALL_BUDGET_SHARES if settings.full else BUDGET_SHARES
    cases = itertools.product(settings.names, shares, allocators)
    return [f"{name}/{share}{allocator}" for name, share, allocator in cases]


def _run_budget_case(case: str, settings: Settings, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """On a card of the budget's size, the plain model must run out of memory and the planned one
    must not.

    On the CPU, where memory cannot be limited, the measured peaks are compared with the budget.
    """
    name, share_text, *_ = case.split("/")
    share = float(share_text)
    subject = settings.subject(name)
    plain = settings.run("eager", subject)
    if plain["status"] != "ran":
        return {"status": "refused", "reason": "eager does not run on this device"}
    step_bytes = _share_bytes(plain, share)
    card_bytes = step_bytes + settings.reserve_bytes
    card = {"budget_bytes": card_bytes, "card_bytes": card_bytes}
    row = settings.run("ours", subject, share=share, reserve_bytes=settings.reserve_bytes, **card)
    row["plain_peak_bytes"] = plain["peak_bytes"]
    row["kept"] = row["status"] == "ran"
    if settings.device.type == "cuda":
        row["plain_fails"] = settings.run("eager", subject, **card)["status"] == "out of memory"
    else:
        row["plain_fails"] = plain["peak_bytes"] > step_bytes
        row["kept"] = row["kept"] and row["peak_bytes"] <= step_bytes
    return row


# ---- largest batch -----------------------------------------------------------------------------


def _batch_cases(settings: Settings) -> list[str]:
    cards = list(CARDS_BYTES) if settings.full else ["24 GB"]
    if settings.device.type == "cpu":
        cards = ["4 MB"]
    return [f"{name}/{way}/{card}" for name in settings.names for card in cards for way in WAYS]


def _run_batch_case(case: str, settings: Settings, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Find the largest batch by doubling, then bisection to within an eighth.

    On CUDA a batch fits if it runs on a card of that size, on the CPU if its peak is at most that.
    """
    name, way, card = case.split("/")
    card_bytes = {**CARDS_BYTES, "4 MB": 4 * 10**6}[card]
    options = {
        "share": 0.3 if way == "compile, memory budget" else None,
        "budget_bytes": card_bytes,
        "card_bytes": card_bytes,
        "reserve_bytes": settings.reserve_bytes,
    }
    subject = settings.subject(name, card_bytes=card_bytes)
    largest, smallest_failing, best = 0, None, {}
    size = 1
    while smallest_failing is None or smallest_failing - largest > max(1, largest // 8):
        row = settings.run(way, subject, batch_size=size, **options)
        fits = settings.device.type == "cuda" or row.get("peak_bytes", 0) <= card_bytes
        if row["status"] == "ran" and fits:
            largest, best = size, row
        else:
            smallest_failing = size
            if not largest:
                return {**row, "batch_size": 0}
        size = 2 * size if smallest_failing is None else (largest + smallest_failing) // 2
        if smallest_failing is not None and size == largest:
            break
    return {**best, "batch_size": largest}


# ---- host overhead -----------------------------------------------------------------------------


def _run_host_case(case: str, settings: Settings, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds that the host takes to launch a step, and per operator.

    The plan has all of the device as its budget, so it runs the operators of eager mode.
    """
    name, way = case.split("/")
    subject = settings.subject(name)
    model, batch = subject.model_and_batch(settings.device)
    optimizer = optimizer_of(model)
    setting = Setting(None, settings.capacity_bytes, None, settings.time_limit_s)
    prepared = WAYS[way](model, batch, subject, setting)
    step = step_of(prepared.call, batch, optimizer)
    figures = measure_step(step, model, batch, optimizer)
    n_operators, host_s = operators.host_time(step, settings.device)
    prepared.undo()
    return {
        "status": "ran",
        "way": way,
        "n_operators": n_operators,
        "host_s": host_s,
        "host_s_per_operator": host_s / n_operators,
        "time_s": figures.time_s,
    }


PARTS: Mapping[str, Part] = {
    "smoke": Part(
        "Every path once, on tiny models",
        smoke.groups,
        lambda case, settings, _: smoke.run(case, settings.device, settings.backend),
        "n_held n_failed seconds status",
    ),
    "costs": Part(
        "What operators cost, measured beside the roofline",
        lambda settings: settings.names,
        lambda case, settings, _: operators.compare_with_roofline(
            settings.subject(case), settings.device
        ),
        "n_distinct n_fallbacks measured_s roofline_s ratio step_s",
    ),
    "budget": Part(
        "The budget is kept where the plain model fails",
        _budget_cases,
        _run_budget_case,
        "budget_bytes predicted_bytes peak_bytes peak_off reserved_bytes plain_fails kept status",
        is_alone=True,
    ),
    "bits": Part(
        "Training is bitwise identical to eager mode",
        lambda _: [f"{name}/{way}" for name in TINY for way in ("ours", "ours, compiled")],
        lambda case, settings, _: bits.compare(
            *case.split("/"), settings.device, backend="aot_eager"
        ),
        "n_again n_compared n_unsteady n_different status",
    ),
    "host": Part(
        "Host time per operator",
        lambda settings: [f"{name}/{way}" for name in settings.names for way in ("eager", "ours")],
        _run_host_case,
        "n_operators host_s_per_operator time_s",
        is_alone=True,
    ),
    "ways": Part(
        "All ways side by side",
        _ways_cases,
        _run_ways_case,
        "samples_per_s measured_overhead bound budget_bytes peak_bytes peak_off time_off status",
    ),
    "batch": Part(
        "The largest batch of each way",
        _batch_cases,
        _run_batch_case,
        "batch_size samples_per_s peak_bytes status",
        is_alone=True,
    ),
}
QUICK_PARTS = ("smoke", "costs", "budget", "bits", "host", "ways")
