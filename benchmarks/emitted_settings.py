"""Check that other frameworks accept the settings that `solve --emit` prints for them.

    python -m venv systems && systems/bin/pip install megatron-core==0.16.1 axolotl==0.19.0 \\
        torchtitan==0.3.0 deepspeed==0.19.8
    PYTHONPATH=. systems/bin/python -m benchmarks.emitted_settings \\
        [--out benchmarks/results/emitted_settings.json]

`solver.module_checkpointing.for_other_frameworks` offers candidates for a small model. Each is read
by the framework's own code, and the values that it read are compared with those given: in
Megatron-LM the fields of `TransformerConfig`, which checks them (its flags have the fields' names),
in DeepSpeed the configuration classes, in axolotl the pydantic schema, in torchtitan a tyro parser
of its policy type. A framework that is not installed is reported as such. Use a separate
environment: these packages pin older versions of packages than the tests need.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from importlib import metadata
from typing import Any

from benchmarks import harness
from graphs.graph import Graph, Node, Tensor
from solver.module_checkpointing.for_other_frameworks import SYSTEMS, layers

N_LAYERS = 4


LAYER = (
    ("native_layer_norm", "norm"),
    ("mm", "attention.in"),
    ("_scaled_dot_product_flash_attention", "attention"),
    ("mm", "mlp.up"),
    ("mm", "mlp.down"),
)


def layered_graph(n_layers: int) -> Graph:
    """A graph of transformer layers: the operators of a norm, attention and an MLP, each in its
    module. All tensors have one size, all nodes take one second."""
    tensors = [Tensor("x", 64, "input"), Tensor("weight", 64, "parameter")]
    nodes: list[Node] = []
    last = "x"
    for i, (op, part) in itertools.product(range(n_layers), LAYER):
        name = f"t{len(nodes)}"
        tensors.append(Tensor(name, 64, "activation"))
        inputs = (last,) if part == "attention" else (last, "weight")
        node_fields: Any = {"phase": "forward", "module": f"layers.{i}.{part}", "time_s": 1.0}
        nodes.append(Node(f"n{len(nodes)}", f"aten.{op}.default", inputs, (name,), **node_fields))
        last = name
    return Graph(nodes=tuple(nodes), tensors=tuple(tensors), outputs=(last,))


def megatron(text: str) -> dict[str, Any]:
    """Build a TransformerConfig from the flags; building it checks them."""
    module = importlib.import_module("megatron.core.transformer.transformer_config")
    fields: dict[str, Any] = {}
    for flag in f" {text}".split(" --")[1:]:
        name, *values = flag.split()
        fields[name.replace("-", "_")] = values if name == "recompute-modules" else values[0]
    if "recompute_num_layers" in fields:
        fields["recompute_num_layers"] = int(fields["recompute_num_layers"])
    read = module.TransformerConfig(
        num_layers=N_LAYERS, hidden_size=64, num_attention_heads=4, **fields
    )
    return {name: (value, getattr(read, name)) for name, value in fields.items()}


def deepspeed(text: str) -> dict[str, Any]:
    """Read both blocks of the JSON. DeepSpeed ignores unknown keys without a word, so each must be
    in its defaults."""
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
    """Validate the YAML as part of the smallest configuration that the schema accepts."""
    import yaml

    schema = importlib.import_module("axolotl.utils.schemas.config")
    given = yaml.safe_load(text)
    assert set(given) <= set(schema.AxolotlInputConfig.model_fields), given
    smallest = {
        "base_model": "model",
        "learning_rate": 1e-4,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "datasets": [{"path": "data", "type": "alpaca"}],
    }
    read = schema.AxolotlInputConfig.model_validate(smallest | given)
    found = {key: (value, getattr(read, key)) for key, value in given.items()}
    if "selective_checkpointing" in given:
        asked, got = found["selective_checkpointing"]
        found["selective_checkpointing"] = (asked["save"], got.save)
    return found


def torchtitan(text: str) -> dict[str, Any]:
    """Parse the subcommand with the policy's own type, as torchtitan's trainer does."""
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


CHECKS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "megatron": ("megatron-core", megatron),
    "deepspeed": ("deepspeed", deepspeed),
    "axolotl": ("axolotl", axolotl),
    "torchtitan": ("torchtitan", torchtitan),
}
"""System -> its name on PyPI, and a function (setting) -> {key: (value given, value read)}."""


def check_system(system: str, graph: Graph) -> dict[str, Any]:
    """Every candidate of the system, and whether the values read are those given ("taken")."""
    distribution, read = CHECKS[system]
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return {"version": None, "reason": f"{distribution} is not installed"}
    settings = []
    for candidate in itertools.chain(*SYSTEMS[system].families(graph, layers(graph))):
        found = read(candidate.text)
        taken = all(given == got for given, got in found.values())
        settings.append({"setting": candidate.text, "taken": taken, "keys": sorted(found)})
    return {"version": version, "settings": settings}


def main() -> int:
    given = harness.parser("emitted_settings", __doc__).parse_args()
    graph = layered_graph(N_LAYERS)
    result = {
        "command": harness.command(),
        "systems": {system: check_system(system, graph) for system in CHECKS},
    }
    print(json.dumps(result, indent=1))
    harness.write(given.out, result)
    taken = [s["taken"] for found in result["systems"].values() for s in found.get("settings", ())]
    return 0 if taken and all(taken) else 1


if __name__ == "__main__":
    sys.exit(main())
