"""The advice: each kind where it applies, with the graph's own figures, and silence elsewhere."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import pytest

from graphs.graph import Graph, Node, Tensor
from graphs.synthetic.nets import residual
from solver.plan_analysis.advice import ABOUT, _how_to_shrink, advise
from solver.reporting.memory_rows import memory_table
from solver.schedule.solution import Request
from solver.solving import answer, solve
from tests.support.budgets import baseline_peak_bytes
from tests.support.paths import GPT2
from tests.support.small_graphs import make, op

FULL = {"environment": {"autocast": None}, "parameter_bytes": {"float32": 900, "bfloat16": 100}}


def step(
    *,
    weight: int = 0,
    state: int = 0,
    acts: int = 100,
    wide: int = 0,
    loss: str = "aten.mul.Tensor",
    meta: Mapping[str, object] | None = None,
    workspace_bytes: int = 0,
) -> Graph:
    """Four layers of `acts` bytes each, then an op whose output and gradient have `wide` bytes."""
    nodes = [op(f"f{i}", f"x{i - 1} w", f"x{i}", time_s=1) for i in range(1, 5)]
    nodes.append(op("head", "x4", "y", time_s=1))
    nodes.append(op("loss", "y", "gy", phase="backward", workspace_bytes=workspace_bytes))
    nodes.append(op("tail", "gy x4", "g4", phase="backward"))
    nodes += [op(f"b{i}", f"g{i} x{i - 1}", f"g{i - 1}", phase="backward") for i in (4, 3, 2, 1)]
    nodes.append(op("gw", "g0", "dw", phase="backward"))
    nodes.append(op("update", "dw s", "", phase="optimizer"))
    sizes = {"x0": 1, "w": weight, "s": state, "dw": weight, "y": wide, "gy": wide}
    sizes |= {f"x{i}": acts for i in range(1, 5)} | {f"g{i}": acts for i in range(5)}
    graph = make(nodes, sizes)
    kinds = {"x0": "input", "w": "parameter", "s": "optimizer_state", "dw": "gradient"}
    return dataclasses.replace(
        graph,
        nodes=tuple(dataclasses.replace(n, op=loss if n.name == "loss" else n.op) for n in nodes),
        tensors=tuple(
            Tensor(t.name, t.size_bytes, kinds.get(t.name, t.kind)) for t in graph.tensors
        ),
        meta=meta or {},
    )


def advised(graph: Graph, *, spare: int = -1, method: str = "auto") -> dict[str, str]:
    """The advice for a budget this far from the peak without checkpointing."""
    peak_bytes = baseline_peak_bytes(graph)
    request = Request(budget_bytes=peak_bytes + spare, method=method, time_limit_s=600)
    found = advise(answer(graph, request))
    assert [a.kind for a in found] == [kind for kind in ABOUT if kind in {a.kind for a in found}]
    assert all(a.text.endswith(".") for a in found)
    return {a.kind: a.text for a in found}


@pytest.mark.parametrize(
    "graph",
    [
        step(meta=FULL),
        step(weight=1000, state=2000),
        step(wide=2000, loss="aten._log_softmax.default"),
        residual(n_blocks=6),
    ],
)
def test_no_advice_where_the_step_fits_as_it_is(graph):
    assert advised(graph, spare=0) == {}
    assert advised(graph, spare=-1) != {}


def test_model_state_that_fills_the_budget():
    text = advised(step(weight=10_000, state=20_000))["state"]
    assert "take 40.00 KB, " in text
    assert "FSDP" in text
    assert "5.00 KB instead of 20.00 KB" in text
    assert "LoRA) saves nearly all of the 30.00 KB" in text


@pytest.mark.parametrize(("acts", "spare"), [(4000, -1), (4000, -5000), (9000, -12000)])
def test_model_state_at_the_peak_is_what_the_table_says(acts, spare):
    graph = step(weight=10_000, state=20_000, acts=acts)
    peak_bytes = baseline_peak_bytes(graph)
    solution = answer(graph, Request(budget_bytes=peak_bytes + spare, time_limit_s=600))
    text = {a.kind: a.text for a in advise(solution)}["state"]
    *parts, total = [(row[0], *row[-2:]) for row in memory_table(solution).rows]
    cells = {name: (size, share) for name, size, share in parts}
    run = solution.peaks[-1]
    assert f"At the peak of the {run.name}, {total[1]}, they take " in text
    assert f"besides {cells['activations'][0]} of activations ({cells['activations'][1]})" in text
    shares = [float(share.split()[0]) for _, share in cells.values() if share]
    state = float(re.search(r"they take [0-9.]+ [KM]?B \(([0-9.]+) %\)", text)[1])
    others = [cells[name][1] for name in ("activations", "batch", "buffers", "workspace")]
    rest = sum(float(share.split()[0]) for share in others if share)
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert state + rest == pytest.approx(100, abs=0.2)


def test_model_state_that_does_not():
    assert "state" not in advised(step(weight=10, state=20))


def test_model_state_without_an_optimizer_or_gradients():
    graph = step(weight=10_000)
    text = advised(graph)["state"]
    assert "8-bit" not in text
    assert "10.00 KB of gradients and optimizer state" in text
    tensors = tuple(
        dataclasses.replace(t, size_bytes=0) if t.name == "dw" else t for t in graph.tensors
    )
    text = advised(dataclasses.replace(graph, tensors=tensors))["state"]
    assert "LoRA" not in text
    assert text.endswith("divides it by k.")


def test_state_that_is_a_small_share_of_the_peak_is_not_worth_advice():
    text = advised(step(weight=10_000, state=200))["state"]
    assert "8-bit" not in text
    assert "LoRA" in text
    assert "8-bit" in advised(step(weight=10_000, state=2_000))["state"]


def mostly_frozen() -> Graph:
    """A base of 4 MB, and an adapter of 400 KB with its state."""
    graph = step(weight=400_000, state=400_000)
    nodes = tuple(
        dataclasses.replace(n, inputs=(*n.inputs, "base")) if n.name in ("f1", "b1") else n
        for n in graph.nodes
    )
    layout = {
        "base.weight": {"tensor": "base", "gradient": None},
        "adapter.weight": {"tensor": "w", "gradient": "dw"},
    }
    meta = dataclasses.replace(
        graph.meta,
        parameters={name: each["tensor"] for name, each in layout.items()},
        parameter_layout=layout,
        environment={"optimizer": {"trains": ["adapter.weight"]}},
    )
    tensors = (*graph.tensors, Tensor("base", 4_000_000, "parameter"))
    return dataclasses.replace(graph, nodes=nodes, tensors=tensors, meta=meta)


def test_frozen_parameters_are_no_reason_to_train_less():
    graph = mostly_frozen()
    text = advised(graph)["state"]
    assert "LoRA" not in text
    assert "4.00 MB of parameters are frozen: with solve(" in text
    assert 'parameters="host"), up to 4.40 MB of parameters are in host memory' in text


@pytest.mark.parametrize(
    "change",
    [
        {"environment": {}},
        {"environment": {"optimizer": {"trains": ["w"]}, "sharding": {"n_ranks": 2}}},
        {
            "environment": {
                "optimizer": {"trains": ["w"], "parameters_on_host": {"base.weight": "base"}}
            }
        },
        {"scope": "whole submodules"},
    ],
    ids=["without an optimizer", "sharded", "on the host already", "planned by submodules"],
)
def test_frozen_parameters_that_cannot_leave(change):
    graph = mostly_frozen()
    meta = dataclasses.replace(graph.meta, **change)
    text = advised(dataclasses.replace(graph, meta=meta))["state"]
    assert "frozen" not in text
    assert "LoRA" not in text


def test_accumulated_gradients_are_state_too():
    graph = step(weight=10_000)
    accumulated = Tensor("accumulated", 90_000, "gradient")
    graph = dataclasses.replace(graph, tensors=(*graph.tensors, accumulated))
    assert "take 110.0 KB" in advised(graph)["state"]


def test_gradients_that_do_not_stay_to_the_end_are_no_state():
    graph = step(weight=10, acts=10_000)
    kinds = {f"g{i}": "gradient" for i in range(5)}
    tensors = tuple(dataclasses.replace(t, kind=kinds.get(t.name, t.kind)) for t in graph.tensors)
    assert "state" not in advised(dataclasses.replace(graph, tensors=tensors))
    whole = dataclasses.replace(graph, tensors=tensors, outputs=tuple(kinds))
    assert "take 50.02 KB" in advised(whole)["state"]


@pytest.mark.parametrize("loss", ["aten._log_softmax.default", "aten.nll_loss_backward.default"])
def test_one_ops_logits(loss):
    found = advised(step(wide=2000, loss=loss))
    assert f"loss ({loss}, backward) alone requires 4.00 KB" in found["logits"]
    assert "chunks of tokens" in found["logits"]
    assert "one_op" not in found


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("none", 'a plan of the model with rewrites="allclose" does so where it can'),
        ("bitwise", 'a plan of the model with rewrites="allclose" does so where it can'),
        ("allclose", "the plan may do so for losses that it recognizes"),
    ],
)
def test_logits_that_a_plan_may_compute_in_chunks(word, text):
    graph = step(wide=2000, loss="aten._log_softmax.default")
    peak_bytes = baseline_peak_bytes(graph)
    solution = answer(graph, Request(peak_bytes - 1, rewrites=word, time_limit_s=600))
    found = {a.kind: a.text for a in advise(solution)}["logits"]
    assert text in found
    assert "no schedule" not in found


def test_a_rank_of_fsdp_runs_the_models_own_head_and_loss():
    graph = step(wide=2000, loss="aten._log_softmax.default")
    meta = graph.meta.with_environment(sharding={"n_ranks": 2})
    found = advised(dataclasses.replace(graph, meta=meta))["logits"]
    assert "linear_cross_entropy (PyTorch 2.13)" in found
    assert "a plan of the model" not in found


def test_a_rank_of_tensor_parallelism_already_has_a_part():
    graph = step(weight=10_000, state=20_000, loss="_c10d_functional.all_reduce.default")
    text = advised(graph)["state"]
    assert "one rank of tensor parallelism" in text
    assert "over k groups of such ranks" in text
    assert "over k devices" not in text


def test_an_op_that_shares_the_logits_with_the_loss():
    """The head's own product may be where the peak is: it makes what the loss reads."""
    graph = step(wide=2000, loss="aten._log_softmax.default")
    nodes = tuple(
        dataclasses.replace(n, workspace_bytes=5000) if n.name == "tail" else n for n in graph.nodes
    )
    found = advised(dataclasses.replace(graph, nodes=nodes))
    assert "tail (op, backward) alone requires" in found["logits"]


