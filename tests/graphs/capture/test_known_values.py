"""Values that a module reads while traced: eager mode's branch, and guards for other calls."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from graphs.capture.as_eager import Leaf, Recipe, evaluate
from graphs.trace import TraceError, trace
from scheduler_runtime import PlanMismatchError, apply
from scheduler_runtime.measuring import measure
from scheduler_runtime.planned.program_cache import ProgramCache
from solver import solve
from solver.schedule.recompute import keep
from tests.support.bitwise import assert_equal, one_step, solution_of
from tests.support.tiny_transformers import tiny_llama

WIDTH = 16


class Looking(nn.Module):
    """Two layers around something that looks at the batch."""

    def __init__(self, middle: Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("n_steps", torch.tensor(0))
        self.middle = middle

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = self.middle(self, hidden, mask)
        return torch.tanh(self.second(hidden)).square().mean()


def all_or_some(_module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden if mask.all() else hidden.masked_fill(~mask[:, None], 0.0).cos()


def those_that_count(_module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[mask].sin()


def as_long_as_needed(_module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for _ in range(int(mask.sum())):
        hidden = torch.tanh(hidden * 1.5)
    return hidden


def scaled(_module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.tanh(hidden * mask.float().mean().item())


def counted(module: nn.Module, hidden: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
    module.n_steps.add_(1)
    return hidden.sin() if int(module.n_steps) % 2 else hidden.cos()


def written_in_parts(_module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As PyTorch Geometric does: the cumulative sum into a part of uninitialised memory."""
    ends = mask.new_empty(len(mask) + 1, dtype=torch.int64)
    ends.narrow(0, 0, 1).zero_()
    torch.cumsum(mask, 0, out=ends.narrow(0, 1, len(mask)))
    return hidden[ends[1:] > ends[0]][: int(ends[-1])].sin()


def partly_written(_module: nn.Module, hidden: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
    ends = torch.empty(3)
    ends[:1] = 0
    ends[2] = 1
    return hidden if ends.sum() > 0 else -hidden


def written_from_unknown(
    _module: nn.Module, hidden: torch.Tensor, _mask: torch.Tensor
) -> torch.Tensor:
    ends = torch.empty(3)
    ends[:1] = 0
    ends[1:] = hidden[0, :2].detach()
    return hidden if ends.sum() > 0 else -hidden


def batch_of(n_set: int, n_rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n_set)
    return torch.randn(n_rows, WIDTH, generator=generator), torch.arange(n_rows) < n_set


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    "middle",
    [all_or_some, those_that_count, as_long_as_needed, scaled, counted, written_in_parts],
)
def test_every_call_takes_the_branch_of_eager_mode(middle: Any) -> None:
    torch.manual_seed(0)
    model = Looking(middle)
    solution = solve(model, batch_of(8), budget="1MB")
    planned = apply(copy.deepcopy(model), solution, on_mismatch="replan")
    for n_set in (8, 3, 8, 5, 3):
        expected, got = one_step(model, batch_of(n_set), 0), one_step(planned, batch_of(n_set), 0)
        assert_equal(expected, got)


def test_calls_that_see_the_same_share_a_program() -> None:
    model = Looking(all_or_some)
    apply(model, solve(model, batch_of(8), budget="1MB"), on_mismatch="replan")
    for n_set in (8, 3, 5, 8, 4):
        model(*batch_of(n_set))
    assert len(model.forward._programs.programs) == 2


