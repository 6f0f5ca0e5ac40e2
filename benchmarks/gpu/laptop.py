"""Is the step that is traced without a card the one that the card runs?

    python -m benchmarks.gpu.laptop --device h200 --out steps.json    # on a machine without a card
    python -m benchmarks.gpu.laptop --compare steps.json              # on that card, same torch

Compares every operator and every tensor (name, bytes, inputs, outputs), and what a plan made
without the card would be refused for.
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


def step_of(subject: Subject, device: str, costs: str) -> Graph:
    """Traced from a model on the meta device, so that the card holds none."""
    with torch.device("meta"):
        model = subject.build().to(dtype=subject.dtype).train()
    batch = tuple(
        t.to("meta", subject.dtype if t.is_floating_point() else None)
        for t in subject.batch(subject.batch_size)
    )
    return trace(
        model, batch, device=device, costs=Roofline(named(costs)), optimizer=torch.optim.AdamW
    )


def described(graph: Graph) -> dict[str, list[Any]]:
    """What makes the step: operators with their tensors, and tensors with their bytes."""
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
            name: described(step_of(subject, "cuda", arguments.device))
            for name, subject in subjects()
        }
        arguments.out.write_text(json.dumps({"device": arguments.device, "steps": steps}))
        return 0
    earlier = json.loads(arguments.compare.read_text())
    failed = False
    for name, subject in subjects():
        step = described(step_of(subject, "cuda", earlier["device"]))
        found = differences(step, earlier["steps"][name])
        print(f"{name}: {len(step['operators'])} operators, {len(found)} differences", flush=True)
        print(*(f"  {each}" for each in found[:12]), sep="\n")
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