def test_a_small_tensor_of_the_loss_makes_no_op_one_of_the_loss():
    graph = step(wide=10, loss="aten._log_softmax.default")
    nodes = tuple(
        dataclasses.replace(n, workspace_bytes=5000) if n.name == "tail" else n for n in graph.nodes
    )
    found = advised(dataclasses.replace(graph, nodes=nodes))
    assert "logits" not in found
    assert "tail (op, backward) alone requires" in found["one_op"]


def test_one_op_that_is_none_of_the_loss():
    found = advised(step(wide=2000))
    assert "loss (aten.mul.Tensor, backward) alone requires 4.00 KB" in found["one_op"]
    assert "logits" not in found


def test_no_op_is_named_where_none_is_wide():
    found = advised(residual(n_blocks=8))
    assert "logits" not in found
    assert "one_op" not in found


def test_the_optimizers_step_is_not_split():
    graph = step(weight=10)
    nodes = tuple(
        dataclasses.replace(n, workspace_bytes=9000) if n.name == "update" else n
        for n in graph.nodes
    )
    assert "one_op" not in advised(dataclasses.replace(graph, nodes=nodes))


def test_the_op_in_the_way_counts_where_nothing_fits():
    found = advised(step(wide=2000, loss="aten._log_softmax.default"), spare=-1500)
    assert "alone requires 4.00 KB" in found["logits"]
    assert "theory" not in found