def looks_at_no_number(
    _module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The mean of nothing is NaN, in every call."""
    mean, (low, high) = mask[:0].float().mean().item(), mask.float().log().aminmax()
    return hidden.sin() if math.isnan(mean) and low.item() <= high.item() else hidden.cos()


def test_nan_seen_again_is_the_same() -> None:
    model = Looking(looks_at_no_number)
    apply(model, solve(model, batch_of(8), budget="1MB"), on_mismatch="replan")
    for _ in range(3):
        model(*batch_of(8))
    assert len(model.forward._programs.programs) == 1
    model(*batch_of(5))  # log(0) is another number
    assert len(model.forward._programs.programs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("from_file", [False, True])
def test_another_branch_is_planned_when_it_comes(
    from_file: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Looking(all_or_some)
    solution = solve(model, batch_of(8), budget="1MB")
    solution.save(tmp_path / "schedule.json")
    planned = apply(copy.deepcopy(model), tmp_path / "schedule.json" if from_file else solution)
    planned(*batch_of(8))
    assert "replanning" not in caplog.text
    for n_set in (7, 8, 5):
        expected, got = one_step(model, batch_of(n_set), 0), one_step(planned, batch_of(n_set), 0)
        assert_equal(expected, got)
    assert "argument mask has other values than when planned: forward reads False" in caplog.text
    assert len(planned.forward._programs.programs) == 2
    with pytest.raises(PlanMismatchError, match=r"argument x \(and 1 more\) has shape"):
        planned(*batch_of(6, 10))


class LookingAtLogits(Looking):
    """Returns logits, whose name in the traced graph is another one in the other branch."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        hidden = first if mask.all() else self.first(first.masked_fill(~mask[:, None], 0.0))
        return self.second(hidden)


@pytest.mark.slow
def test_another_branch_before_a_loss_outside_is_planned_from_a_file(tmp_path: Path) -> None:
    model, batch = LookingAtLogits(all_or_some), batch_of(8)

    def loss(output: torch.Tensor, _batch: Any) -> torch.Tensor:
        return output.square().log1p().mean()

    peak_bytes = solve(model, batch, budget="1MB", loss=loss).baseline.peak_bytes
    solution = solve(model, batch, budget=2 * peak_bytes, loss=loss)
    solution.save(tmp_path / "schedule.json")
    planned = apply(copy.deepcopy(model), tmp_path / "schedule.json")
    for n_set in (8, 3, 8):
        tensors = batch_of(n_set)
        model.zero_grad()
        planned.zero_grad()
        assert_equal(one_step(model, tensors, 0, loss), one_step(planned, tensors, 0, loss))
        assert measure(planned, tensors, loss=loss).peak_bytes <= 2 * peak_bytes


@pytest.mark.slow
def test_what_nobody_knew_when_planning_is_planned_when_it_comes() -> None:
    """transformers takes another branch for a padding mask without values."""
    model, batch = padded_llama(0)
    on_meta = {name: tensor.to("meta") for name, tensor in batch.items()}
    solution = solve(copy.deepcopy(model).to("meta"), on_meta, budget="10MB")
    planned = apply(copy.deepcopy(model), solution)
    assert_equal(one_step(model, batch, 0), one_step(planned, batch, 0))


@pytest.mark.parametrize(
    "look",
    [
        lambda module, hidden, _: hidden if hidden.sum() > 0 else -hidden,
        lambda module, hidden, _: hidden if module.second.weight.sum() > 0 else -hidden,
        lambda module, hidden, _: hidden if torch.rand(()).item() > 0.5 else -hidden,
        lambda module, hidden, _: hidden if torch.empty(()) > 0.5 else -hidden,
        lambda module, hidden, _: hidden[hidden > 0],
        partly_written,
        written_from_unknown,
    ],
)
def test_what_the_step_computes_may_not_be_looked_at(look: Any) -> None:
    with pytest.raises(TraceError, match=r"Looking cannot be traced \(.*test_known_values"):
        trace(Looking(look), batch_of(8))


def test_without_values_there_is_nothing_to_look_at() -> None:
    with pytest.raises(TraceError, match="cannot be traced"):
        trace(Looking(all_or_some).to("meta"), [t.to("meta") for t in batch_of(8)])


@pytest.mark.slow
def test_the_programs_of_a_module_are_bounded() -> None:
    programs = ProgramCache(n_kept=2)
    model = Looking(all_or_some)
    apply(model, solve(model, batch_of(8), budget="1MB"), on_mismatch="replan")
    model.forward._programs = programs
    for n_rows in (8, 6, 4, 8):
        model(*batch_of(n_rows, n_rows))
        assert len(programs.programs) <= 2


def padded_llama(n_padded: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = tiny_llama(n_layers=1)
    tokens = torch.randint(50, (3, 24))
    mask = torch.ones_like(tokens)
    mask[0, 24 - n_padded :] = 0
    return model, {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("n_padded", [0, 5])
def test_a_padding_mask_that_masks_nothing_leaves_the_fused_attention(n_padded: int) -> None:
    model, batch = padded_llama(n_padded)
    graph = trace(model, batch)
    masked = [node for node in graph.nodes if node.op == "aten.where.self"]
    assert bool(masked) == bool(n_padded)
    planned = apply(copy.deepcopy(model), solution_of(graph, keep(graph, set())))
    assert_equal(one_step(model, batch, 0), one_step(planned, batch, 0))


def test_a_selection_whose_size_is_known_has_a_gradient() -> None:
    """Of a boolean index the backward pass reads the same numbers."""
    model = Looking(those_that_count)
    graph = trace(model, batch_of(5))
    planned = apply(copy.deepcopy(model), solution_of(graph, keep(graph, set())))
    losses = [each(*batch_of(5)) for each in (model, planned)]
    for loss in losses:
        loss.backward()
    assert torch.equal(model.first.weight.grad, planned.first.weight.grad)
    assert not torch.equal(model.first.weight.grad, torch.zeros_like(model.first.weight))
    assert F.mse_loss(*losses) == 0


def mixed_up(_module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden + mask.float()[torch.randperm(len(hidden))].unsqueeze(1)


def picked(_module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = torch.randint(len(hidden), (5,))
    return hidden[rows] * mask.float()[rows].unsqueeze(1)


def ranked(_module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    order = mask.float().argsort(stable=True)
    return hidden[order] * mask.float()[order].unsqueeze(1)


def repeated(_module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    counts = 1 + mask.long()
    rows = torch.repeat_interleave(counts, output_size=13)
    return hidden[rows]


@pytest.mark.parametrize("middle", [mixed_up, picked, ranked, repeated])
def test_rows_selected_by_number_are_no_values_that_forward_reads(middle: Any) -> None:
    """The shape of the result is known. So rows may be drawn at random, as by mixup."""
    torch.manual_seed(0)
    model, batch = Looking(middle), batch_of(5)
    graph = trace(model, batch)
    assert graph.meta.environment["values_read"] == []
    planned = apply(copy.deepcopy(model), solution_of(graph, keep(graph, set())))
    for seed in range(3):
        assert_equal(one_step(model, batch, seed), one_step(planned, batch, seed))
    assert len(planned.forward._programs.programs) == 1


def test_a_number_that_the_step_computes_is_refused_in_the_users_words() -> None:
    model = Looking(lambda _module, hidden, _mask: hidden if hidden.sum() > 0 else -hidden)
    with pytest.raises(TraceError, match=r"line \d+\): forward reads values.*torch\.where"):
        trace(model, batch_of(8))


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(WIDTH, WIDTH), (2, WIDTH)),
        (nn.Linear(WIDTH, WIDTH, bias=False), (2, 3, WIDTH)),
        (nn.ConvTranspose1d(WIDTH, WIDTH, 1), (2, WIDTH, 3)),
        (nn.LayerNorm(WIDTH), (2, WIDTH)),
        (nn.BatchNorm1d(WIDTH), (2, WIDTH)),
        (nn.GroupNorm(2, WIDTH), (2, WIDTH)),
        (nn.GRUCell(WIDTH, WIDTH), (2, WIDTH)),
    ],
)
def test_dtypes_that_eager_mode_refuses_are_refused_while_tracing(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum()

    batch = torch.randn(shape, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        Net()(batch)
    with pytest.raises(TraceError, match=r"takes tensors of one dtype, and got float\d\d and"):
        trace(Net(), batch)
    trace(Net(), batch.float())


def test_norms_take_halves_with_float_weights_as_in_eager_mode() -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Flatten(0))
    half = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    assert trace(model, half, loss=lambda output, _: output.float().sum()).nodes


@pytest.mark.parametrize("is_there", [True, False])
def test_values_are_computed_on_the_device_of_the_tensors(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a card's generator is on the host, but what is drawn from it is on the card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    card, state, given = torch.device("cuda"), Leaf("random", "cuda"), Leaf("input", 0)
    tensors = {state: torch.get_rng_state(), given: torch.ones(2, device="meta")}

    def device_with(*leaves: Leaf) -> torch.device:
        arguments, spec = pytree.tree_flatten(((*leaves, card), {}))
        recipe = Recipe(
            lambda *args: args[-1], tuple(arguments), spec, None, leaves, frozenset(leaves)
        )
        return evaluate(recipe, tensors)

    assert device_with(state) == (card if is_there else torch.device("cpu"))
    assert device_with(state, given) == device_with(given) == torch.device("meta")
    assert device_with() == (card if is_there else torch.device("cpu"))
