"""What differs from the plan is noticed before anything runs, and told in words."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from scheduler_runtime import PlanMismatchError, apply, compile, remove
from solver import solve
from solver.schedule.recompute import keep
from tests.support.bitwise import assert_equal, one_step, solution_of, traced
from tests.support.models import Classifier, TiedLanguageModel


def planned(make: Any = Classifier) -> tuple[Any, Any]:
    model, batch, graph = traced(make)
    return apply(model, solution_of(graph, keep(graph, set()))), batch


def frozen(model: Classifier) -> None:
    model.layers[0].weight.requires_grad_(False)


def deeper(model: Classifier) -> None:
    model.layers.append(torch.nn.Linear(32, 32))


def shallower(model: Classifier) -> None:
    del model.layers[3]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            frozen,
            r"'layers.0.weight' is float32 \[32, 8\], frozen, planned for .* \[32, 8\], trained",
        ),
        (deeper, r"has 8 parameters, planned for 6: 'layers.5.weight' \(and 1 more\) is not"),
        (shallower, r"has 4 parameters, planned for 6: 'layers.3.weight' \(and 1 more\) is in"),
    ],
)
@pytest.mark.parametrize("after_a_step", [False, True])
def test_another_model_is_told_by_its_parameters(
    change: Any, words: str, after_a_step: bool
) -> None:
    model, batch = planned()
    if after_a_step:
        one_step(model, batch, 0, Classifier.loss)
    change(model)
    with pytest.raises(PlanMismatchError, match=words):
        model(*batch)


@pytest.mark.slow
def test_another_dtype_of_a_parameter_is_told() -> None:
    model, batch = planned()
    model.double()
    words = "argument x has dtype float64, planned for float32"
    with pytest.raises(PlanMismatchError, match=words):
        model(batch[0].double(), batch[1])
    language, tokens = planned(TiedLanguageModel)
    language.double()
    with pytest.raises(PlanMismatchError, match=r"is float64 \[.*planned for float32 \["):
        language(tokens)


@pytest.mark.slow
def test_a_planned_module_is_saved_loaded_moved_and_pickled(tmp_path: Path) -> None:
    plain, batch, graph = traced(TiedLanguageModel)
    model = apply(copy.deepcopy(plain), solution_of(graph, keep(graph, set())))
    expected = one_step(plain, batch, 0)
    fresh = apply(TiedLanguageModel(), solution_of(graph, keep(graph, set())))
    fresh.load_state_dict(model.state_dict())
    torch.save(model, tmp_path / "model.pt")
    others = [
        fresh,
        model.to(torch.device("cpu")),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ]
    for other in others:
        other.zero_grad()
        got = one_step(other, batch, 0)
        assert_equal(expected, got)


def test_inference_mode_runs_the_module_itself() -> None:
    model, batch = planned()
    with torch.inference_mode():
        torch.manual_seed(0)
        got = model(*batch)
        torch.manual_seed(0)
        assert torch.equal(got, type(model).forward(model, *batch))


@pytest.mark.slow
def test_a_backward_pass_under_autocast_is_refused() -> None:
    """Eager mode would compute other gradients there than after the block."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model, batch, graph = traced(TiedLanguageModel)
    apply(model, solution_of(graph, keep(graph, set())))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch)
        with pytest.raises(RuntimeError, match=r"loss\.backward\(\) after the"):
            loss.backward()


