"""What other systems let a person set about activation checkpointing, as stretches to be judged.

Each system's candidates are settings in its own words beside the stretches of the step that run
again under it. Taken from the code of these releases, against which
`benchmarks/emitted_settings.py` checks every setting: megatron-core 0.16.1 (`TransformerConfig`,
`TransformerBlock`), deepspeed 0.19.8 (`runtime/config.py`, `PipelineModule`), axolotl 0.19.0
(`utils/schemas`), torchtitan 0.3.0 (`distributed/activation_checkpoint.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from graphs.graph import Graph, Node
from solver.emit.model_layers import FUSED_ATTENTION, Layer, attention_nodes, mlp_parts, norm_parts
from solver.methods import segment_counts
from solver.module_checkpointing import Stretch

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
"""What torchtitan's selective checkpointing saves, but for every second matrix product."""


@dataclass(frozen=True)
class Candidate:
    """text: the setting in the system's words. stretches: what runs again under it."""

    text: str
    stretches: tuple[Stretch, ...]


Family = tuple[Candidate, ...]
"""Candidates of one kind, those that recompute least first."""


@dataclass(frozen=True)
class System:
    """title: for a person. families: (graph, layers) -> the candidates, by kind. note: a sentence
    on what the setting is about, "" for none.
    """

    title: str
    families: Callable[[Graph, Sequence[Layer]], Iterator[Family]]
    note: str = ""


def _whole(layers: Sequence[Layer], *, per_stretch: int, stops_early: bool) -> tuple[Stretch, ...]:
    """Stretches of so many layers each, one after the other."""
    return tuple(
        Stretch(
            tuple(name for layer in layers[start : start + per_stretch] for name in layer.names),
            stops_early=stops_early,
        )
        for start in range(0, len(layers), per_stretch)
    )


def _megatron(graph: Graph, layers: Sequence[Layer]) -> Iterator[Family]:
    yield (Candidate("", ()),)
    yield _megatron_selective(graph, layers)
    yield tuple(
        Candidate(
            "--recompute-granularity full --recompute-method block "
            f"--recompute-num-layers {n_layers}",
            _whole(layers[:n_layers], per_stretch=1, stops_early=False),
        )
        for n_layers in range(1, len(layers) + 1)
    )
    for per_stretch in segment_counts(len(layers)):
        yield (
            Candidate(
                "--recompute-granularity full --recompute-method uniform "
                f"--recompute-num-layers {per_stretch}",
                _whole(layers, per_stretch=per_stretch, stops_early=False),
            ),
        )


def _megatron_selective(graph: Graph, layers: Sequence[Layer]) -> Family:
    """Every set of the submodules that these layers have."""
    stretches_of: dict[str, list[Stretch]] = {"core_attn": [], "layernorm": [], "mlp": []}
    for layer in layers:
        if attention_nodes(layer):
            stretches_of["core_attn"].append(Stretch(_names(attention_nodes(layer))))
        for nodes in norm_parts(graph, layer):
            stretches_of["layernorm"].append(Stretch(_names(nodes), drops_output=True))
        stretches_of["mlp"].extend(Stretch(_names(nodes)) for nodes in mlp_parts(layer))
    modules = [module for module, stretches in stretches_of.items() if stretches]
    return tuple(
        Candidate(
            f"--recompute-granularity selective --recompute-modules {' '.join(chosen)}",
            tuple(stretch for module in chosen for stretch in stretches_of[module]),
        )
        for n_modules in range(1, len(modules) + 1)
        for chosen in combinations(modules, n_modules)
    )


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _deepspeed(graph: Graph, layers: Sequence[Layer]) -> Iterator[Family]:
    yield (Candidate(_deepspeed_text(len(layers), per_stretch=0), ()),)
    for per_stretch in segment_counts(len(layers)):
        yield (
            Candidate(
                _deepspeed_text(len(layers), per_stretch=per_stretch),
                _whole(layers, per_stretch=per_stretch, stops_early=False),
            ),
        )


def _deepspeed_text(n_layers: int, *, per_stretch: int) -> str:
    """The blocks of the configuration file. per_stretch: layers between checkpoints (0: none)."""
    block: dict[str, object] = {
        "pipeline": {"activation_checkpoint_interval": per_stretch},
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        },
    }
    if per_stretch:
        checkpointing = block["activation_checkpointing"]
        assert isinstance(checkpointing, dict)
        checkpointing["number_checkpoints"] = -(-n_layers // per_stretch)
    return json.dumps(block, indent=2)


def _axolotl(graph: Graph, layers: Sequence[Layer]) -> Iterator[Family]:
    yield (Candidate("gradient_checkpointing: false", ()),)
    on = "gradient_checkpointing: true\ngradient_checkpointing_kwargs:\n  use_reentrant: false"
    seen: set[frozenset[str]] = set()
    for saved in ((), ("aten::mm", "aten::addmm", "attention"), ("aten::mm",), ("attention",)):
        ops = frozenset(op for word in saved for op in _axolotl_ops(word))
        stretches = _saving(layers, partial(_is_among, ops), stops_early=True)
        kept = frozenset(name for stretch in stretches for name in stretch.saved)
        if kept in seen:
            continue  # a word for an op that these layers do not have says nothing
        seen.add(kept)
        text = on
        if saved:
            text += f"\nselective_checkpointing:\n  save: {json.dumps(list(saved))}"
        yield (Candidate(text, stretches),)


def _is_among(ops: frozenset[str], node: Node) -> bool:
    return node.op in ops


def _axolotl_ops(word: str) -> frozenset[str]:
    return FUSED_ATTENTION if word == "attention" else frozenset({f"aten.{word[6:]}.default"})


def _saving(
    layers: Sequence[Layer], saves: Callable[[Node], bool], *, stops_early: bool
) -> tuple[Stretch, ...]:
    """Every layer a stretch that keeps the outputs of what `saves` says, asked in graph order."""
    return tuple(
        Stretch(
            layer.names,
            saved=frozenset(node.name for node in layer.nodes if saves(node)),
            stops_early=stops_early,
        )
        for layer in layers
    )


def _torchtitan(graph: Graph, layers: Sequence[Layer]) -> Iterator[Family]:
    yield (Candidate("activation-checkpoint:none", ()),)
    stretches = tuple(
        stretch
        for layer in layers
        for stretch in _saving([layer], _alternating(), stops_early=False)
    )
    yield (Candidate("activation-checkpoint:selective", stretches),)
    yield (
        Candidate("activation-checkpoint:full", _whole(layers, per_stretch=1, stops_early=False)),
    )


def _alternating() -> Callable[[Node], bool]:
    """For one layer: what computes much is saved, but for every second product of matrices."""
    n_products = 0

    def saves(node: Node) -> bool:
        nonlocal n_products
        if node.op == MATRIX_PRODUCT:
            n_products += 1
            return n_products % 2 == 1
        return node.op in COMPUTE_INTENSIVE

    return saves


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
