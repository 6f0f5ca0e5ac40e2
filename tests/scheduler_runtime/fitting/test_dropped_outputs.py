"""Plans of a training that drops outputs of the model before its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from graphs.costs import cpu_peak_bytes
from graphs.trace import trace
from graphs.training_step import with_dropped_outputs
from scheduler_runtime import fit
from scheduler_runtime.execute.run import Run
from scheduler_runtime.fitting import plans_of
from scheduler_runtime.fitting.held_outputs import watch_outputs

N_WORDS, WIDTH = 2000, 32


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(N_WORDS, WIDTH), nn.Linear(WIDTH, N_WORDS)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(2)
        )

    def logits(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class LanguageModel(Layers):
    """Nothing reads the logits in the backward pass."""

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.logits(words)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), words.flatten())}


class ReadsItsOutput(Layers):
    """The backward pass reads it, so the planned step holds it as well."""

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        shares = torch.softmax(self.logits(words), -1)
        return {"shares": shares, "loss": (shares * torch.log(shares + 1.0)).sum()}


Step = Callable[..., None]


def step_of(model: nn.Module, words: torch.Tensor) -> Step:
    """A step; `keep` of the output stays to its end."""

    def step(keep: Callable[[dict[str, Any]], Any] = lambda output: output["loss"]) -> None:
        output = model(words)
        loss, _kept = output["loss"], keep(output)
        del output
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def words_of(n: int = 128) -> torch.Tensor:
    return torch.randint(0, N_WORDS, (4, n))


def peak_bytes(model: nn.Module, words: torch.Tensor, **kept: Any) -> int:
    step = step_of(model, words)
    resident = sum(each.nbytes for each in (*model.parameters(), words))
    return resident + cpu_peak_bytes(lambda: step(**kept)).peak_bytes


def fitted(model: nn.Module, budget_bytes: int) -> nn.Module:
    return fit(model, budget=budget_bytes, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def metric(output: dict[str, Any]) -> Any:
    """Reads the logits before they are dropped: a temporary of their size."""
    with torch.no_grad():
        return output["logits"].softmax(-1).amax(-1).mean()


def everything(output: dict[str, Any]) -> Any:
    return output


def aliases(output: dict[str, Any]) -> Any:
    """Other tensors on the storages of the outputs."""
    return [each.detach() for each in output.values()]


@pytest.mark.slow
@pytest.mark.parametrize("build", [LanguageModel, ReadsItsOutput])
def test_what_the_planned_step_itself_holds_is_no_output_that_the_training_holds(
    build: type[nn.Module],
) -> None:
    model, words = build(), words_of()
    fitted(model, 10**9)
    seen: list[tuple[int, ...]] = []
    for keep in (lambda output: output["loss"], everything, aliases):
        output = model(words)
        watch_outputs(output, seen.append)
        loss, _kept = output["loss"], keep(output)
        del output
        loss.backward()
    assert seen == [(0,), (), ()]


def test_a_view_that_a_step_holds_holds_its_base_as_well() -> None:
    run = object.__new__(Run)
    view = torch.ones(4).view(2, 2)
    run.state = {fx.Graph().placeholder("x"): view}
    storage = view.untyped_storage()
    by_python = 1
    uses = torch._C._storage_Use_Count(storage._cdata)
    assert uses == by_python + len(run.tensors_on(storage))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.85])
def test_the_plan_has_room_for_a_metric_of_dropped_outputs(share: float) -> None:
    torch.manual_seed(0)
    model, words = LanguageModel(), words_of()
    resident = sum(each.nbytes for each in (*model.parameters(), words))
    eager_bytes = peak_bytes(model, words, keep=metric)
    budget_bytes = resident + int(share * (eager_bytes - resident))
    fitted(model, budget_bytes)
    schedules = []
    for _ in range(4):
        assert peak_bytes(model, words, keep=metric) <= budget_bytes
        schedules.append([plan.solution.schedule for plan in plans_of(model)])
    assert plans_of(model)[0].solution.overhead
    assert all(each == schedules[0] for each in schedules)
    assert len(schedules[0]) == 1
    assert plans_of(model)[0].solution.baseline.peak_bytes <= eager_bytes


@pytest.mark.slow
def test_a_plan_that_recomputes_nothing_stays() -> None:
    torch.manual_seed(0)
    model, words = LanguageModel(), words_of()
    fitted(model, 2 * peak_bytes(model, words))
    peak_bytes(model, words)
    (first,) = plans_of(model)
    peak_bytes(model, words)
    assert plans_of(model) == (first,)


def test_the_part_of_the_module_is_the_same() -> None:
    model, words = LanguageModel(), words_of()
    graph = trace(model, words, loss=lambda output, _batch: output["loss"])
    dropped = with_dropped_outputs(graph, graph.returned[:1])
    assert dropped.returned == graph.returned
    assert dropped.module_part().graph_id == graph.module_part().graph_id
    assert len(dropped.outputs) == len(graph.outputs) - 1
