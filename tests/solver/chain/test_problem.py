"""The chain and its simulator: costs and peaks by hand, every rule broken, every bad input."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from solver.chain.problem import (
    Backward,
    Chain,
    ChainOp,
    Drop,
    ForwardKeepingAll,
    ForwardKeepingInput,
    ForwardKeepingOutput,
    IllegalChainError,
    ops_keeping_everything,
    simulate_chain,
)

TWO = Chain(
    forward_s=(1.0, 2.0),
    backward_s=(4.0, 8.0, 16.0),
    input_bytes=(1, 10, 100),
    saved_bytes=(0, 30, 500),
    forward_workspace_bytes=(1000, 2000),
    backward_workspace_bytes=(3000, 4000, 5000),
)
"""Sizes whose sums tell what is in them."""

RECOMPUTED: tuple[ChainOp, ...] = (
    ForwardKeepingInput(1),
    ForwardKeepingAll(2),
    Backward(3),
    Backward(2),
    ForwardKeepingAll(1),
    Backward(1),
)


def quiet(chain: Chain) -> Chain:
    """The chain without workspace."""
    n = chain.n_blocks
    return replace(chain, forward_workspace_bytes=(0,) * n, backward_workspace_bytes=(0,) * (n + 1))


def test_keeping_everything_by_hand() -> None:
    ops = ops_keeping_everything(TWO)
    assert ops == (
        ForwardKeepingAll(1),
        ForwardKeepingAll(2),
        Backward(3),
        Backward(2),
        Backward(1),
    )
    # Backward(3): x_0, saved_1, saved_2, the gradient of x_2 being made, workspace
    assert simulate_chain(TWO, ops) == (31.0, 1 + 30 + 500 + 100 + 5000)
    # Backward(2): x_0, saved_1, saved_2, the gradients of x_2 and x_1
    assert simulate_chain(quiet(TWO), ops) == (31.0, 1 + 30 + 500 + 100 + 10)


@pytest.mark.parametrize(
    ("workspace", "entry", "peak_bytes"),
    [
        ("forward", 0, 1 + 10 + 30 + 100_000),  # the second time, beside the gradient of x_1
        ("forward", 1, 1 + 10 + 500 + 100_000),
        ("backward", 2, 1 + 10 + 500 + 100 + 100_000),
        ("backward", 1, 1 + 10 + 500 + 100 + 10 + 100_000),
        ("backward", 0, 1 + 30 + 10 + 1 + 100_000),
    ],
)
def test_what_is_there_while_each_operation_runs(
    workspace: str, entry: int, peak_bytes: int
) -> None:
    """Workspace in one place alone brings the peak there."""
    name = f"{workspace}_workspace_bytes"
    sizes = [0] * len(getattr(TWO, name))
    sizes[entry] = 100_000
    chain = replace(quiet(TWO), **{name: tuple(sizes)})
    assert simulate_chain(chain, RECOMPUTED) == (32.0, peak_bytes)


def test_moving_on_lets_go_of_the_input_only_after_the_output_is_there() -> None:
    chain = Chain((1,) * 3, (0,) * 4, (5, 7, 70, 700), (0, 7, 70, 700), (0,) * 3, (0,) * 4)
    ops = (
        ForwardKeepingInput(1),
        ForwardKeepingOutput(2),
        ForwardKeepingAll(3),
        Backward(4),
        Backward(3),
        ForwardKeepingInput(1),
        ForwardKeepingAll(2),
        Backward(2),
        ForwardKeepingAll(1),
        Backward(1),
    )
    # Backward(4): x_0, x_2, what block 3 saves, the gradient of x_3; Backward(3) as much and that
    # of x_2. x_1 went when x_2 was there.
    assert simulate_chain(chain, ops) == (6.0, 5 + 70 + 700 + 700 + 70)
    kept = tuple(ForwardKeepingInput(2) if op == ForwardKeepingOutput(2) else op for op in ops)
    with pytest.raises(IllegalChainError, match="op 5: the output of block 1 is there already"):
        simulate_chain(chain, kept)
    assert simulate_chain(chain, (*kept[:5], *kept[6:])) == (5.0, 5 + 7 + 70 + 700 + 700 + 70)


def test_an_output_there_by_itself_counts_twice_while_its_block_saves() -> None:
    ops = (
        ForwardKeepingInput(1),
        ForwardKeepingInput(2),
        ForwardKeepingAll(2),
        *ops_keeping_everything(TWO)[2:4],
        ForwardKeepingAll(1),
        Backward(1),
    )
    chain = replace(quiet(TWO), forward_workspace_bytes=(0, 10_000))
    assert simulate_chain(chain, ops)[1] == 1 + 10 + 100 + 500 + 10_000
    assert simulate_chain(quiet(TWO), ops)[1] == 1 + 10 + 500 + 100 + 10  # as without: it is merged


def test_a_dropped_output_is_gone() -> None:
    ops = (ForwardKeepingInput(1), ForwardKeepingInput(2), Backward(3), Drop(1))
    again = (ForwardKeepingInput(1), ForwardKeepingAll(2), Drop(2), Backward(2))
    end = (ForwardKeepingAll(1), Backward(1))
    with pytest.raises(IllegalChainError, match="op 6: the output of block 2 is not there by"):
        simulate_chain(TWO, ops + again + end)
    cost_s, _ = simulate_chain(TWO, ops + again[:2] + again[3:] + end)
    assert cost_s == 28 + 3 * 1.0 + 2 * 2.0
    with pytest.raises(IllegalChainError, match=r"op 4: .* reads x_1, which is not there"):
        simulate_chain(TWO, ops + again[1:])


def test_zero_sizes_and_times_are_nothing_special() -> None:
    chain = Chain((0,), (0, 0), (0, 0), (0, 0), (0,), (0, 0))
    assert simulate_chain(chain, ops_keeping_everything(chain)) == (0.0, 0)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ((), "at the end: the backward of block 3 has not run"),
        (ops_keeping_everything(TWO)[:-1], "at the end: the backward of block 1 has not run"),
        ((ForwardKeepingAll(2),), "op 0: the forward of block 2 reads x_1, which is not there"),
        ((ForwardKeepingAll(1),) * 2, "op 1: all that block 1 saves is there already"),
        ((ForwardKeepingAll(1), ForwardKeepingInput(1)), "op 1: all that block 1 saves is there"),
        ((ForwardKeepingInput(1),) * 2, "op 1: the output of block 1 is there already"),
        ((ForwardKeepingOutput(1),) * 2, "op 1: the forward of block 1 reads x_0, which is not"),
        ((Backward(3),), "op 0: the backward of block 3 reads x_2, which is not there"),
        ((Backward(1),), "op 0: the backward of block 1 is not due; that of block 3 is"),
        ((*ops_keeping_everything(TWO), Backward(1)), "op 5: .* block 1 is not due; none is"),
        ((*RECOMPUTED[:4], Backward(1)), "op 4: what block 1 saves is not there"),
        (
            (ForwardKeepingAll(1), Drop(0), ForwardKeepingAll(2), Backward(3), Backward(2)) * 2,
            "op 5: the forward of block 1 reads x_0, which is not there",
        ),
        ((ForwardKeepingAll(1), Drop(1)), "op 1: the output of block 1 is not there by itself"),
        ((ForwardKeepingAll(0),), r"op 0: .* names no block; .* 1 \.\. 2"),
        ((ForwardKeepingAll(3),), r"op 0: .* names no block; .* 1 \.\. 2"),
        ((Backward(4),), r"op 0: .* names no block; .* 1 \.\. 3"),
        ((Drop(-1),), r"op 0: .* names no block; .* 0 \.\. 2"),
        ((("forward", 1),), r"op 0: \('forward', 1\) is not a chain operation"),
    ],
)
def test_illegal_operations_are_refused(ops: tuple[ChainOp, ...], message: str) -> None:
    with pytest.raises(IllegalChainError, match=message):
        simulate_chain(TWO, ops)


def test_the_refusal_says_where() -> None:
    with pytest.raises(IllegalChainError) as caught:
        simulate_chain(TWO, (ForwardKeepingAll(1), Backward(3)))
    assert caught.value.position == 1
    assert "x_2" in caught.value.reason
    with pytest.raises(IllegalChainError) as caught:
        simulate_chain(TWO, ())
    assert caught.value.position is None


def test_sequences_become_tuples_and_the_chain_is_frozen() -> None:
    given: tuple[Any, ...] = (
        [1, 2],
        np.array([1.0, 2.0, 0.0]),
        np.array([1, 2, 3]),
        [0, 2, 3],
        iter((0, 0)),
        range(3),
    )
    chain = Chain(*given)
    assert chain.n_blocks == 2
    assert chain.forward_s == (1.0, 2.0)
    assert chain.input_bytes == (1, 2, 3)
    assert chain.forward_workspace_bytes == (0, 0)
    assert type(chain.input_bytes[0]) is int
    assert hash(chain) == hash(replace(chain))
    with pytest.raises(FrozenInstanceError):
        chain.forward_s = ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_s": ()}, "forward_s is empty; a chain has at least one block"),
        ({"backward_s": (1.0, 2.0)}, "backward_s has 2 entries; .* it must have 3"),
        ({"input_bytes": (1, 2)}, "input_bytes has 2 entries; .* it must have 3"),
        ({"saved_bytes": (1, 2, 3, 4)}, "saved_bytes has 4 entries; .* it must have 3"),
        ({"forward_workspace_bytes": ()}, "forward_workspace_bytes has 0 .* must have 2"),
        ({"backward_workspace_bytes": (0, 0)}, "backward_workspace_bytes has 2 .* must have 3"),
        ({"forward_s": (1.0, -2.0)}, r"forward_s\[1\] is -2.0; it must be a finite number"),
        ({"forward_s": (float("nan"), 1)}, r"forward_s\[0\] is nan; it must be a finite number"),
        ({"backward_s": (1, 1, float("inf"))}, r"backward_s\[2\] is inf; it must be a finite"),
        ({"forward_s": ("1", 1)}, r"forward_s\[0\] is '1'; it must be a finite number"),
        ({"forward_s": (None, 1)}, r"forward_s\[0\] is None; it must be a finite number"),
        ({"forward_s": (True, 1)}, r"forward_s\[0\] is True; it must be a finite number"),
        ({"input_bytes": (1, -1, 1)}, r"input_bytes\[1\] is -1; .* 0 bytes or more"),
        ({"input_bytes": (1, 1.5, 1)}, r"input_bytes\[1\] is 1.5; it must be an int, in bytes"),
        ({"input_bytes": (1, "9", 1)}, r"input_bytes\[1\] is '9'; it must be an int, in bytes"),
        ({"saved_bytes": (0, True, 600)}, r"saved_bytes\[1\] is True; it must be an int"),
        ({"forward_workspace_bytes": (0, -3)}, r"forward_workspace_bytes\[1\] is -3"),
        ({"saved_bytes": (0, 9, 500)}, r"saved_bytes\[1\] is 9, less than input_bytes\[1\] = 10"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TWO, **change)


def test_the_unused_entry_may_be_anything() -> None:
    assert replace(TWO, saved_bytes=(999, 30, 500)).saved_bytes[0] == 999
    ops = ops_keeping_everything(TWO)
    assert simulate_chain(replace(TWO, saved_bytes=(999, 30, 500)), ops) == simulate_chain(TWO, ops)
