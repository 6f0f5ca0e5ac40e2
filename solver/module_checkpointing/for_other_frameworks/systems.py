"""The activation-checkpointing settings of other training systems, as regions to simulate.

Each candidate is a setting as the system takes it, together with the regions of the step that are
recomputed under it. They follow the code of these releases, against which
`benchmarks/emitted_settings.py` checks every setting: megatron-core 0.16.1 (`TransformerConfig`,
`TransformerBlock`), deepspeed 0.19.8 (`runtime/config.py`, `PipelineModule`), axolotl 0.19.0
(`utils/schemas`), torchtitan 0.3.0 (`distributed/activation_checkpoint.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from graphs.graph import Graph, Node
from solver.methods import segment_counts
from solver.module_checkpointing.for_other_frameworks.model_layers import (
    FUSED_ATTENTION,
    Layer,
    attention_nodes,
    mlp_parts,
    norm_parts,
)
from solver.module_checkpointing.regions import CheckpointRegion

MATRIX_PRODUCT = "aten.mm.default"
COMPUTE_INTENSIVE = FUSED_ATTENTION | {
    MATRIX_PRODUCT,
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.convolution.default",
    "aten.linear.default",
    "aten.max.default",
    "aten.topk.default",
    "aten.upsample_bilinear2d.vec",
    "aten._scaled_mm.default",
    "aten._flash_attention_forward.default",
    "aten._efficient_attention_forward.default",
}
"""Operators that torchtitan's selective checkpointing saves, except for every second matrix
product."""


@dataclass(frozen=True)
class Candidate:
    """A setting as the system takes it (text), and the regions that are recomputed under it."""

    text: str
    regions: tuple[CheckpointRegion, ...]


Family = tuple[Candidate, ...]
"""Candidates of one kind, in the order of how much they recompute, the least first."""


@dataclass(frozen=True)
class System:
    """One training system.

    title: its name for people.
    families: (graph, layers) -> the candidates, grouped by kind.
    note: a sentence on what the setting refers to ("": none).
    """

    title: str
    families: Callable[[Graph, Sequence[Layer]], Iterator[Family]]
    note: str = ""


def _region(
    nodes: Sequence[Node],
    *,
    saved: Sequence[Node] = (),
    stops_early: bool = False,
    drops_output: bool = False,
) -> CheckpointRegion:
    """A region of these nodes. Unread results of saved nodes are kept, since policies save nodes by
    kind; most systems recompute up to the last node."""
    return CheckpointRegion(
        tuple(node.name for node in nodes),
        saved=frozenset(node.name for node in saved),
        stops_early=stops_early,
        keeps_unread=True,
        drops_output=drops_output,
    )


def _whole_layers(layers: Sequence[Layer], *, per_region: int = 1) -> tuple[CheckpointRegion, ...]:
    """Consecutive regions of `per_region` whole layers each."""
    return tuple(
        _region([node for layer in layers[start : start + per_region] for node in layer.nodes])
        for start in range(0, len(layers), per_region)
    )


def _megatron(graph: Graph, layers: Sequence[Layer]) -> Iterator[Family]:
    """Megatron-LM: none, selective, or full recomputation by the methods block and uniform."""
    yield (Candidate("", ()),)
    yield _megatron_selective(graph, layers)
    full = "--recompute-granularity full --recompute-method"
    yield tuple(
        Candidate(f"{full} block --recompute-num-layers {n}", _whole_layers(layers[:n]))
        for n in range(1, len(layers) + 1)
    )
    for n in segment_counts(len(layers)):
        setting = f"{full} uniform --recompute-num-layers {n}"
        yield (Candidate(setting, _whole_layers(layers, per_region=n)),)


def _megatron_selective(graph: Graph, layers: Sequence[Layer]) -> Family:
    """Every set of those kinds of submodules that the layers have."""
    regions_of: dict[str, list[CheckpointRegion]] = {"core_attn": [], "layernorm": [], "mlp": []}
    for layer in layers:
        if attention := attention_nodes(layer):
            regions_of["core_attn"].append(_region(attention))
        for nodes in norm_parts(graph, layer):
            regions_of["layernorm"].append(_region(nodes, drops_output=True))
        regions_of["mlp"] += map(_region, mlp_parts(layer))
    modules = [module for module, regions in regions_of.items() if regions]
    return tuple(
        Candidate(
            f"--recompute-granularity selective --recompute-modules {' '.join(chosen)}",
            tuple(region for module in chosen for region in regions_of[module]),
        )
        for n_modules in range(1, len(modules) + 1)
        for chosen in combinations(modules, n_modules)
    )


def _deepspeed(graph: Graph, layers: Sequence[Layer]) -> Iterator[Family]:
    """DeepSpeed: no checkpoints, or one around every n consecutive layers, for several n."""
    yield (Candidate(_deepspeed_text(len(layers), per_region=0), ()),)
    for per_region in segment_counts(len(layers)):
        setting = _deepspeed_text(len(layers), per_region=per_region)
        yield (Candidate(setting, _whole_layers(layers, per_region=per_region)),)


def _deepspeed_text(n_layers: int, *, per_region: int) -> str:
    """The part of DeepSpeed's configuration file. per_region: layers per checkpoint (0: none)."""
    checkpointing: dict[str, object] = {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    }
    if per_region:
        checkpointing["number_checkpoints"] = -(-n_layers // per_region)
    block = {
        "pipeline": {"activation_checkpoint_interval": per_region},
        "activation_checkpointing": checkpointing,
    }
    return json.dumps(block, indent=2)


AXOLOTL_OPS = {
    "aten::mm": frozenset({"aten.mm.default"}),
    "aten::addmm": frozenset({"aten.addmm.default"}),
    "attention": FUSED_ATTENTION,
}


def _axolotl(graph: Graph, layers: Sequence[Layer]) -> Iterator[Family]:
    """axolotl: no checkpoints, or one around each layer that saves some kinds of operators."""
    yield (Candidate("gradient_checkpointing: false", ()),)
    seen: set[frozenset[str]] = set()
    for words in ((), ("aten::mm", "aten::addmm", "attention"), ("aten::mm",), ("attention",)):
        ops = frozenset(op for word in words for op in AXOLOTL_OPS[word])
        regions = tuple(
            _region(layer.nodes, saved=[n for n in layer.nodes if n.op in ops], stops_early=True)
            for layer in layers
        )
        saved = frozenset(name for region in regions for name in region.saved)
        if saved in seen:
            continue  # a word for an op that these layers do not have changes nothing
        seen.add(saved)
        text = "gradient_checkpointing: true\n"
        text += "gradient_checkpointing_kwargs:\n  use_reentrant: false"
        if words:
            text += f"\nselective_checkpointing:\n  save: {json.dumps(words)}"
        yield (Candidate(text, regions),)


def _torchtitan(graph: Graph, layers: Sequence[Layer]) -> Iterator[Family]:
    """torchtitan: none, selective, or full checkpointing of each layer."""
    yield (Candidate("activation-checkpoint:none", ()),)
    selective = []
    for layer in layers:
        products = [node for node in layer.nodes if node.op == MATRIX_PRODUCT]
        recomputed = {node.name for node in products[1::2]}
        saved = [n for n in layer.nodes if n.op in COMPUTE_INTENSIVE and n.name not in recomputed]
        selective.append(_region(layer.nodes, saved=saved))
    yield (Candidate("activation-checkpoint:selective", tuple(selective)),)
    yield (Candidate("activation-checkpoint:full", _whole_layers(layers)),)


SYSTEMS: Mapping[str, System] = {
    "megatron": System(
        "Megatron-LM",
        _megatron,
        "The layers are those of one pipeline stage. A graph of one device: neither tensor, "
        "sequence nor pipeline parallelism is in these figures.",
    ),
    "deepspeed": System(
        "DeepSpeed",
        _deepspeed,
        "pipeline.activation_checkpoint_interval is read by a PipelineModule; any other model "
        "calls deepspeed.checkpointing.checkpoint around that many layers itself.",
    ),
    "axolotl": System("axolotl", _axolotl),
    "torchtitan": System(
        "torchtitan",
        _torchtitan,
        "A subcommand of its trainer; in a configuration, activation_checkpoint=SelectiveAC."
        "Config(), FullAC.Config() or None.",
    ),
}
