"""Plans for one rank of FSDP2: the transform by hand, the options, and two real ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from checkpoint_solver.cli.command import main
from graphs.fsdp.module_blocks import default_groups
from graphs.fsdp.spec import Sharding, ShardingError, sharding_of
from graphs.fsdp.transform import GLOO_SCALARS_BYTES, sharded
from graphs.graph import Graph, Node, Tensor
from graphs.trace import trace
from graphs.training_step.around import with_optimizer
from scheduler_runtime import apply
from scheduler_runtime.export import to_torch_checkpoint
from scheduler_runtime.fsdp import shard
from solver import report, solve
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from solver.sizes_deadlines_progress import BudgetError
from tests.scheduler_runtime.export.test_export import small_gpt2, tokens
from tests.support.budgets import baseline_peak_bytes
from tests.support.command import json_of
from tests.support.paths import GPT2
from tests.support.ranks import ranks_of

N = 2


def layers(*rows: int, frozen: int = 0) -> Graph:
    """Layers l0, l1, ..: each reads x of 10 bytes and its weight, of so many rows of 4 bytes,
    and writes x of 10 bytes; the first `frozen` have no gradient."""
    n_layers = len(rows)
    nodes = [
        Node(f"f{i}", "mm", (f"x{i}", f"w{i}"), (f"x{i + 1}",), 1.0, module=f"l{i}")
        for i in range(n_layers)
    ]
    tensors = [Tensor("x0", 10, "input"), Tensor(f"d{n_layers}", 10, "tangent")]
    for i in reversed(range(n_layers)):
        tensors += [Tensor(f"x{i + 1}", 10), Tensor(f"w{i}", 4 * rows[i], "parameter")]
        if i < frozen:
            continue
        tensors += [Tensor(f"g{i}", 4 * rows[i], "gradient")]
        made = [f"g{i}"]
        if i > frozen:
            tensors.append(Tensor(f"d{i}", 10))
            made.append(f"d{i}")
        inputs = (f"d{i + 1}", f"x{i}", f"w{i}")
        nodes.append(
            Node(f"b{i}", "mm", inputs, tuple(made), 1.0, phase="backward", module=f"l{i}")
        )
    return Graph(
        nodes=tuple(nodes),
        tensors=tuple(tensors),
        outputs=(f"x{n_layers}", *(f"g{i}" for i in range(frozen, n_layers))),
        meta={
            "parameter_layout": {
                f"l{i}.weight": {
                    "shape": [rows[i]],
                    "element_bytes": 4,
                    "tensor": f"w{i}",
                    "gradient": f"g{i}" if i >= frozen else None,
                }
                for i in range(n_layers)
            }
        },
    )


def held(graph: Graph) -> dict[str, int]:
    """Non-resident bytes on the device while each node runs."""
    schedule = baseline(graph)
    live = simulate(graph, schedule).live_bytes
    return {
        op.node: n_bytes - graph.resident_bytes
        for op, n_bytes in zip(schedule.ops, live, strict=True)
        if hasattr(op, "node")
    }


def test_what_is_resident_are_shards_padded_to_the_largest():
    graph = sharded(layers(4, 5, 6), Sharding(n_ranks=4, groups=["l0", "l1"]))
    sizes = {name: graph.tensor_by_name[name].size_bytes for name in ("w0", "w1", "w2")}
    assert sizes == {"w0": 4, "w1": 8, "w2": 8}
    assert graph.resident_bytes == 10 + 10 + 4 + 8 + 8
    kinds = [graph.tensor_by_name[n].kind for n in graph.outputs]
    assert kinds == ["activation", "gradient", "gradient", "gradient"]
    assert sum(graph.tensor_by_name[n].size_bytes for n in graph.outputs[1:]) == 4 + 8 + 8


def test_two_groups_and_the_root_step_by_step():
    """l0 and l1 are groups of 16 and 8 bytes, l2 with its 24 is the root's."""
    graph = sharded(layers(4, 2, 6), Sharding(n_ranks=N, groups=["l0", "l1"]))
    root, x = 24, 10
    assert list(held(graph).items()) == [
        ("fsdp: all gather, forward ()", 24),
        ("fsdp: copy out, forward ()", 24 + root),
        ("fsdp: all gather, forward (l0)", root + 24 + 16),  # the root's buffer is still there
        ("fsdp: copy out, forward (l0)", root + 16 + 16),
        ("f0", root + 16 + 16 + x),
        ("fsdp: reshard, forward (l0)", root + 16 + 16 + x),
        ("fsdp: all gather, forward (l1)", root + 16 + 8 + x),
        ("fsdp: copy out, forward (l1)", root + 8 + 8 + x),
        ("f1", root + 8 + 8 + 2 * x),
        ("fsdp: reshard, forward (l1)", root + 8 + 8 + 2 * x),
        ("f2", root + 8 + 3 * x),  # the last buffer stays to the end of the forward pass
        ("fsdp: end of forward, forward ()", root + 8 + 3 * x),
        ("fsdp: all gather, backward (l1)", root + 8 + 3 * x),  # before the root's backward
        ("b2", root + 8 + 3 * x + x + 24),
        ("fsdp: copy out, backward (l1)", root + 8 + 8 + 3 * x + 24),
        ("fsdp: all gather, backward (l0)", root + 8 + 16 + 3 * x + 24),
        ("b1", root + 8 + 16 + 4 * x + 24 + 8),
        ("fsdp: reshard, backward (l1)", root + 8 + 16 + 2 * x + 24 + 8),
        ("fsdp: copy in, backward (l1)", root + 16 + 2 * x + 24 + 8 + 8),
        ("fsdp: reduce scatter, backward (l1)", root + 16 + 2 * x + 24 + 8 + 4),
        ("fsdp: copy out, backward (l0)", root + 16 + 16 + 2 * x + 24 + 8 + 4),
        # its input needs no gradient: all of it stays to the end, after the root's
        ("b0", root + 16 + 2 * x + 24 + 8 + 4 + 16),
        ("fsdp: reshard, backward ()", root + 16 + x + 24 + 8 + 4 + 16),
        ("fsdp: copy in, backward ()", 16 + x + 24 + 24 + 4 + 16),
        ("fsdp: reduce scatter, backward ()", 16 + x + 24 + 4 + 16 + 12),
        ("fsdp: reshard, backward (l0)", 16 + x + 24 + 4 + 16 + 12),
        ("fsdp: copy in, backward (l0)", x + 4 + 16 + 12 + 16),
        ("fsdp: reduce scatter, backward (l0)", x + 4 + 12 + 16 + 8),
    ]