def test_mixed_precision_not_in_use():
    text = advised(step(meta=FULL))["precision"]
    assert "the parameters are float32" in text
    assert text.endswith("call solve under torch.autocast with bfloat16, as training will run.")


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"environment": 5, "parameter_bytes": {"float32": 1}},
        {"environment": {}, "parameter_bytes": {"float32": 1}},
        {"environment": {"autocast": "bfloat16"}, "parameter_bytes": {"float32": 1}},
        {"environment": {"autocast": None}},
        {"environment": {"autocast": None}, "parameter_bytes": {}},
        {"environment": {"autocast": None}, "parameter_bytes": {"float32": 1, "bfloat16": 2}},
    ],
    ids=["no meta", "hostile", "unknown", "in use", "no dtypes", "no parameters", "16 bits"],
)
def test_mixed_precision_in_use_or_unknown(meta):
    assert "precision" not in advised(step(meta=meta))


def test_mixed_precision_would_change_little_where_activations_are_few():
    assert "precision" not in advised(step(meta=FULL, weight=10_000))


def test_mixed_precision_would_change_nothing_in_the_optimizers_step():
    graph = step(meta=FULL)
    nodes = tuple(
        dataclasses.replace(n, workspace_bytes=450) if n.name == "update" else n
        for n in graph.nodes
    )
    graph = dataclasses.replace(graph, nodes=nodes)
    peak_bytes = baseline_peak_bytes(graph)
    assert "precision" in advised(graph)
    assert "precision" not in advised(graph, spare=449 - peak_bytes)


