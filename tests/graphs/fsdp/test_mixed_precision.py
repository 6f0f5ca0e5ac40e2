"""A step of FSDP2 with a policy for mixed precision."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from checkpoint_solver.cli.command import main
from graphs.fsdp.spec import (
    MixedPrecision,
    Sharding,
    ShardingError,
    accumulates_in_reduce_dtype,
    sharding_of,
)
from graphs.fsdp.transform import sharded
from graphs.graph import Graph
from graphs.model_calls import TraceError
from graphs.trace import trace
from graphs.training_step import with_accumulation
from solver import solve
from tests.graphs.fsdp.test_fsdp import N, held, layers


def in_half(graph: Graph) -> Graph:
    """The same step, of parameters that are stored with 8 bytes where 4 are computed with."""
    layout = graph.meta.parameter_layout
    stored = {path: {**entry, "stored_element_bytes": 8} for path, entry in layout.items()}
    return replace(graph, meta=replace(graph.meta, parameter_layout=stored))


def test_mixed_precision_step_by_step():
    """l0 is a group of 16 bytes as they are gathered, l1 with its 24 is the root's; both are stored
    and reduced in 8 bytes an element, or reduced in 2."""
    policy = MixedPrecision("float32", "float64")
    graph = sharded(in_half(layers(4, 6)), Sharding(n_ranks=N, groups=["l0"], mp_policy=policy))
    plain = sharded(layers(4, 6), Sharding(n_ranks=N, groups=["l0"]))
    assert graph.resident_bytes == plain.resident_bytes + (16 + 24) // 2
    now, before, x = held(graph), held(plain), 10
    for name in now.keys() & before.keys():
        more = {"fsdp: all gather, forward ()": 12, "fsdp: all gather, forward (l0)": 8}
        more["fsdp: all gather, backward (l0)"] = 8
        if "reduce" in name or "copy in" in name or name == "fsdp: reshard, backward (l0)":
            continue
        assert now[name] == before[name] + more.get(name, 0), name  # shards are cast
    root, of_l0 = 2 * 24, 2 * 16  # as they are reduced
    gradient = 2 * 16  # of l0, and its whole parameters
    assert now["fsdp: copy in, backward ()"] == gradient + x + 24 + root
    assert now["fsdp: reduce scatter, backward ()"] == gradient + x + root + root // 2
    assert now["fsdp: copy in, backward (l0)"] == root // 2 + x + 16 + of_l0
    assert now["fsdp: reduce scatter, backward (l0)"] == root // 2 + x + of_l0 + of_l0 // 2
    assert not [name for name in now if "cast" in name]  # reduced as they are stored

    less = sharded(
        in_half(layers(4, 6)),
        Sharding(
            n_ranks=N, groups=["l0"], mp_policy=MixedPrecision("float32", "bfloat16"), n_replicas=2
        ),
    )
    now = held(less)
    root, of_l0 = 24 // 2, 16 // 2
    assert now["fsdp: cast gradients, backward ()"] == gradient + x + root + root // 2 + 24
    # with replicas what was reduced stays to the end, beside the gradients that it was cast to
    last = now["fsdp: cast gradients, backward (l0)"]
    assert last == root // 2 + 24 + x + of_l0 + of_l0 // 2 + 16


def with_release(graph: Graph, release: str) -> Graph:
    return replace(graph, meta=graph.meta.with_environment(torch=release))


@pytest.mark.parametrize(("release", "element_bytes"), [("2.14.1", 4), ("2.15.0", 8)])
def test_gradients_are_reduced_as_stored_from_torch_2_15_on(release, element_bytes):
    """l0 computes in 4 bytes an element and is stored in 8; no dtype is given to reduce in."""
    layout = with_release(in_half(layers(4, 6)), release)
    for policy in (None, MixedPrecision("float32")):
        graph = sharded(layout, Sharding(n_ranks=N, groups=["l0"], mp_policy=policy))
        reduced = graph.tensor_by_name["fsdp: to be reduced, backward (l0)"]
        assert reduced.size_bytes == 4 * element_bytes
        assert graph.tensor_by_name["fsdp: shards of gradients (l0)"].size_bytes == 4 * 8 // N


@pytest.mark.parametrize("release", ["2.15.0", "3.0"])
def test_gradients_reduced_in_less_are_cast_when_they_are_there(release):
    policy = MixedPrecision(None, "bfloat16")
    sharding = Sharding(n_ranks=N, groups=["l0"], mp_policy=policy)
    before = sharded(with_release(layers(5, 6), "2.14.1"), sharding, on_cpu=True)
    graph = sharded(with_release(layers(5, 6), release), sharding, on_cpu=True)
    added = {n.name: n for n in graph.nodes if n.name not in before.node_by_name}
    assert list(added) == [
        f"fsdp: cast gradient, backward ({path}.weight)" for path in ("l1", "l0")
    ]
    copied = [g.node_by_name["fsdp: copy in, backward (l0)"] for g in (before, graph)]
    assert [node.workspace_bytes for node in copied] == [6 * 4, 6 * 2]  # rows are padded to six
    assert copied[1].inputs[0] == added["fsdp: cast gradient, backward (l0.weight)"].outputs[0]
    less = {"b0": 6 * 2, "fsdp: copy in, backward ()": (5 + 6) * 2}  # gradients of l1, and of l0
    less["fsdp: copy in, backward (l0)"] = (5 + 6) * 2  # a gradient and its padded copy
    now, then = held(graph), held(before)
    assert {name: then[name] - now[name] for name in less} == less


@pytest.mark.parametrize(("reduce_dtype", "workspace_bytes"), [("float64", 0), ("bfloat16", 8)])
def test_autograd_adds_to_sums_of_another_dtype_from_torch_2_15_on(reduce_dtype, workspace_bytes):
    """So each gradient is added when it is there, and not at the end of its group."""
    policy = MixedPrecision("float32", reduce_dtype)
    whole = Sharding(n_ranks=N, groups=["l0"], mp_policy=policy, accumulates_whole=True)
    graph = with_accumulation(in_half(layers(4, 6)), {"g0": "w0", "g1": "w1"})
    before, now = (sharded(with_release(graph, r), whole) for r in ("2.14.1", "2.15.0"))
    names = [node.name for node in now.nodes]
    of_root = "fsdp: add gradient, backward (l1.weight)"
    assert names[names.index("b1") + 1] == of_root
    names = [node.name for node in before.nodes]
    assert names.index(of_root) > names.index("b0")
    added = now.node_by_name["fsdp: add gradient, backward (l0.weight)"]
    assert added.workspace_bytes == workspace_bytes  # a smaller sum: the gradient is cast before
    assert sum(t.size_bytes for t in now.resident if t.kind == "gradient") == sum(
        t.size_bytes for t in before.resident if t.kind == "gradient"
    )


def test_dtypes_of_single_parameters_are_refused():
    class Policy(MixedPrecision):
        param_dtype_override_fn = staticmethod(lambda parameter: None)

    with pytest.raises(ShardingError, match="param_dtype_override_fn in mp_policy: dtypes"):
        Sharding(2, mp_policy=Policy("bfloat16"))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("bfloat16", "mp_policy is 'bfloat16'; expected a torch.distributed.fsdp.MixedPrecision"),
        (
            {"param_dtype": "int8"},
            "param_dtype is 'int8'; expected None, or one of bfloat16, float16",
        ),
        ({"reduce_dtype": 2}, "reduce_dtype is 2; expected None, or one of"),
        ({"cast_forward_inputs": 1}, "cast_forward_inputs is 1; expected a bool"),
        ({"colour": "red"}, "mp_policy is {'colour': 'red'}"),
    ],
)
def test_policies_that_are_none(policy, words):
    with pytest.raises(ShardingError, match=words):
        Sharding(2, mp_policy=policy)


class Tower(nn.Module):
    """Blocks with a buffer of their own, called by keyword."""

    def __init__(self, n_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(n_blocks))
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(input=x * self.scale).relu()
        return x.sum()


@pytest.mark.slow
def test_a_step_is_traced_in_the_dtypes_of_the_policy():
    model, batch = Tower(), torch.randn(4, 8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharding = Sharding(N, mp_policy=policy)
    assert sharding.mp_policy == MixedPrecision("bfloat16", "float32")
    graph = trace(model, batch, fsdp=sharding, optimizer=torch.optim.AdamW)
    read = sharding_of(json.loads(json.dumps(dict(graph.meta.environment))))
    assert read.mp_policy == sharding.mp_policy
    words = "per rank of 2, FSDP2, computed in bfloat16, gradients reduced in float32"
    assert words in repr(solve(graph, budget="1MB"))
    plain = trace(model, batch, fsdp=N, optimizer=torch.optim.AdamW)
    for kind in ("parameter", "optimizer_state", "buffer", "input"):
        sizes = [sum(t.size_bytes for t in g.resident if t.kind == kind) for g in (graph, plain)]
        assert sizes[0] == sizes[1] > 0, kind
    # what a block is called with is cast outside of it, as is the batch; the buffer is not
    casts = [n for n in graph.forward_nodes if "_to_copy" in n.op or "convert" in n.op]
    assert [node.module for node in casts] == ["", "blocks", "blocks"]
    of_blocks = [n for n in graph.forward_nodes if n.module in ("blocks.0", "blocks.1")]
    assert [graph.tensor_by_name[n.outputs[0]].size_bytes for n in of_blocks] == [4 * 8 * 2] * 2
    assert model.blocks[0].weight.dtype == torch.float32
    assert type(model) is Tower
    uncast = Sharding(N, mp_policy=MixedPrecision(None, None, cast_forward_inputs=True))
    same = trace(model, batch, fsdp=uncast, optimizer=torch.optim.AdamW)
    assert same.graph_id == plain.graph_id


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("policy", "element_bytes"),
    [
        (None, 4),
        (MixedPrecision("bfloat16"), 2),
        (MixedPrecision("bfloat16", "float32"), 4),
        (MixedPrecision("bfloat16", "float64"), 8),
    ],
)
def test_whole_gradients_that_add_up(policy, element_bytes):
    model, batch = Tower(), torch.randn(4, 8)
    whole = Sharding(N, mp_policy=policy, accumulates_whole=True)
    graph = trace(model, batch, gradients="accumulate", fsdp=whole)
    n_elements = sum(p.numel() for p in model.parameters())
    found = [t.size_bytes for t in graph.resident if t.kind == "gradient"]
    if policy == MixedPrecision("bfloat16") and accumulates_in_reduce_dtype(graph.meta.environment):
        element_bytes = 4  # from torch 2.15 on they are summed in the dtype of the shards
    assert sum(found) == element_bytes * n_elements
    names = [node.name for node in graph.nodes]
    for path, _ in model.named_parameters():
        block = path.rpartition(".")[0]
        added = names.index(f"fsdp: add gradient, backward ({path})")
        assert added < names.index(f"fsdp: copy in, backward ({block})")
    assert "gradients accumulated whole" in repr(solve(graph, budget="1MB"))
    with pytest.raises(ShardingError, match="no gradients exist when the step starts"):
        trace(model, batch, fsdp=whole)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.lock = threading.Lock()

    def forward(self, x):
        return self.inner(x).square().mean()


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        own = self.inner.forward
        self.inner.forward = lambda x: own(x)

    def forward(self, x):
        return self.inner(x).square().mean()


@pytest.mark.parametrize(
    ("model", "words"),
    [(Locked, "cannot be copied .*lock"), (Replaced, "inner has a forward of its own")],
)
def test_a_model_that_mixed_precision_cannot_copy_is_named(model, words) -> None:
    trace(model(), (torch.randn(4, 8),), fsdp=Sharding(2))
    with pytest.raises(TraceError, match=words):
        trace(
            model(),
            (torch.randn(4, 8),),
            fsdp=Sharding(2, mp_policy=MixedPrecision("bfloat16")),
        )


@pytest.mark.parametrize("dtypes", [",", " "])
def test_a_precision_without_a_dtype_is_refused(dtypes, capsys) -> None:
    words = ["--budget", "1GB", "--fsdp", "2", "--fsdp-precision", dtypes]
    assert main(["examples/gpt2.py", *words]) == 2
    assert "names no dtype" in capsys.readouterr().err