def test_parameters_that_are_kept_are_gathered_once():
    """As above; l0 and l1 keep their 16 and 8 bytes from forward to backward."""
    options = {"n_ranks": N, "groups": ["l0", "l1"]}
    resharded = held(sharded(layers(4, 2, 6), Sharding(**options)))
    kept = held(sharded(layers(4, 2, 6), Sharding(**options, reshard_after_forward=False)))
    gathers = [name for name in kept if "all gather" in name]
    assert gathers == [f"fsdp: all gather, forward ({path})" for path in ("", "l0", "l1")]
    assert "fsdp: reshard, forward (l0)" not in kept
    assert kept["f0"] == resharded["f0"]
    assert kept["f2"] == resharded["f2"] + 16 + 8
    root, x = 24, 10
    assert kept["b2"] == root + 16 + 8 + 3 * x + x + 24  # nothing is in a buffer
    assert kept["fsdp: reshard, backward ()"] == resharded["fsdp: reshard, backward ()"]


def test_replicas_reduce_in_place_and_hold_what_accumulates():
    one = sharded(layers(4, 2), Sharding(n_ranks=N, groups=["l0"]))
    two = sharded(layers(4, 2), Sharding(n_ranks=N, groups=["l0"], n_replicas=2))
    names = [node.name for node in two.nodes if node.op == "fsdp.all_reduce"]
    assert names == ["fsdp: all reduce, backward ()", "fsdp: all reduce, backward (l0)"]
    assert {k: v for k, v in held(two).items() if k not in names} == held(one)
    on_cpu = sharded(layers(4, 2), Sharding(n_ranks=N, groups=["l0"], n_replicas=2), on_cpu=True)
    assert on_cpu.node_by_name[names[1]].workspace_bytes == 8 + GLOO_SCALARS_BYTES
    assert sharding_of(two.meta.environment) == Sharding(N, ("l0",), n_replicas=2)
    assert "per rank of 2 x 2, FSDP2" in repr(solve(two, budget="1kB"))


