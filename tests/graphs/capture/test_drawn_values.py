"""Random numbers known from the generator's state: the same ones, and nothing else is held."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture.as_eager.drawn_values import Draws

ATEN = torch.ops.aten


class Made(TorchDispatchMode):
    """Refers to what operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.refs.append(weakref.ref(made.untyped_storage()))
        return made


def noted() -> Draws:
    """A number after the mask of a dropout, and one after a draw in place."""
    draws, x = Draws(torch.device("cpu")), torch.randn(20, 30)
    assert draws.note(ATEN.bernoulli.p, (x, 0.5), {}) == 0
    assert draws.note(ATEN.rand.default, ([],), {}) == 1
    assert draws.note(ATEN.uniform_.default, (x,), {}) == 2
    assert draws.note(ATEN.rand.default, ([],), {}) == 3
    return draws


def test_the_numbers_are_those_of_the_step() -> None:
    draws = noted()
    for seed in range(5):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found = [draws.result(position, state) for position in (1, 3)]
        assert torch.equal(state, torch.get_rng_state())
        x = torch.empty(20, 30)
        x.bernoulli(0.5)
        first = torch.rand([])
        x.uniform_()
        assert found == [first, torch.rand([])]


def test_masks_are_not_held() -> None:
    draws = noted()
    state = torch.get_rng_state()
    with Made() as made:
        draws.result(1, state)
        draws.result(3, state)
    alive = [ref().nbytes() for ref in made.refs if ref() is not None]
    assert alive == [state.nbytes, 4, 4]


def test_large_results_are_handed_out_and_not_held() -> None:
    draws, state = Draws(torch.device("cpu")), torch.get_rng_state()
    draws.note(ATEN.rand.default, ([20, 30],), {})
    expected = torch.rand(20, 30)
    with Made() as made:
        assert torch.equal(draws.result(0, state), expected)
        assert torch.equal(draws.result(0, state), expected)
    alive = [ref() for ref in made.refs if ref() is not None]
    assert len(alive) < len(made.refs)
    assert all(each.nbytes() == state.nbytes for each in alive)


def test_programs_that_begin_alike_draw_once() -> None:
    programs, state = [noted() for _ in range(9)], torch.get_rng_state()
    with Made() as made:
        found = [program.result(at, state) for at in (1, 3, 1, 3) for program in programs]
    assert len({float(number) for number in found}) == 2
    n_for_arguments = 2 * 2  # zeros in place of the arguments of `bernoulli` and `uniform_`
    n_states = 2  # copied: to start from, and to put back
    assert len(made.refs) <= 4 + n_for_arguments + n_states


def test_programs_that_do_not_begin_alike_draw_their_own() -> None:
    one, other = noted(), Draws(torch.device("cpu"))
    other.note(ATEN.rand.default, ([3],), {})
    other.note(ATEN.rand.default, ([],), {})
    state = torch.get_rng_state()
    assert one.result(1, state) != other.result(1, state)
    torch.rand(3)
    assert torch.equal(other.result(1, state), torch.rand([]))


@pytest.mark.parametrize(
    ("func", "args"), [(ATEN.poisson.default, ()), (ATEN.multinomial.default, (2,))]
)
def test_nothing_is_known_after_a_draw_that_depends_on_values(
    func: Any, args: tuple[Any, ...]
) -> None:
    draws = noted()
    assert draws.note(func, (torch.ones(3), *args), {}) is None
    assert draws.note(ATEN.rand.default, ([],), {}) is None
