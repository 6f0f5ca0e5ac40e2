"""The whole way: `solve -o` in one process, `apply` and three steps in another, `--verify`.

Every example and every model of the zoo, within a budget below what the plain step takes. Language
models get the padding mask that data loaders bring: of ones, which is planned, and a padded one,
for which they run other operators.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zoo import ZOO, Entry
from graphs.model_calls import as_call, find_loss
from scheduler_runtime import apply
from scheduler_runtime.measuring import measure
from scheduler_runtime.verifying import differences
from tests.support.example_models import SIZES, small
from tests.support.planner_process import PlannerProcess

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
SHARE = 0.85
"""The budget: resident, and this much of what the baseline's peak has above it; or, where nothing
fits that, the least for which a plan is found."""
MODEL_FILE = """
    from tests.whole.test_way import entry_of, with_mask

    ENTRY = entry_of({name!r})

    def get_model():
        return ENTRY.model_and_batch()[0]

    def get_batch():
        return with_mask(ENTRY.model_and_batch()[1])
"""
LOSS = """
    def get_inputs(batch):
        return batch if ENTRY.inputs is None else ENTRY.inputs(batch)

    def get_loss(output, batch):
        return ENTRY.loss(output, batch)
"""
NAMES = ["BERT", *SIZES, *(n for n, entry in ZOO.items() if not entry.large and n != "BERT")]


def entry_of(name: str) -> Entry:
    return Entry(lambda: small(name)) if name in SIZES else ZOO[name]


def with_mask(batch: Any) -> Any:
    """The batch of a language model with a mask of ones, as data loaders make it."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return batch
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def padded(batch: Any) -> Any:
    """The batch with one sequence shorter than the others; other batches as they are."""
    if not isinstance(batch, Mapping) or "attention_mask" not in batch:
        return batch
    mask = batch["attention_mask"].clone()
    mask[0, mask.shape[1] // 2 :] = 0
    return {**batch, "attention_mask": mask}


@pytest.fixture(scope="module")
def planner() -> Iterator[PlannerProcess]:
    """One thread here and there: steps this small take several times as long on two."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    process = PlannerProcess()
    yield process
    process.end()
    torch.set_num_threads(n_threads)


def train(model: nn.Module, batches: list[Any], entry: Entry) -> dict[str, torch.Tensor]:
    """Three optimizer steps: every loss, the last gradients, what they leave."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = {}
    for index, batch in enumerate(batches):
        torch.manual_seed(index)
        optimizer.zero_grad()
        args, kwargs = as_call(batch, entry.inputs)
        output = model(*args, **kwargs)
        loss = find_loss(output) if entry.loss is None else entry.loss(output, batch)
        loss.backward()
        optimizer.step()
        seen[f"loss {index}"] = loss.detach()
    seen |= {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return seen | model.state_dict() | {"random state": torch.get_rng_state()}


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_way(name: str, planner: PlannerProcess, tmp_path: Path) -> None:
    entry = entry_of(name)
    text = MODEL_FILE.format(name=name) + (LOSS if entry.loss is not None else "")
    path, schedule = tmp_path / "model.py", tmp_path / "schedule.json"
    path.write_text(textwrap.dedent(text))
    plain, batch = entry.model_and_batch()
    # the workspace of convolutions is only known where it is measured
    convolves = any(isinstance(module, CONVOLUTIONS) for module in plain.modules())
    costs = "measured" if convolves else "roofline"
    options = ["--device", "cpu", "--costs", costs, str(path)]
    baseline = planner.solve("--budget", "1TB", *options)["baseline"]
    memory_bytes = baseline["memory_bytes"]
    resident_bytes = sum(memory_bytes[kind] for kind in ("parameters", "optimizer", "batch"))
    budget_bytes = int(resident_bytes + SHARE * (baseline["peak_bytes"] - resident_bytes))
    options += ["-o", str(schedule), "--verify"]
    answer = planner.solve("--budget", f"{budget_bytes}B", *options)
    if answer["infeasible"]:
        budget_bytes = answer["infeasible"]["least_budget_bytes"]
        answer = planner.solve("--budget", f"{budget_bytes}B", *options)
    assert answer["exit_code"] == 0, answer["verification"]
    assert answer["verification"]["passed"]

    ones = with_mask(batch)
    planned = apply(copy.deepcopy(plain), schedule)
    batches = [ones, padded(ones), ones]
    assert differences(train(plain, batches, entry), train(planned, batches, entry)) == {}
    if entry.loss is None:  # --verify has measured the step with ones
        optimizer = torch.optim.AdamW(planned.parameters())
        taken = measure(planned, batches[1], optimizer=optimizer, n_steps=1)
        assert taken.peak_bytes <= budget_bytes
