"""The words for rewrites, and the variants of a step that they stand for."""

import pytest

from graphs.rewrites import WORDS, is_stock, variants_of
from graphs.trace import trace, trace_variants
from solver import solve
from tests.support.models import NormAndDropout


def test_only_the_three_words():
    with pytest.raises(
        ValueError, match=r"'bitwize'; expected 'bitwise' .* 'allclose' .* or 'none'"
    ):
        variants_of("bitwize")
    assert all(variants_of(word) for word in WORDS)
    assert variants_of("none") == variants_of("none", sharded=True) == ((),)
    assert all(map(is_stock, variants_of("allclose", sharded=True)))
    assert not is_stock(("in_place",))


def test_a_rewrite_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="there is no rewrite 'in_palace'"):
        trace(NormAndDropout(), NormAndDropout.batch(), rewrites=("in_palace",))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("word", WORDS)
def test_the_variants_of_a_word_are_traced_as_each_by_itself(word):
    model, batch = NormAndDropout(), NormAndDropout.batch()
    step = trace_variants(model, batch, rewrites=word)
    assert step.plain == trace(model, batch)
    alone = [trace(model, batch, rewrites=variant) for variant in variants_of(word)]
    assert {graph.graph_id for graph in step.planned} == {graph.graph_id for graph in alone}
    assert all(graph in alone for graph in step.planned)


@pytest.mark.slow
def test_solve_takes_the_word_for_a_module_alone(tmp_path):
    model, batch = NormAndDropout(), NormAndDropout.batch()
    with pytest.raises(ValueError, match="rewrites is 'bits'"):
        solve(model, batch, budget="1GB", rewrites="bits")
    with pytest.raises(TypeError, match="traced already: rewrites would have no effect"):
        solve(trace(model, batch), budget="1GB", rewrites="none")
    solution = solve(model, batch, budget="1GB", rewrites="none")
    assert solution.graph == solution.plain
