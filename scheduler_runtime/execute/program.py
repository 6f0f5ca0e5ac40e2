"""Generate straight-line code for a schedule: a forward piece and several backward pieces.

Each `Compute` becomes one call of the traced operator. Each `Free` ends the use of a tensor's
names: fx's code generator deletes a name after its last use, so live memory is what the simulator
counted. Views are not ops of a schedule: if a storage was recomputed, its views are derived again
when they are read.

The backward pass is cut into pieces where a parameter's gradient is complete and the parameter is
not read any more. So gradients leave as soon as they are computed, and a hook or optimizer that
receives one may change the parameter at once (see `scheduler_runtime.execute.autograd`). Gradients
that are held to the end of the step anyway leave a few at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.capture import OpaqueForward, is_random
from graphs.rewrites import rewrites_program
from graphs.trace import CapturedStep
from scheduler_runtime.execute.copies import Pools
from scheduler_runtime.execute.module_part import module_schedule, n_ops_before_loss
from scheduler_runtime.execute.piece import Piece, Value, piece_of
from scheduler_runtime.execute.straight_line import StraightLine
from solver.schedule import CopyLayout, Places, Schedule, copy_layout
from solver.sizes_deadlines_progress import format_both


@dataclass(frozen=True)
class Program:
    """A schedule as code.

    forward: the piece that is the forward pass.
    backward: the pieces of the backward pass, in order.
    sources: placeholder of the traced graph -> its value in the program.
    constants: tensors that the model holds in plain attributes, by value.
    outputs: the model's flat outputs: values, placeholders that are returned unchanged, or plain
        constants.
    computed_outputs: the outputs that the program computes.
    tangents: index in computed_outputs -> the value that receives its gradient.
    tangent_strides: the strides of these gradients that the backward pass was traced with.
    differentiable: indices in computed_outputs of the outputs that require a gradient in the plain
        model; gradients may arrive for them that are not planned.
    titles: names of sources and constants for messages ("buffer 'norm.running_mean'").
    reachable: values that code outside of the program can reach: inputs, constants, outputs.
    read_backward: values that the backward pass depends on and does not compute itself.
    gradient_specs: placeholder of a distributed parameter -> how its gradient is placed.
    plan_id: identifies the traced step and the schedule; equal on all ranks of a distributed
        module.
    recomputes: whether the backward pass runs operators of the forward pass, or the reverse.
    written: placeholders of the buffers that the forward pass writes.
    draws: whether the forward pass draws random numbers.
    unrepeatable: why the forward pass may give other results after it has written these buffers
        ("": it gives the same ones).
    runs_once: why the forward pass must not run again at all ("": it may).
    copies: the value that is the step's `Copies` (None: the schedule has no copies).
    copy_layout: where the copies are in the host memory and the file.
    pools: provides the host memory and the file.
    """

    forward: Piece
    backward: tuple[Piece, ...]
    sources: dict[fx.Node, Value]
    constants: dict[Value, torch.Tensor]
    outputs: tuple[Any, ...]
    computed_outputs: tuple[Value, ...]
    tangents: tuple[tuple[int, Value], ...]
    tangent_strides: Mapping[Value, tuple[int, ...]]
    differentiable: frozenset[int]
    titles: Mapping[Value, str]
    reachable: tuple[Value, ...]
    read_backward: frozenset[Value]
    gradient_specs: Mapping[fx.Node, Any]
    plan_id: str
    recomputes: bool
    written: tuple[fx.Node, ...]
    draws: bool
    unrepeatable: str
    runs_once: str
    copies: Value | None = None
    copy_layout: CopyLayout | None = None
    pools: Pools | None = None

    @property
    def spills(self) -> bool:
        """Whether the program copies to a disk."""
        return self.copy_layout is not None and self.copy_layout.disk_bytes > 0


def build_program(
    step: CapturedStep,
    schedule: Schedule,
    *,
    places: Places | None = None,
    pools: Pools | None = None,
) -> Program:
    """Generate the program that runs the module's part of a legal schedule.

    schedule: of the whole step; ops of the caller (a loss outside, the optimizer) may be missing.

    places: sizes of the host memory and the disk that the schedule may use (None: no limit).
    pools: host memory and files, shared with other programs (None: own host memory, no disk).

    Raises ValueError if the copies do not fit, or need a disk and there is no directory for it.
    """
    part = step.graph.module_part()
    before_loss = n_ops_before_loss(schedule, part)
    schedule = module_schedule(schedule, part)
    if not schedule.has_copies:
        return _cut_into_pieces(StraightLine(step, schedule, before_loss, None), None)
    layout = copy_layout(part, schedule, places)
    if excess := layout.excess(places):
        raise ValueError(f"{excess}; plan again")
    pools = pools or Pools()
    if layout.disk_bytes and pools.directory is None:
        raise ValueError(
            f"the plan copies {format_both(layout.disk_bytes)} to a disk: name a directory there, "
            'apply(model, plan, disk_directory="/scratch")'
        )
    return _cut_into_pieces(StraightLine(step, schedule, before_loss, layout), pools)


def _runs_once(line: StraightLine) -> str:
    """Why the forward pass must not run again; "": it may."""
    if all(part.recomputable for part in _opaque_parts(line)):
        return ""
    return "a part of it is planned as one piece, which has hooks or draws other numbers each time"


def _opaque_parts(line: StraightLine) -> list[OpaqueForward]:
    targets = (call.target for call in line.layout.calls.values())
    return [target for target in targets if isinstance(target, OpaqueForward)]


def _unrepeatable(line: StraightLine) -> str:
    """Why the forward pass cannot run again without copies of what it has written; "": it can."""
    if _opaque_parts(line):
        return "a part of it is planned as one piece, which may change what it reads"
    # its results do not depend on buffers that its operators write in place
    independent = {b for each in line.in_place.values() for b in each.buffers.values()}
    captured = line.step.captured
    read = (n for n in captured.mutations if n not in independent)
    titles = (captured.sources[n].title for n in read)
    return next((f"it may read {title}, which it has changed" for title in titles), "")


def _cut_into_pieces(line: StraightLine, pools: Pools | None) -> Program:
    """Cut the line where pieces end, and generate the code of each."""
    captured = line.step.captured
    nodes = list(line.graph.nodes)
    starts = [0, *line.piece_ends[:-1]]
    bodies = [nodes[a:b] for a, b in zip(starts, line.piece_ends, strict=True)]
    computed = tuple(v for v in line.outputs if isinstance(v, fx.Node) and v.graph is line.graph)
    wanted = [{value for _, value in piece_gradients} for piece_gradients in line.piece_gradients]
    wanted[0].update(computed)
    copies = None if line.copy_calls is None else line.copy_calls.copies
    resident = {
        *line.constants,
        *(() if copies is None else (copies,)),
        *(v for node, v in line.sources.items() if captured.sources[node].kind != "tangent"),
    }
    pieces: list[Piece] = []
    read_later: set[Value] = set()
    for index in range(len(bodies) - 1, -1, -1):
        body = [node for node in bodies[index] if node.op != "placeholder"]
        gradients = tuple(line.piece_gradients[index])
        piece = piece_of(body, read_later, wanted[index], resident, gradients)
        pieces.insert(0, piece)
        read_later = (read_later | wanted[index] | set(piece.inputs)) - set(body)
    # Readers of a changed buffer are marked recomputable only if their results do not depend on its
    # content (batch norm in training). So if only recomputations read it in the backward pass, the
    # next forward pass may change it before.
    changed = {line.sources[placeholder] for placeholder in captured.mutations}
    later = {node for body in bodies[1:] for node in body}
    only_recomputed = {v for v in changed if later.intersection(v.users) <= line.recomputed}
    backward = tuple(p for p in pieces[1:] if p.results or p.gradients)
    calls = line.layout.calls
    forward = [calls[n.name] for n in line.step.graph.forward_nodes if n.name in calls]
    read_backward = {value for piece in backward for value in piece.inputs}
    return Program(
        forward=pieces[0],
        backward=backward,
        sources=line.sources,
        constants=line.constants,
        outputs=line.outputs,
        computed_outputs=computed,
        tangents=tuple(
            (computed.index(line.outputs[index]), line.sources[placeholder])
            for index, placeholder in captured.tangents.items()
        ),
        tangent_strides={
            line.sources[node]: tuple(node.meta["val"].stride())
            for node in captured.tangents.values()
        },
        differentiable=frozenset(
            computed.index(line.outputs[index])
            for index in captured.differentiable
            if line.outputs[index] in computed
        ),
        titles=dict.fromkeys(line.constants, "a tensor that the model holds")
        | {value: captured.sources[node].title for node, value in line.sources.items()},
        reachable=(*line.sources.values(), *line.constants, *computed),
        read_backward=frozenset(read_backward - only_recomputed),
        gradient_specs=captured.gradient_specs,
        plan_id=hashlib.sha256(
            repr((line.schedule.graph_id, line.schedule.ops)).encode()
        ).hexdigest()[:16],
        recomputes=bool(line.recomputed) or rewrites_program(line.step.graph.meta.rewrites),
        written=tuple(captured.mutations),
        draws=any(is_random(call) for call in forward),
        unrepeatable=_unrepeatable(line),
        runs_once=_runs_once(line),
        copies=copies,
        copy_layout=line.copy_layout,
        pools=pools,
    )
