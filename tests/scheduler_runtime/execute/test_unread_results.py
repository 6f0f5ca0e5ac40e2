"""Recomputation without the operators whose results nobody reads."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from scheduler_runtime.execute.torch_checkpoint import CheckpointedForward, SavedCalls
from scheduler_runtime.execute.unread_results import Unread, UnreadResultError
from tests.support.bitwise import assert_equal


class Residual(nn.Module):
    """Two products; what the second one makes goes into the sum alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.first(x), 0.5)
        return self.norm(x + F.relu(self.second(hidden), inplace=True)).exp()


class _Products(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten.addmm.default and Unread not in types
        return func(*args, **(kwargs or {}))


def gradients(model: nn.Module) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    with _Products() as products:
        model(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], products.n


def saving(
    saved: dict[str, frozenset[int]], skipped: dict[str, frozenset[int]]
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain, model = Residual(), Residual()
    model.load_state_dict(plain.state_dict())
    n_calls = dict.fromkeys(saved, 1) | {"aten.addmm.default": 2}
    calls = SavedCalls("", saved, {}, skipped, n_calls)
    model.forward = CheckpointedForward(model, saved=calls)
    return plain, model


FIRST, SECOND = frozenset({0}), frozenset({1})


@pytest.mark.parametrize(
    ("saved", "skipped", "n_more"),
    [
        # the sum is kept, and what relu wrote in place for its own backward
        (("aten.add.Tensor", "aten.relu.default"), SECOND, 1),
        # relu alone: the product that it overwrites need not be made
        (("aten.relu.default",), SECOND, 1),
        # what dropout has drawn is kept, by hand: the first product goes into nothing else
        (("aten.div.Scalar", "aten.mul.Tensor", "aten.relu.default"), FIRST | SECOND, 0),
        (("aten.add.Tensor",), frozenset(), 2),
    ],
)
def test_products_that_nobody_reads_do_not_run_and_the_bits_are_the_same(
    saved: tuple[str, ...], skipped: frozenset[int], n_more: int
) -> None:
    plain, model = saving(dict.fromkeys(saved, FIRST), {"aten.addmm.default": skipped})
    expected, n_plain = gradients(plain)
    got, n_products = gradients(model)
    assert n_products == n_plain + n_more
    assert_equal(expected, got)


def test_reading_what_was_left_out_is_an_error() -> None:
    _, model = saving({"aten.add.Tensor": FIRST}, {"aten.addmm.default": FIRST})
    with pytest.raises(UnreadResultError, match="reads a result that no backward operator"):
        gradients(model)


def test_another_number_of_calls_than_planned_leaves_nothing_out() -> None:
    plain, model = saving({"aten.add.Tensor": FIRST}, {"aten.addmm.default": SECOND})
    forward: Any = model.forward
    forward.saved.n_calls["aten.addmm.default"] = 3
    expected, n_plain = gradients(plain)
    got, n_products = gradients(model)
    assert n_products == n_plain + 2
    assert_equal(expected, got)


def test_releases_that_ask_again_in_the_recomputation_get_the_same_answers() -> None:
    """torch 2.11 calls the policy in the forward pass and in the recomputation."""
    addmm = torch.ops.aten.addmm.default
    calls = SavedCalls("", {"aten.addmm.default": SECOND}, {}, {}, {"aten.addmm.default": 2})
    policy = functools.partial(calls._policy, Counter(), Counter())
    first, again = (
        [policy(SelectiveCheckpointContext(is_recompute=is_recompute), addmm) for _ in range(2)]
        for is_recompute in (False, True)
    )
    assert first == again == [CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE]


class Compared(nn.Module):
    """Compares with results that nobody reads in the recomputation, on the right."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(x)
        low, high = x > hidden, x <= hidden
        low = low | (hidden < x) | (x >= hidden)
        return self.first(x).masked_fill(low, 0.5).masked_fill(high, 2.0).exp()


def test_comparisons_with_what_is_left_out_are_those_of_the_forward_pass() -> None:
    """Python calls `hidden < x` for `x > hidden`, since the class of `hidden` derives from that of
    `x`."""
    torch.manual_seed(0)
    plain, model = Compared(), Compared()
    model.load_state_dict(plain.state_dict())
    saved = {f"aten.{name}": FIRST for name in ("bitwise_or.Tensor", "le.Tensor")}
    saved["aten.bitwise_or.Tensor"] = SECOND
    skipped = {f"aten.{name}.Tensor": FIRST for name in ("gt", "lt", "ge")}
    skipped |= {"aten.addmm.default": FIRST, "aten.bitwise_or.Tensor": FIRST}
    n_calls = dict.fromkeys(saved | skipped, 1)
    n_calls |= {"aten.addmm.default": 2, "aten.bitwise_or.Tensor": 2}
    model.forward = CheckpointedForward(model, saved=SavedCalls("", saved, {}, skipped, n_calls))
    (bits, _), (plain_bits, _) = gradients(model), gradients(plain)
    assert_equal(plain_bits, bits)


class Grows(nn.Module):
    """Runs one more operator each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.n = nn.Linear(4, 4), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n[0] += 1
        for _ in range(self.n[0]):
            x = x.exp()
        return self.linear(x).tanh()


def test_a_recomputation_with_more_calls_than_the_forward_pass_says_so() -> None:
    model = Grows()
    calls = SavedCalls("", {"aten.addmm.default": FIRST}, {}, {}, {"aten.addmm.default": 1})
    model.forward = CheckpointedForward(model, saved=calls)
    with pytest.raises(UnreadResultError, match=r"exp\.default more often than the forward pass"):
        model(torch.randn(3, 4)).sum().backward()


class AssignsSlices(nn.Module):
    """Assigns slices of a tensor that nobody reads in the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden[:, 1:] = self.second(x)[:, 1:]
        hidden[1, :2] = hidden[2, -2:]
        return (hidden + x[:, :1].expand(-1, 4)).exp()


def test_slices_of_what_is_left_out_are_assigned() -> None:
    """Autograd makes the view again after each assignment, though not of a plain tensor."""
    torch.manual_seed(0)
    plain, model = AssignsSlices(), AssignsSlices()
    model.load_state_dict(plain.state_dict())
    saved, skipped = {"aten.add.Tensor": FIRST}, {"aten.addmm.default": FIRST | SECOND}
    n_calls = {"aten.add.Tensor": 1, "aten.addmm.default": 2}
    model.forward = CheckpointedForward(model, saved=SavedCalls("", saved, {}, skipped, n_calls))
    (bits, n_products), (plain_bits, n_plain) = gradients(model), gradients(plain)
    assert_equal(plain_bits, bits)
    assert n_products == n_plain