def test_theory_beside_what_was_found():
    graph = Graph.load(GPT2)
    solution = solve(graph, budget="4GB", method="sqrt")
    text = {a.kind: a.text for a in advise(solution)}["theory"]
    plain = solve(graph, budget="4GB", method="every_block")
    assert plain.simulation is not None
    assert solution.simulation is not None
    assert f"every block 3.12 GB at {100 * plain.overhead:+.2f} %;" in text
    assert "segments (method sqrt fits their number to the budget instead), " in text
    assert f"; this plan 3.94 GB at {100 * solution.overhead:+.2f} %." in text
    assert "does not fit" not in text
    forward_s = sum(node.time_s for node in graph.forward_nodes)
    assert f"one more forward pass, {100 * forward_s / graph.baseline_time_s:+.2f} %" in text
    tight = {a.kind: a.text for a in advise(solve(graph, budget="2.9GB", time_limit_s=600))}
    assert "every block 3.12 GB at" in tight["theory"]
    assert "(does not fit)" in tight["theory"]
    assert "; this plan, op by op, 2." in tight["theory"]


def test_theory_of_a_step_that_differentiates_a_gradient():
    graph = Graph.load(GPT2)
    meta = dataclasses.replace(graph.meta, differentiated_modules=[""])
    solution = solve(dataclasses.replace(graph, meta=meta), budget="4GB", method="sqrt")
    text = {a.kind: a.text for a in advise(solution)}["theory"]
    assert "torch.utils.checkpoint around modules saves less" in text


def test_no_theory_without_a_plan_or_blocks():
    assert "theory" not in advised(residual(n_blocks=6), method="none")
    one_block = make(
        [
            op("f", "x", "a b"),
            op("h", "x", "c"),
            op("back", "a b c", "g", phase="backward"),
            op("more", "g a", "d", phase="backward", workspace_bytes=10),
        ],
        {"x": 1, "a": 1, "b": 10, "c": 10, "g": 10, "d": 10},
        outputs="d",
    )
    assert "theory" not in advised(one_block)


@pytest.mark.parametrize(
    ("op", "advice"),
    [
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "used already"),
        ("aten.convolution_backward.default", "smaller images"),
        ("aten.mm.default", "a fused one"),
    ],
)
def test_what_an_operator_can_be_made_of_depends_on_it(op, advice):
    assert advice in _how_to_shrink(Node("n", op, (), (), 0.0))