def test_a_file_from_before_these_options_has_their_defaults():
    old = {"sharding": {"n_ranks": 2, "groups": ["a"]}}
    assert sharding_of(old) == Sharding(2, ("a",))
    with pytest.raises(ShardingError, match="expected only fields of Sharding"):
        sharding_of({"sharding": {"n_ranks": 2, "colour": "red"}})
    for groups in (None, "a", 1, [1]):
        with pytest.raises(ShardingError, match="groups is"):
            sharding_of({"sharding": {"n_ranks": 2, "groups": groups}})
    with pytest.raises(ShardingError, match="link is 5"):
        sharding_of({"sharding": {"n_ranks": 2, "link": 5}})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_replicas": 0}, "n_replicas is 0; expected a whole number of at least 1"),
        ({"accumulates_whole": 1}, "accumulates_whole is 1; expected a bool"),
        ({"reshard_after_forward": 2}, "reshard_after_forward is 2; expected True, False or None"),
    ],
)
def test_options_that_are_none(fields, words):
    with pytest.raises(ShardingError, match=words):
        Sharding(2, **fields)


def test_a_frozen_group_is_prefetched_and_never_used():
    graph = sharded(layers(4, 2, 2, frozen=1), Sharding(n_ranks=N, groups=["l0", "l1"]))
    flat = "fsdp: gathered, backward (l0)"
    assert [node.name for node in graph.consumers[flat]] == ["fsdp: end of backward, backward ()"]
    assert graph.nodes[-1].name == "fsdp: end of backward, backward ()"
    names = set(graph.node_by_name)
    assert "fsdp: copy out, backward (l0)" not in names
    assert "fsdp: reduce scatter, backward (l0)" not in names


def test_the_cpu_takes_copies_more():
    graph = sharded(layers(3, 2), Sharding(n_ranks=N, groups=["l0"]), on_cpu=True)
    nodes = graph.node_by_name
    assert nodes["fsdp: all gather, forward (l0)"].workspace_bytes == 16
    assert nodes["fsdp: copy in, backward (l0)"].workspace_bytes == 16  # rows are padded: 3 to 4
    assert nodes["fsdp: copy in, backward ()"].workspace_bytes == 0
    reduced_bytes = nodes["fsdp: reduce scatter, backward (l0)"].workspace_bytes
    assert reduced_bytes == 16 + GLOO_SCALARS_BYTES


def test_the_optimizer_reads_shards_alone():
    graph = sharded(layers(4, 2), Sharding(n_ranks=N, groups=["l0"]))
    figures = {"name": "SGD", "state_bytes": 12, "workspace_bytes": 0, "time_s": 1.0}
    stepped = with_optimizer(graph, figures)
    assert set(stepped.nodes[-1].inputs) == {
        "w0",
        "w1",
        "optimizer_state",
        "fsdp: shards of gradients (l0)",
        "fsdp: shards of gradients ()",
    }
    with pytest.raises(ShardingError, match="then add the optimizer"):
        sharded(stepped, Sharding(n_ranks=N, groups=[]))
    with pytest.raises(ShardingError, match="sharded already: per rank of 2, FSDP2"):
        sharded(graph, Sharding(n_ranks=N, groups=[]))


@pytest.mark.parametrize("n_ranks", [1, 0, True, 2.0])
def test_a_number_of_ranks_that_is_none(n_ranks):
    with pytest.raises(ShardingError, match="n_ranks is"):
        Sharding(n_ranks=n_ranks)


