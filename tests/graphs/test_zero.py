"""DeepSpeed's ZeRO: the engine's bytes by hand, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphs.graph import Graph, GraphMeta, Node, Tensor
from graphs.zero import Zero, ZeroError, sharded_figures, with_zero, zero_figures

GROUP = (5, 8, 4)
"""Elements: 17, so that parts of two ranks are 10, the second one padded by 3. Of 8 elements both
ranks have some: the first has 5 + 8, the second 8 + 4."""
ADAM = {"name": "Adam", "state_bytes": 80, "workspace_bytes": 120, "time_s": 1.0}


def figures(zero: Zero, *, element_bytes: int = 4, on_cpu: bool = False) -> tuple[Any, Any]:
    return zero_figures(zero, [GROUP], ADAM, element_bytes=element_bytes, on_cpu=on_cpu)


def zero(stage: int, n_elements: int = 6, **options: Any) -> Zero:
    section = {"stage": stage, "reduce_bucket_size": n_elements, **options}
    return Zero(n_ranks=2, config={"zero_optimization": section})


def test_gradients_that_are_freed_leave_the_buckets_and_those_of_the_part() -> None:
    engine, step = figures(zero(2))
    assert engine["bucket_bytes"] == 6 * 4
    assert engine["own_bytes"] == (5 + 8) * 4
    assert engine["reduced_bytes"] == 8 * 4  # a parameter that no bucket holds is reduced alone
    assert step["state_bytes"] == 80 + 10 * 4 + 3 * 4
    # the optimizer takes 120 beside its gradient of 40; of this 76 are counted
    assert step["workspace_bytes"] == 120 + 40 - (24 + 52)


def test_a_group_without_elements_adds_nothing_to_a_rank() -> None:
    for empty in ((0,), (0, 0), ()):
        groups = [GROUP, empty]
        engine, _ = zero_figures(zero(2), groups, ADAM, element_bytes=4, on_cpu=False)
        assert engine == figures(zero(2))[0]
    engine, _ = zero_figures(zero(2), [(5, 0, 8, 4)], ADAM, element_bytes=4, on_cpu=False)
    assert engine["own_bytes"] == (5 + 8) * 4


def test_in_16_bits_the_part_and_its_gradient_have_32() -> None:
    engine, step = figures(zero(2), element_bytes=2)
    assert (engine["bucket_bytes"], engine["own_bytes"]) == (12, 26)
    assert step["state_bytes"] == 80 + 10 * 4 + 3 * 2
    assert step["workspace_bytes"] == 120 + 40 - (12 + 26)


def test_in_one_bucket_the_part_is_copied_after_the_backward_pass() -> None:
    engine, step = figures(zero(2, 100))
    assert (engine["own_bytes"], engine["reduced_bytes"]) == (0, 17 * 4)
    assert engine["bucket_bytes"] == 400
    assert step["workspace_bytes"] == (5 + 8) * 4  # beside the bucket


def test_stage_1_has_whole_gradients_until_they_are_reduced() -> None:
    engine, step = figures(zero(1))
    assert engine["own_bytes"] == 0
    # after the backward pass, beside whole gradients and the bucket: those of the part are
    # copied while the parameter of 8 elements is reduced
    assert step["workspace_bytes"] == (5 + 8) * 4 + 8 * 4


def test_overlapping_takes_two_buckets_and_frees_gradients_in_stage_1_too() -> None:
    engine, _ = figures(zero(1, overlap_comm=True))
    assert engine["bucket_bytes"] == 2 * 6 * 4
    assert engine["own_bytes"] == (5 + 8) * 4
    assert engine["reduced_bytes"] == 2 * 8 * 4


def test_gloo_copies_all_parameters_at_once() -> None:
    many = {**ADAM, "workspace_bytes": 0}
    sizes = [[1] * 400]
    engine, step = zero_figures(zero(2, 2), sizes, many, element_bytes=4, on_cpu=True)
    assert step["workspace_bytes"] == 400 * 4 - engine["own_bytes"] - engine["bucket_bytes"]


def sharded(
    n_elements: int = 6,
    *,
    element_bytes: int = 4,
    frozen_bytes: int = 4,
    on_cpu: bool = False,
    **most: int,
) -> Any:
    """A frozen parameter of 3 elements beside GROUP, and modules of at most 9 elements."""
    options = {f"stage3_{name}": n for name, n in most.items()}
    where = {"element_bytes": element_bytes, "on_cpu": on_cpu}
    given = zero(3, n_elements, **options)
    frozen = [(3, frozen_bytes)]
    return sharded_figures(given, [GROUP], ADAM, frozen=frozen, fetched=9, **where)


def test_by_default_stage_3_may_have_all_parameters_of_a_small_model_whole() -> None:
    engine, step = sharded()
    assert engine["whole_bytes"] == engine["gathered_bytes"] == (17 + 3) * 4
    assert engine["bucket_bytes"] == (6 + 8) * 4  # a gradient of 8 waits beside it
    assert engine["own_bytes"] == (3 + 4 + 2) * 4
    assert step["state_bytes"] == 80 + (3 + 4 + 2) * 4
    # of what the optimizer takes beside its gradient of 36, the parameters leave it nothing
    assert step["workspace_bytes"] == max(0, 120 + 36 - (20 + 20 + 8) * 4)


def test_settings_of_stage_3_bound_what_is_whole() -> None:
    bounds = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    given = {f"stage3_{name}": 0 for name in bounds}
    given["stage3_param_persistence_threshold"] = 100
    big = [[1000]]
    asked = {"frozen": [(3, 2)], "fetched": 9, "element_bytes": 2}
    engine, _ = sharded_figures(zero(3, **given), big, ADAM, on_cpu=False, **asked)
    assert engine["whole_bytes"] == (2 * 9 + 3) * 2  # two modules, and what is small stays
    assert engine["gathered_bytes"] == 2 * 9 * 2
    assert engine["own_bytes"] == 500 * 4
    of_cpu, _ = sharded_figures(zero(3, **given), big, ADAM, on_cpu=True, **asked)
    assert of_cpu["gathered_bytes"] == 2 * engine["gathered_bytes"]
    assert of_cpu["reduced_bytes"] == engine["reduced_bytes"] + (1000 + 2) * 2


def test_frozen_parameters_of_stage_3_count_in_their_own_dtype() -> None:
    engine, _ = sharded(element_bytes=2)
    assert engine["whole_bytes"] == engine["gathered_bytes"] == 17 * 2 + 3 * 4
    # what the settings count in elements may be the frozen ones: those are the widest
    engine, _ = sharded(
        element_bytes=2,
        frozen_bytes=8,
        on_cpu=True,
        max_live_parameters=0,
        max_reuse_distance=0,
        prefetch_bucket_size=0,
        param_persistence_threshold=4,
    )
    total_bytes = 17 * 2 + 3 * 8
    assert engine["whole_bytes"] == total_bytes  # less than 18 of the widest
    assert engine["gathered_bytes"] == 2 * total_bytes
    engine, _ = sharded_figures(
        zero(3, stage3_max_live_parameters=4, stage3_max_reuse_distance=5),
        [[1_000_000]],
        ADAM,
        frozen=[(1000, 4), (200_000, 4)],
        fetched=9,
        element_bytes=2,
        on_cpu=False,
    )
    assert engine["whole_bytes"] == (5 + 2 * 9) * 4 + 1000 * 4  # the small one stays
    assert engine["gathered_bytes"] == (4 + 2 * 9) * 4


def test_parts_of_stage_3_are_rounded_up_in_the_dtype_of_the_parameter() -> None:
    tensors = tuple(Tensor(name, 20, "parameter") for name in ("w", "frozen", "unknown"))
    node = Node("f", "f", ("w", "frozen", "unknown"), (), 1.0, 0, "forward", True)
    layout = {name: {"tensor": name, "element_bytes": n} for name, n in (("w", 2), ("frozen", 4))}
    graph = Graph((node,), tensors, (), meta=GraphMeta(parameter_layout=layout))
    graph = with_zero(graph, sharded(element_bytes=2)[0])
    found = [graph.tensor_by_name[tensor.name].size_bytes for tensor in tensors]
    assert found == [10, 12, 16]


def test_a_rank_of_stage_3_has_its_part_of_each_parameter() -> None:
    tensors = (Tensor("w", 5 * 4, "parameter"), Tensor("x", 8, "input"), Tensor("y", 4, "output"))
    node = Node("mm", "aten.mm.default", ("w", "x"), ("y",), 1.0, 0, "forward", True)
    layout = {"w": {"tensor": "w", "element_bytes": 4}}
    plain = Graph((node,), tensors, ("y",), meta=GraphMeta(parameter_layout=layout))
    graph = with_zero(plain, sharded()[0])
    assert graph.tensor_by_name["w"].size_bytes == 3 * 4
    assert graph.tensor_by_name["x"].size_bytes == 8
    assert graph.resident_bytes == 3 * 4 + 8 + (20 + 20 + 6 + 8 + 9) * 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto"}},
            "max_live_parameters is 'auto'; expected a number of elements",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "zero_hpz_partition_size is not supported",
        ),
        ({"zero_optimization": {"stage": 0}}, "stage is 0; expected 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "contiguous_gradients": False}}, "contiguous_grad"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer is not supported",
        ),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}, "number of elements"),
        ({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}, "fp16 is not supported"),
        (
            {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4},
            "gradient_accumulation_steps",
        ),
        ({"zero_optimization": 2}, "a dict with zero_optimization"),
        ([], "a dict with zero_optimization"),
    ],
)
def test_what_is_not_planned_is_refused(config: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for given in (config, path):
        with pytest.raises(ZeroError, match=words):
            Zero(n_ranks=2, config=given)


def test_stage_and_ranks_are_checked() -> None:
    with pytest.raises(ZeroError, match="stage is 1, but 2 in the config"):
        Zero(1, n_ranks=2, config={"zero_optimization": {"stage": 2}})
    with pytest.raises(ZeroError, match="n_ranks is 1"):
        Zero(1, n_ranks=1)
    with pytest.raises(ZeroError, match="stage is None"):
        Zero(n_ranks=2)


@pytest.mark.parametrize(
    ("dtype", "config", "words"),
    [
        ("float32", {"bf16": {"enabled": True}}, "bf16.enabled asks for bfloat16"),
        ("bfloat16", {}, 'needs "bf16"'),
        ("float16", {}, "parameters in float16"),
        (
            "bfloat16",
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            "grad_accum_dtype asks for fp32",
        ),
    ],
)
def test_the_engine_trains_in_the_dtype_of_the_parameters(
    dtype: str, config: Any, words: str
) -> None:
    with pytest.raises(ZeroError, match=words):
        Zero(2, n_ranks=2, config=config).check_dtype(dtype)
