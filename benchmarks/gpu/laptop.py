"""Check that a step traced for a GPU on a machine without one is the step that the GPU runs.

    python -m benchmarks.gpu.laptop --device h200 --out steps.json    # on a machine without a GPU
    python -m benchmarks.gpu.laptop --compare steps.json              # on that GPU, same torch

Compares every operator (name, op, phase, whether it can be recomputed, inputs, outputs) and every
tensor (name, bytes, kind, alias). A plan made for one step is refused if the model runs another.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.zoo import TINY, tiny
from benchmarks.zoo.on_gpu import LARGE, Subject
from graphs.costs import Roofline
from graphs.graph import Graph
from graphs.hardware import named
from graphs.trace import trace

ON_CARD = torch.device("cuda", 0)
LARGE_NAMES = ("gpt2", "gpt2-xl", "resnet101", "vit-large-384", "unet-512", "llama-8b-8192")


def subjects() -> Iterator[tuple[str, Subject]]:
    for name in TINY:
        yield name, tiny(name, ON_CARD)
    for name in LARGE_NAMES:
        yield name, LARGE[name]


def traced_step(subject: Subject, card: str) -> Graph:
    """The training step with AdamW, traced from a model on the meta device, which takes no memory.

    card: name of the hardware for the roofline.
    """
    with torch.device("meta"):
        model = subject.build().to(dtype=subject.dtype).train()
    batch = tuple(
        t.to("meta", subject.dtype if t.is_floating_point() else None)
        for t in subject.batch(subject.batch_size)
    )
    return trace(
        model, batch, device="cuda", costs=Roofline(named(card)), optimizer=torch.optim.AdamW
    )


def comparable_fields(graph: Graph) -> dict[str, list[Any]]:
    """The fields of operators and tensors that are compared, for JSON."""
    return {
        "operators": [
            [n.name, n.op, n.phase, n.recomputable, [*n.inputs], [*n.outputs]] for n in graph.nodes
        ],
        "tensors": [[t.name, t.size_bytes, t.kind, t.alias_of] for t in graph.tensors],
    }


def differences(here: Mapping[str, list[Any]], there: Mapping[str, list[Any]]) -> list[str]:
    found = []
    if [row[0] for row in here["operators"]] != [row[0] for row in there["operators"]]:
        found.append("operators: in another order")
    for what, rows in here.items():
        others = {row[0]: row for row in there[what]}
        own = {row[0]: row for row in rows}
        found += [
            f"{what}: {row} there {others.get(name)}"
            for name, row in own.items()
            if others.get(name) != row
        ]
        found += [f"{what}: {row} is not here" for name, row in others.items() if name not in own]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.laptop", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="h200", help="the card to trace for")
    parser.add_argument("--out", type=harness.file_to_write, help="write the steps here (JSON)")
    parser.add_argument("--compare", type=Path, help="steps traced without the card")
    arguments = parser.parse_args()
    if arguments.out is not None:
        steps = {
            name: comparable_fields(traced_step(subject, arguments.device))
            for name, subject in subjects()
        }
        arguments.out.write_text(json.dumps({"device": arguments.device, "steps": steps}))
        return 0
    earlier = json.loads(arguments.compare.read_text())
    failed = False
    for name, subject in subjects():
        step = comparable_fields(traced_step(subject, earlier["device"]))
        step_differences = differences(step, earlier["steps"][name])
        print(
            f"{name}: {len(step['operators'])} operators, {len(step_differences)} differences",
            flush=True,
        )
        print(*(f"  {each}" for each in step_differences[:12]), sep="\n")
        failed = failed or bool(step_differences)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