class Shared(nn.Module):
    """One layer that runs twice, one whose weight the model reads itself, and tied ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.read = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(self.first(x)).relu())
        return self.last(self.read(x) @ self.read.weight).sum()


@pytest.mark.slow
def test_groups_that_fsdp2_could_not_run():
    model, batch = Shared(), torch.randn(2, 4)
    for groups, reason in (
        (["twice"], "'twice' runs several times"),
        (["read"], "'read.weight' of group 'read' is read by .* in module ''"),
        (["last"], r"shares a parameter with other modules \(first.weight, last.weight\)"),
        (["absent"], "not a module of the model"),
    ):
        with pytest.raises(ShardingError, match=reason):
            trace(model, batch, fsdp=Sharding(n_ranks=N, groups=groups))
    assert default_groups(model) == ("twice", "read")
    whole = trace(model, batch, fsdp=Sharding(n_ranks=N, groups=()))
    assert sharding_of(whole.meta.environment) == Sharding(n_ranks=N, groups=())
    half_bytes = sum(p.numel() * p.element_size() for p in model.parameters()) // 2
    resident = [t.size_bytes for t in whole.resident if t.kind == "parameter"]
    assert sum(resident) == half_bytes


@pytest.mark.slow
def test_gradients_that_accumulate_are_shards():
    model, batch = small_gpt2(0.0), tokens()
    graph = trace(model, batch, gradients="accumulate", fsdp=N, optimizer=torch.optim.AdamW)
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    by_kind = dict.fromkeys(("parameter", "gradient", "optimizer_state"), 0)
    for tensor in graph.resident:
        if tensor.kind in by_kind:
            by_kind[tensor.kind] += tensor.size_bytes
    n_steps = len(list(model.parameters()))  # a count of 4 bytes each, on the CPU
    assert by_kind == {
        "parameter": n_bytes // N,
        "gradient": n_bytes // N,
        "optimizer_state": 2 * n_bytes // N + 4 * n_steps,
    }
    simulate(graph, baseline(graph))


@pytest.mark.slow
def test_a_plan_for_one_rank_is_reported_and_exported_but_not_applied(tmp_path, capsys):
    model, batch = small_gpt2(0.0), tokens()
    plain = trace(model, batch, fsdp=N)
    solution = solve(model, batch, budget=int(0.8 * baseline_peak_bytes(plain)), fsdp=N)
    assert "per rank of 2, FSDP2" in repr(solution)
    report(solution)
    printed = " ".join(capsys.readouterr().out.split())
    assert "All figures are per rank of 2, FSDP2 (fully_shard on 3 modules" in printed
    solution.save(tmp_path / "schedule.json")
    for plan in (solution, tmp_path / "schedule.json"):
        with pytest.raises(ValueError, match="to_torch_checkpoint"):
            apply(copy.deepcopy(model), plan)
    exported = to_torch_checkpoint(model, solution)
    assert exported.peak_bytes <= solution.request.budget_bytes
    assert "(per rank of 2, FSDP2)" in str(exported)
    for module in exported.modules:
        assert not any(module.path != g and g.startswith(f"{module.path}.") for g in groups(plain))
    with alone() as mesh:
        with pytest.raises(ShardingError, match="step that is not sharded"):
            shard(model, solve(small_gpt2(0.0), batch, budget="1GB"), mesh=mesh)
        with pytest.raises(ShardingError, match=r"shape \(1,\), and the plan is for \(2,\)"):
            shard(model, solution, mesh=mesh)


@contextlib.contextmanager
def alone() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def groups(graph: Graph) -> tuple[str, ...]:
    sharding = sharding_of(graph.meta.environment)
    return sharding.groups or ()


def test_copies_to_the_host_are_refused():
    with pytest.raises(BudgetError, match="not planned with FSDP2, which runs exported plans"):
        solve(small_gpt2(0.0), tokens(), budget="1GB", fsdp=2, host_budget="1GB", host_link=1e9)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    file = tmp_path / "model.py"
    file.write_text(
        "from tests.scheduler_runtime.export.test_export import small_gpt2, tokens\n"
        "def get_model(): return small_gpt2(0.0)\n"
        "def get_batch(): return tokens()\n"
    )
    words = ["--budget", "1GB", str(file)]
    whole = json_of(capsys, *words)["baseline"]["memory_bytes"]
    answer = json_of(capsys, *words, "--fsdp", "4")
    assert answer["notes"][-1].startswith("All figures are per rank of 4, FSDP2")
    assert answer["baseline"]["memory_bytes"]["optimizer"] < 0.3 * whole["optimizer"]
    mixed = ["--fsdp", "4", "--fsdp-precision", "bfloat16,float32"]
    of_mixed = json_of(capsys, *words, *mixed)
    assert ", computed in bfloat16, gradients reduced in float32" in of_mixed["notes"][-1]
    memory = of_mixed["baseline"]["memory_bytes"]
    assert memory["optimizer"] == answer["baseline"]["memory_bytes"]["optimizer"]
    assert memory["activations"] < 0.75 * answer["baseline"]["memory_bytes"]["activations"]
    kept = ["--fsdp", "4", "--fsdp-reshard", "no", "--fsdp-replicas", "2"]
    of_kept = json_of(capsys, *words, *kept, "--fsdp-link", "ib-ndr")
    assert "All figures are per rank of 2 x 4, FSDP2" in of_kept["notes"][-1]
    assert of_kept["baseline"]["peak_bytes"] > answer["baseline"]["peak_bytes"]
    assert of_kept["baseline"]["time_s"] > answer["baseline"]["time_s"]  # waits for the link
    assert main([*words, "--fsdp", "2", "--fsdp-link", "string"]) == 2
    assert "--fsdp 2: the link is 'string'; one of nvlink2" in capsys.readouterr().err
    assert main([*words, "--fsdp-replicas", "2"]) == 2
    assert "--fsdp-replicas: only for FSDP2; give the number of ranks" in capsys.readouterr().err
    assert main([*words, "--fsdp", "2", "--fsdp-precision", "int8"]) == 2
    assert "--fsdp 2: param_dtype is 'int8'; expected None, or one of" in capsys.readouterr().err
    assert main([*words, "--fsdp-precision", "bfloat16"]) == 2
    assert "give the number of ranks, --fsdp 8" in capsys.readouterr().err
    assert main([*words, "--fsdp", "2", "--verify"]) == 2
    assert "--verify runs the step in one process" in capsys.readouterr().err
    graph = GPT2
    assert main(["--budget", "1GB", str(graph), "--fsdp", "2"]) == 2
    assert "--fsdp: not possible with a graph file" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("n_ranks", "cases"),
    [
        (2, ["tied", "mixed wide"]),
        (2, ["experts", "mixed experts"]),
        pytest.param(2, ["kept", "logits"], marks=pytest.mark.exhaustive),
        pytest.param(4, ["hybrid"], marks=pytest.mark.exhaustive),
        pytest.param(2, ["frozen", "adapters", "wide"], marks=pytest.mark.exhaustive),
        pytest.param(
            2,
            ["mixed", "mixed adapters", "mixed uncast", "mixed output"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(4, ["hybrid kept", "hybrid mixed"], marks=pytest.mark.exhaustive),
        pytest.param(
            2, ["summed", "mixed summed", "mixed summed wide"], marks=pytest.mark.exhaustive
        ),
    ],
)
def test_what_each_rank_holds_is_what_was_predicted(n_ranks, cases):
    found = ranks_of("fsdp_ranks", str(n_ranks), *cases)
    assert {each["case"] for each in found} == set(cases)
    assert {each["rank"] for each in found} == set(range(n_ranks))
    for each in found:
        assert each["same"], each
        assert 0.95 * each["predicted_bytes"] <= each["measured_bytes"], each
        assert each["measured_bytes"] <= each["predicted_bytes"], each
    for case in {each["case"] for each in found}:
        plain, *planned = [e for e in found if e["case"] == case and e["rank"] == 0]
        assert plain["n_modules"] == plain["n_losses"] == 0
        assert all(e["n_modules"] > 0 or e["n_losses"] == 1 for e in planned)
        assert all(e["measured_bytes"] < plain["measured_bytes"] for e in planned)
