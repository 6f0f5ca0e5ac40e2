"""What was observed of a step as a coarse Graph, and its row of submodules as a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from graphs.calls import Call, environment_of
from graphs.capture import CPU_RANDOM_STATE_BYTES
from graphs.graph import Graph, Node, Tensor
from graphs.meta import GraphMeta
from scheduler_runtime.by_submodule.eager_step import ObservedStep
from scheduler_runtime.by_submodule.observe import Observed, ObservedPart
from scheduler_runtime.execute import runs_in_a_loop
from solver.chain import Chain
from solver.module_checkpointing import Row

SCOPE = "planned by submodules, measured in eager mode"


@dataclass(frozen=True)
class Loop:
    """A row that an nn.Sequential runs in a loop.

    container: its path. row: its steps, each one child or several that cannot be parted.
    """

    container: str
    row: Row


def container_of(model: nn.Module, blocks: Sequence[str]) -> str | None:
    """The path of the nn.Sequential whose children these blocks are, all and in order; or None."""
    members = [model.get_submodule(path) for path in blocks]
    for path, module in model.named_modules():
        if runs_in_a_loop(module) and list(module.children()) == members:
            return path if len(module) == len(members) else None
    return None


def without_gaps(observed: Observed) -> Observed:
    """Of a loop: without the pieces between the children, in which nothing runs."""
    first, *inside, last = observed.pieces
    kept = [piece for piece in inside if piece.path or piece.made or piece.saved]
    return dataclasses.replace(observed, pieces=(first, *kept, last))


def loop_of(container: str, observed: Observed) -> Loop | None:
    """The row of a loop's children as a chain; None: less than two can be run again by themselves.

    observed: without gaps. A child that overwrites what it reads runs again only together with the
    one that made it, so both are one step of the row; and so with one whose argument is overwritten
    after it. Bytes are those of the pieces, put together so that no answer of the chain looks
    better than it is by much: the graph is what decides.
    """
    pieces = observed.pieces
    steps: list[list[int]] = []
    for k, piece in enumerate(pieces[1:-1], start=1):
        if not piece.path:
            return None  # something runs between the children after all
        if not piece.overwritten:
            steps.append([k])
        elif steps:
            steps[-1].append(k)
    if len(steps) < 2:
        return None
    size = observed.storage_bytes
    read = [set(pieces[step[0]].read) for step in steps] + [set(pieces[steps[-1][-1] + 1].read)]
    x = [sum(size[i] for i in each) for each in read]
    saved, forward_workspace, backward_workspace = [0], [], []
    for i, step in enumerate(steps):
        parts = [pieces[k] for k in step]
        put_by = {n for piece in parts for n in piece.saved} - read[i] - read[i + 1]
        saved.append(x[i + 1] + sum(size[n] for n in put_by))
        forward_workspace.append(max(_workspace_bytes(observed, piece) for piece in parts))
        backward_workspace.append(max(piece.backward_peak_bytes for piece in parts))
    chain = Chain(
        forward_s=tuple(sum(pieces[k].forward_s for k in step) for step in steps),
        backward_s=(*(sum(pieces[k].backward_s for k in step) for step in steps), 0.0),
        input_bytes=tuple(x),
        saved_bytes=tuple(saved),
        forward_workspace_bytes=tuple(forward_workspace),
        backward_workspace_bytes=(*backward_workspace, 0),
    )
    row = Row(
        nodes=tuple(tuple(f"forward{k}" for k in step) for step in steps),
        modules=tuple(tuple(pieces[k].path for k in step) for step in steps),
        chain=chain,
    )
    return Loop(container, row)


def _workspace_bytes(observed: Observed, piece: ObservedPart) -> int:
    made = sum(observed.storage_bytes[i] for i in piece.made)
    return max(0, piece.forward_peak_bytes - made)


def coarse_graph(
    model: nn.Module, step: ObservedStep, observed: Observed, *, row: bool, unseen_bytes: int
) -> Graph:
    """One forward and one backward node for each piece.

    row: the submodules run in a loop, so that each can run again with those before it.
    """
    sizes = step.resident_bytes()
    pieces = observed.pieces
    beside = {"random_state": CPU_RANDOM_STATE_BYTES * (len(pieces) + 1), "unseen": unseen_bytes}
    tensors = [Tensor(kind, n, kind) for kind, n in sizes.items()]  # type: ignore[arg-type]
    tensors += [Tensor(name, n, "buffer") for name, n in beside.items()]
    tensors += [Tensor(f"t{i}", n, "activation") for i, n in enumerate(observed.storage_bytes)]
    made_by = {f"t{i}": k for k, piece in enumerate(pieces) for i in piece.made}
    gradients = _gradient_bytes(model, [piece.path for piece in pieces])
    forward, backward = [], []
    for k, piece in enumerate(pieces):
        made = tuple(f"t{i}" for i in piece.made)
        saved = tuple(f"t{i}" for i in piece.saved)
        link = f"x{k}"  # keeps the pieces in their order
        tensors += [Tensor(link, 0, "activation"), Tensor(f"g{k}", 0, "activation")]
        read = [f"t{i}" for i in piece.read]
        read += [name for name in saved if made_by[name] < k]
        before = () if k == 0 else (f"x{k - 1}",)
        inputs = tuple(dict.fromkeys((*sizes, *before, *read)))
        forward.append(
            Node(
                name=f"forward{k}",
                op="submodule.forward" if piece.path else "outside.forward",
                inputs=inputs,
                outputs=(*made, link),
                time_s=piece.forward_s,
                workspace_bytes=_workspace_bytes(observed, piece),
                phase="forward",
                recomputable=bool(piece.path) and (row or not piece.overwritten),
                module=piece.path,
            )
        )
        after = (f"x{k}",) if k == len(pieces) - 1 else (f"g{k + 1}",)
        own = (f"gradient{k}",) if gradients[k] else ()
        tensors += [Tensor(name, gradients[k], "gradient") for name in own]
        backward.append(
            Node(
                name=f"backward{k}",
                op="submodule.backward" if piece.path else "outside.backward",
                inputs=tuple(dict.fromkeys((*after, *saved))),
                outputs=(f"g{k}", *own),
                time_s=piece.backward_s,
                # the gradients of activations, which stand on both sides of it, among them
                workspace_bytes=max(0, piece.backward_peak_bytes - gradients[k])
                + _passed_bytes(observed, k),
                phase="backward",
                recomputable=False,
                module=piece.path,
            )
        )
    call = Call.of(step.args, step.kwargs)
    outputs = [t.name for t in tensors if t.kind == "gradient"]
    return Graph(
        nodes=(*forward, *reversed(backward)),
        tensors=tuple(tensors),
        outputs=tuple(outputs),
        meta=GraphMeta(
            model=type(model).__name__,
            scope=SCOPE,
            costs={"model": "measured", "device": "here"},
            environment=environment_of(call, model),
        ),
    )


def _passed_bytes(observed: Observed, k: int) -> int:
    """The gradient that comes in: as large as what the next piece reads of this one."""
    made = set(observed.pieces[k].made)
    if observed.pieces[k].overwritten:  # what it hands on may stand where its argument stood
        made |= set(observed.pieces[k].read)
    after = observed.pieces[k + 1 :]
    read = {i for piece in after[:2] for i in piece.read if i in made}
    return sum(observed.storage_bytes[i] for i in read)


def _gradient_bytes(model: nn.Module, paths: Sequence[str]) -> list[int]:
    """Of each piece's parameters; what is in no submodule of the row counts from the first on."""
    sizes = [0] * len(paths)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inside = [k for k, path in enumerate(paths) if path and name.startswith(f"{path}.")]
            piece = inside[0] if inside else len(paths) - 1
            sizes[piece] += parameter.numel() * parameter.element_size()
    return sizes
