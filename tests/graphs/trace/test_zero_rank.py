"""`trace(..., zero=)`: which gradients the engine leaves in the step, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphs.costs import default_costs
from graphs.trace import trace
from graphs.training_step import optimizer_costs
from graphs.zero import Zero, ZeroError

SGD = torch.optim.SGD


def zero(stage: int, **config: Any) -> Zero:
    section = {"stage": stage, "reduce_bucket_size": 100}
    return Zero(n_ranks=2, config={"zero_optimization": section, **config})


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def traced(model: nn.Sequential, given: Zero, **options: Any) -> Any:
    asked = {"optimizer": SGD, "loss": lambda output, _: output.square().mean(), **options}
    return trace(model, torch.zeros(4, 8, dtype=model[0].weight.dtype), zero=given, **asked)


@pytest.mark.slow
def test_stage_2_frees_each_gradient_and_stage_1_has_them_to_the_end() -> None:
    kept = {}
    for stage in (1, 2, 3):
        graph = traced(layers(), zero(stage))
        made = {t.name for t in graph.tensors if t.kind == "gradient" and t.name in graph.producer}
        assert len(made) == 6
        kept[stage] = made.intersection(graph.outputs)
        takes = [node for node in graph.nodes if node.op == "gradient taken"]
        assert len(takes) == (0 if stage == 1 else 6)
        least_bytes = 4 * 100 if stage < 3 else 2 * 4 * 100  # gloo's copy; in stage 2 of nothing
        assert all(node.workspace_bytes >= least_bytes for node in takes)
    assert (len(kept[1]), len(kept[2]), len(kept[3])) == (6, 0, 0)


def test_a_rank_of_stage_3_counts_frozen_parameters_in_their_own_dtype() -> None:
    class Upcast(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.double()).to(x.dtype)

    model = nn.Sequential(nn.Linear(8, 8), Upcast(8, 8, dtype=torch.float64))
    model[1].requires_grad_(False)
    graph = traced(model, zero(3))
    n_bytes = {tensor.name: tensor.size_bytes for tensor in graph.tensors}
    whole_bytes = (64 + 8) * (4 + 8)
    assert n_bytes["zero: whole parameters"] == whole_bytes
    parts = [n_bytes[name] for name in graph.meta.parameters.values()]
    assert sum(parts) == whole_bytes / 2


def test_the_optimizer_steps_one_flat_part_in_32_bits() -> None:
    model = layers().to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    device = torch.device("cpu")
    found = optimizer_costs(
        optimizer, model, device=device, costs=default_costs(device), parts=[1000]
    )
    assert found["state_bytes"] == 2 * 4 * 1000 + 4  # and the count of steps
    assert not optimizer.state


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (zero(2), {"optimizer": None}, "give optimizer="),
        (zero(2), {"fsdp": 2}, "cannot be combined with fsdp"),
        (zero(2), {"passes": 2}, "cannot be combined with passes"),
        (zero(1), {"gradients": "accumulate"}, "engine starts each step without gradients"),
        (zero(2, bf16={"enabled": True}), {}, "asks for bfloat16"),
    ],
)
def test_what_the_engine_runs_otherwise_is_refused(
    given: Zero, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ZeroError, match=words):
        traced(layers(), given, **options)


def test_parameters_of_two_dtypes_or_of_no_optimizer_are_refused() -> None:
    model = layers()
    model.register_parameter("other", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    with pytest.raises(ZeroError, match="bfloat16, float32"):
        traced(model, zero(2))
    with pytest.raises(ZeroError, match=r"0\.weight is trained, but not by the optimizer"):
        traced(layers(), zero(2), optimizer=lambda model: SGD(model[1].parameters()))