class Scaled(torch.nn.Module):
    """A layer, a buffer and a batch with names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(
        self,
        rows: torch.Tensor,
        targets: dict[str, torch.Tensor],
        *,
        weight: Any = None,
        rounded: bool = False,
    ) -> torch.Tensor:
        hidden = torch.tanh(self.layer(rows)) * (self.scale if weight is None else weight)
        hidden = hidden.round() if rounded else hidden
        return (hidden - targets["values"]).square().mean()


def scaled_batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.ones(4, 8), {"values": torch.zeros(4, 8)}


def planned_scaled() -> tuple[Scaled, torch.Tensor, dict[str, torch.Tensor]]:
    model, (rows, targets) = Scaled(), scaled_batch()
    return apply(model, solve(model, (rows, targets), budget="1MB")), rows, targets


def as_doubles(model: Scaled) -> None:
    model.scale = model.scale.double()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda m, x, y: m(torch.cat([x, x]), {"values": y["values"].repeat(2, 1)}),
            r"argument rows \(and 1 more\) has shape \[8, 8\], planned for \[4, 8\]",
        ),
        (
            lambda m, x, y: m(x, targets={"values": y["values"].double()}),
            r"argument targets\['values'\] has dtype float64, planned for float32",
        ),
        (lambda m, x, y: m(x, y, weight=x), "argument weight is a tensor in this call only"),
        (
            lambda m, x, y: m(x, y, rounded=True),
            "argument rounded is True, planned for its default",
        ),
        (
            lambda m, x, y: m(x[:1].expand(4, 8), y),
            r"argument rows is float32 \[4, 8\], expanded .*\.contiguous\(\)",
        ),
        (
            lambda m, x, y: m(x.clone().requires_grad_(), y),
            r"argument rows is float32 \[4, 8\], requires a gradient, planned for float32 \[4, 8\]",
        ),
        (lambda m, x, y: (as_doubles(m), m(x, y)), r"buffer 'scale' is float64 \[8\], planned"),
    ],
)
def test_what_is_wrong_with_a_call_has_its_name_in_the_code(call: Any, words: str) -> None:
    model, rows, targets = planned_scaled()
    with pytest.raises(PlanMismatchError, match=words) as raised:
        call(model, rows, targets)
    assert "primals" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda m, x, y: m(x[:, :4], y),
            RuntimeError,
            "argument rows has shape [4, 4], planned for [4, 8]",
        ),
        (
            lambda m, x, y: m("x", y),
            TypeError,
            "argument rows was a tensor when planned: this call passes targets['values'],",
        ),
    ],
)
def test_what_the_module_refuses_itself_is_its_own_error_with_a_note(
    call: Any, error: type[Exception], words: str
) -> None:
    model, rows, targets = planned_scaled()
    with pytest.raises(error) as raised:
        call(model, rows, targets)
    assert words in raised.value.__notes__[0]


class Switched(torch.nn.Module):
    """Chooses an operator by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.squares = torch.nn.Linear(8, 8), True

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weight = mask.square() if self.squares else mask.abs()
        return (self.layer(rows) * weight).sum()


def test_another_operator_is_told_with_the_arguments_that_it_is_computed_from() -> None:
    model, batch = Switched(), (torch.ones(4, 8), torch.ones(4, 8))
    apply(model, solve(model, batch, budget="1MB"))
    model.squares = False
    with pytest.raises(PlanMismatchError, match=r"operator abs.* computed from mask"):
        model(*batch)


def test_a_call_that_forward_does_not_take_is_pythons_own_error() -> None:
    model, rows, _ = planned_scaled()
    missing = r"Scaled\.forward\(.*missing a required argument: 'targets'"
    with pytest.raises(TypeError, match=missing):
        model(rows)


def test_swapped_and_wrong_arguments_of_apply_are_told() -> None:
    model = Scaled()
    solution = solve(model, scaled_batch(), budget="1MB")
    swapped = r"first and the Scaled second; write apply\(model, solution\)"
    with pytest.raises(TypeError, match=swapped):
        apply(solution, model)
    for wrong in (None, model, 3, [None]):
        with pytest.raises(TypeError, match=r"apply\(\) was given .* as the plan; pass what solve"):
            apply(model, wrong)
    with pytest.raises(TypeError, match=r"the model is .*Solution, .*: remove\(model\)"):
        remove(solution)
    apply(model, solution)
    with pytest.raises(ValueError, match=r"already has a plan, .* remove\(model\) first"):
        compile(model, scaled_batch(), budget="1GB", backend="aot_eager")


class ByItsBuffer(torch.nn.Module):
    """Computes with the shapes of a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.ones(3, 4))
        self.register_buffer("queue", torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.rows.shape[0] / self.queue.shape[0]
        return (x * self.rows.mean(0) * self.queue.sum(0) * scale).pow(2).mean()


def longer_queue(model: ByItsBuffer) -> None:
    model.queue = torch.ones(5, 4)


def more_rows(model: ByItsBuffer) -> None:
    model.rows = torch.nn.Parameter(torch.ones(6, 4))


@pytest.mark.parametrize("change", [longer_queue, more_rows])
def test_another_shape_of_what_the_module_holds_is_another_program(change: Any) -> None:
    plain, batch = ByItsBuffer(), torch.rand(5, 4)
    planned = copy.deepcopy(plain)
    apply(planned, solve(planned, batch, budget="1MB"), on_mismatch="replan")
    planned(batch).backward()
    for model in (plain, planned):
        change(model)
        model.zero_grad()
        model(batch).backward()
    assert torch.equal(plain.rows.grad, planned.rows.grad)


def test_forward_mode_runs_the_modules_own_forward() -> None:
    model, (x, label) = planned()
    plain = remove(copy.deepcopy(model))
    tangents = []
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for each in (plain, model):
            torch.manual_seed(0)
            tangents.append(forward_ad.unpack_dual(each(dual, label)).tangent)
    assert torch.equal(*tangents)
