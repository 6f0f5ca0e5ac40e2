"""Whether the settings of `solve --emit` are ones that the named systems take.

    python -m venv systems && systems/bin/pip install megatron-core==0.16.1 axolotl==0.19.0 \\
        torchtitan==0.3.0 deepspeed==0.19.8
    PYTHONPATH=. systems/bin/python -m benchmarks.emitted_settings \\
        [--out benchmarks/results/emitted_settings.json]

Every candidate that `solver.emit.systems` offers for a small model is read by the system's own code
and the values are looked up in what it read: Megatron-LM's by the fields and checks of
`TransformerConfig` (its flags are the names of these fields), DeepSpeed's by its configuration
classes, axolotl's by its pydantic schema, torchtitan's by a tyro parser of its policy type. A
system that is not installed is said to be so. It has to be an environment of its own: these
packages pin others that the tests need newer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from graphs.graph import Graph, Node, Tensor
from solver.emit import SYSTEMS, layers

N_LAYERS = 4


def layered_graph(n_layers: int) -> Graph:
    """Layers of a norm, attention and an MLP, as their operators and modules; sizes are of no
    account here."""
    tensors = [Tensor("x", 64, "input"), Tensor("weight", 64, "parameter")]
    nodes: list[Node] = []
    last = "x"

    def add(op: str, module: str, *, reads_weight: bool) -> None:
        nonlocal last
        name = f"t{len(nodes)}"
        tensors.append(Tensor(name, 64, "activation"))
        inputs = (last, "weight") if reads_weight else (last,)
        nodes.append(
            Node(f"n{len(nodes)}", op, inputs, (name,), time_s=1.0, phase="forward", module=module)
        )
        last = name

    for i in range(n_layers):
        add("aten.native_layer_norm.default", f"layers.{i}.norm", reads_weight=True)
        add("aten.mm.default", f"layers.{i}.attention.in", reads_weight=True)
        add(
            "aten._scaled_dot_product_flash_attention.default",
            f"layers.{i}.attention",
            reads_weight=False,
        )
        add("aten.mm.default", f"layers.{i}.mlp.up", reads_weight=True)
        add("aten.mm.default", f"layers.{i}.mlp.down", reads_weight=True)
    return Graph(nodes=tuple(nodes), tensors=tuple(tensors), outputs=(last,))


def megatron(text: str) -> dict[str, Any]:
    """Build a TransformerConfig of the flags; it checks them as it is built."""
    module = importlib.import_module("megatron.core.transformer.transformer_config")
    given: dict[str, Any] = {}
    words = text.split()
    for word in words:
        if word.startswith("--"):
            field = word.removeprefix("--").replace("-", "_")
            given[field] = []
        else:
            given[field].append(word)
    fields = {
        name: values
        if name == "recompute_modules"
        else int(values[0])
        if name == "recompute_num_layers"
        else values[0]
        for name, values in given.items()
    }
    read = module.TransformerConfig(
        num_layers=N_LAYERS, hidden_size=64, num_attention_heads=4, **fields
    )
    return {name: (value, getattr(read, name)) for name, value in fields.items()}


def deepspeed(text: str) -> dict[str, Any]:
    """Read both blocks; a key that its defaults do not have would be passed over in silence."""
    config = importlib.import_module("deepspeed.runtime.config")
    blocks = importlib.import_module("deepspeed.runtime.activation_checkpointing.config")
    given = json.loads(text)
    pipeline = config.get_pipeline_config({})
    assert set(given["pipeline"]) <= set(pipeline), given["pipeline"]
    assert set(given["activation_checkpointing"]) <= set(blocks.ACT_CHKPT_DEFAULT)
    pipeline = config.get_pipeline_config(given)
    read = blocks.DeepSpeedActivationCheckpointingConfig(given)
    found = {key: (value, pipeline[key]) for key, value in given["pipeline"].items()}
    for key, value in given["activation_checkpointing"].items():
        found[key] = (value, getattr(read, key))
    return found


def axolotl(text: str) -> dict[str, Any]:
    """Validate the YAML within the smallest configuration that the schema takes."""
    import yaml

    schema = importlib.import_module("axolotl.utils.schemas.config")
    given = yaml.safe_load(text)
    assert set(given) <= set(schema.AxolotlInputConfig.model_fields), given
    read = schema.AxolotlInputConfig.model_validate(
        {
            "base_model": "model",
            "learning_rate": 1e-4,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "datasets": [{"path": "data", "type": "alpaca"}],
            **given,
        }
    )
    found = {key: (value, getattr(read, key)) for key, value in given.items()}
    if "selective_checkpointing" in given:
        found["selective_checkpointing"] = (
            given["selective_checkpointing"]["save"],
            read.selective_checkpointing.save,
        )
    return found


def torchtitan(text: str) -> dict[str, Any]:
    """Parse the subcommand by the policy's own type, as the trainer's parser does."""
    from dataclasses import make_dataclass

    import tyro

    policies = importlib.import_module("torchtitan.distributed.activation_checkpoint")
    trainer = make_dataclass(
        "Trainer", [("activation_checkpoint", policies.ActivationCheckpointingConfig)]
    )
    read = tyro.cli(trainer, args=[text]).activation_checkpoint
    asked = {
        "activation-checkpoint:none": type(None),
        "activation-checkpoint:selective": policies.SelectiveAC.Config,
        "activation-checkpoint:full": policies.FullAC.Config,
    }[text]
    return {"activation_checkpoint": (asked.__qualname__, type(read).__qualname__)}


@dataclass(frozen=True)
class Check:
    """distribution: its name on PyPI. read: (setting) -> by key, what was given and what read."""

    distribution: str
    read: Callable[[str], dict[str, Any]]


CHECKS = {
    "megatron": Check("megatron-core", megatron),
    "deepspeed": Check("deepspeed", deepspeed),
    "axolotl": Check("axolotl", axolotl),
    "torchtitan": Check("torchtitan", torchtitan),
}


def checked(system: str, graph: Graph) -> dict[str, Any]:
    """Every candidate of the system, and whether what was read is what was given."""
    check = CHECKS[system]
    try:
        version = metadata.version(check.distribution)
    except metadata.PackageNotFoundError:
        return {"version": None, "reason": f"{check.distribution} is not installed"}
    settings = []
    for family in SYSTEMS[system].families(graph, layers(graph)):
        for candidate in family:
            found = check.read(candidate.text)
            wrong = {key: pair for key, pair in found.items() if pair[0] != pair[1]}
            settings.append({"setting": candidate.text, "taken": not wrong, "keys": sorted(found)})
    return {"version": version, "settings": settings}


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the settings of --emit.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    graph = layered_graph(N_LAYERS)
    result = {
        "command": shlex.join(["python", "-m", "benchmarks.emitted_settings", *sys.argv[1:]]),
        "systems": {system: checked(system, graph) for system in CHECKS},
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if given.out is not None:
        given.out.write_text(text)
    taken = [s["taken"] for found in result["systems"].values() for s in found.get("settings", ())]
    return 0 if taken and all(taken) else 1


if __name__ == "__main__":
    sys.exit(main())
