"""Plans for models that cannot be captured as one graph: by submodules, measured in eager mode.

    solution = plan_chain(model, batch, budget="8GB")
    apply(model, solution)      # stock checkpointing of the chosen submodules
    remove(model)

Data-dependent control flow, custom autograd functions, hooks: what the tracer refuses still runs,
and can be watched while it does (`scheduler_runtime.observe`). The row of submodules that puts by
the most becomes a coarse Graph, one forward and one backward node for each of them and for what
runs in between, with times and bytes as measured. It is solved and judged like any other graph, and
`solver.by_module` finds the checkpoints of whole submodules that carry it out.

Coarser than a traced plan: a submodule is kept or run again as a whole, what runs outside of them
is left alone, and the bound holds for this coarse graph alone. After planning one step runs with
the plan in place; where it took more than was predicted, the difference is counted as resident and
the plan is made again, so that the peak that is told is one that was kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphs.call import Call, as_call, environment_of, find_loss
from graphs.costs import CostModel, Roofline
from graphs.extract import CPU_RANDOM_STATE_BYTES
from graphs.graph import Graph, Node, Tensor
from graphs.hardware import named
from graphs.optimizer import optimizer_figures
from graphs.step import with_optimizer
from scheduler_runtime import checkpointed
from scheduler_runtime.measure import peak_above_bytes
from scheduler_runtime.observe import Observed, as_before, chain_of, observe
from solver.by_module import ModuleTree, NothingFitsError, by_module
from solver.regions import Region
from solver.solution import Solution
from solver.solve import solve

SCOPE = "planned by submodules, measured in eager mode"
N_CORRECTIONS = 3


class FallbackError(ValueError):
    """The model cannot be planned by submodules either; says why."""


@dataclass(frozen=True)
class SubmoduleSolution(Solution):
    """A Solution for a coarse graph of submodules.

    scope: what the figures are about. blocks: the submodules that were planned. checkpointed:
    those of them that run again. left_alone: sentences on what was not planned.
    """

    scope: str = SCOPE
    blocks: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    changed_buffers: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [repr(self), f"{self.scope}: {len(self.blocks)} submodules"]
        lines += [
            f"  {path}: {'checkpointed' if path in self.checkpointed else 'kept'}"
            for path in self.blocks
        ]
        return "\n".join([*lines, *self.left_alone])


def plan_chain(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    time_limit_s: float = 30.0,
) -> SubmoduleSolution:
    """Watch a few real training steps of the model and plan its submodules; changes nothing.

    budget: bytes of the device for the whole step. loss, inputs, optimizer: as in
    `graphs.trace.trace`. Gradients are set to None before each step.

    Raises FallbackError where no row of submodules was seen.
    """
    step = _Step(model, batch, loss, inputs)
    blocks = chain_of(model, step.forward)
    if not blocks:
        raise FallbackError(
            f"{type(model).__name__} has no two submodules that the same module calls once each in "
            "a step, so there is nothing to checkpoint; split it into submodules, or make it "
            "traceable"
        )
    observed = observe(model, step.forward, blocks, resident=step.batch_tensors)
    unseen_bytes = 0
    for _ in range(1 + N_CORRECTIONS):
        graph = _graph(model, step, observed, unseen_bytes=unseen_bytes)
        costs: CostModel = Roofline(named("cpu"))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if optimizer is not None:
            graph = with_optimizer(
                graph, optimizer_figures(optimizer, model, device=device, costs=costs)
            )
        found = _plan(graph, observed, blocks, budget=budget, time_limit_s=time_limit_s)
        found = dataclasses.replace(found, changed_buffers=step.changed_buffers())
        if found.trace is None or device.type not in ("cpu", "cuda"):
            return found
        excess_bytes = step.measured_bytes(found) - _peak_in_step(found)
        if excess_bytes <= 0:
            return found
        unseen_bytes += excess_bytes
    raise FallbackError(
        f"the step takes {excess_bytes} bytes more than predicted, after {N_CORRECTIONS} "
        "corrections; its memory differs from step to step"
    )


def put(model: nn.Module, solution: SubmoduleSolution) -> nn.Module:
    """Checkpoint the planned submodules; `scheduler_runtime.remove` undoes it."""
    if solution.schedule is None:
        raise ValueError(f"the plan has no schedule to apply: its status is {solution.status}")
    modules = dict(model.named_modules())
    for path in solution.checkpointed:
        if path not in modules:
            raise ValueError(f"the plan is for a model with a submodule {path!r}; this has none")
        prefix = f"{path}."
        names = (n for n in solution.changed_buffers if n.startswith(prefix))
        checkpointed.put(
            modules[path], changed_buffers=tuple(name.removeprefix(prefix) for name in names)
        )
    return model


class _Step:
    """The training step as people write it."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        inputs: Callable[[Any], Any] | None,
    ) -> None:
        self.model, self._batch, self._loss = model, batch, loss
        self.args, self.kwargs = as_call(batch, inputs)
        leaves = pytree.tree_leaves(batch)
        self.batch_tensors = [item for item in leaves if isinstance(item, torch.Tensor)]
        self._held: Any = None

    def forward(self) -> torch.Tensor:
        self._held = self.model(*self.args, **self.kwargs)  # the caller holds it
        loss = self._loss
        value = find_loss(self._held) if loss is None else loss(self._held, self._batch)
        if not isinstance(value, torch.Tensor):
            raise FallbackError("the model returns no loss; give loss=lambda output, batch: ...")
        return value

    def resident_bytes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for kind, tensors in (
            ("parameter", self.model.parameters()),
            ("buffer", self.model.buffers()),
            ("input", iter(self.batch_tensors)),
        ):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        return sizes

    def changed_buffers(self) -> tuple[str, ...]:
        """The names of the buffers that a step changes."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with as_before(self.model):
            self.forward()
            self._held = None
            return tuple(
                name
                for name, buffer in self.model.named_buffers()
                if not torch.equal(buffer, before[name])
            )

    def measured_bytes(self, solution: SubmoduleSolution) -> int:
        """The peak of one step with the plan in place, resident bytes included."""
        self._held = None
        put(self.model, solution)
        try:
            with as_before(self.model):
                self.forward().backward()  # makes what is made once
            self._held = None
            with as_before(self.model):
                device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
                used = peak_above_bytes(lambda: self.forward().backward(), device)
        finally:
            self._held = None
            for path in solution.checkpointed:
                checkpointed.take_out(self.model.get_submodule(path))
        return sum(self.resident_bytes().values()) + used


def _peak_in_step(solution: Solution) -> int:
    """The most while forward and backward run; optimizer state, which is not measured, left out."""
    assert solution.trace is not None
    graph = solution.graph
    state = sum(t.size_bytes for t in graph.tensors if t.kind == "optimizer_state")
    steps = zip(solution.schedule.ops, solution.trace.live_bytes, strict=True)  # type: ignore[union-attr]
    before = [live for op, live in steps if getattr(op, "node", "") != "optimizer_step"]
    return max(before) - state


def _graph(model: nn.Module, step: _Step, observed: Observed, *, unseen_bytes: int) -> Graph:
    """One forward and one backward node for each piece."""
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
        n_made = sum(observed.storage_bytes[i] for i in piece.made)
        forward.append(
            Node(
                name=f"forward{k}",
                op="submodule.forward" if piece.path else "outside.forward",
                inputs=inputs,
                outputs=(*made, link),
                time_s=piece.forward_s,
                workspace_bytes=max(0, piece.forward_peak_bytes - n_made),
                phase="forward",
                recomputable=bool(piece.path) and not piece.overwritten,
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
        meta={
            "model": type(model).__name__,
            "scope": SCOPE,
            "costs": {"model": "measured", "device": "here"},
            "environment": environment_of(call, model),
        },
    )


def _passed_bytes(observed: Observed, k: int) -> int:
    """The gradient that comes in: as large as what the next piece reads of this one."""
    made = set(observed.pieces[k].made)
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


def _plan(
    graph: Graph,
    observed: Observed,
    blocks: Sequence[str],
    *,
    budget: int | str,
    time_limit_s: float,
) -> SubmoduleSolution:
    solution = solve(graph, budget=budget, time_limit_s=time_limit_s)
    left_alone = tuple(_left_alone(observed))
    values = {f.name: getattr(solution, f.name) for f in dataclasses.fields(Solution)}
    possible = [piece.path for piece in observed.pieces if piece.path and not piece.overwritten]
    if solution.schedule is None:
        return SubmoduleSolution(**values, blocks=tuple(blocks), left_alone=left_alone)
    tree = ModuleTree(blocks=tuple(possible), parts=dict.fromkeys(possible, ()))
    try:
        plan = by_module(solution, tree, may_save=_nothing, beside_bytes=0)
    except NothingFitsError as error:
        left_alone = (
            *left_alone,
            f"checkpointing submodules whole takes at least {error.least.peak_bytes} bytes",
        )
        values |= {"status": "infeasible", "schedule": None, "trace": None}
        return SubmoduleSolution(**values, blocks=tuple(blocks), left_alone=left_alone)
    gap_s = plan.trace.time_s - solution.lower_bound_s
    proven = gap_s <= 1e-3 * solution.baseline.time_s
    values |= {
        "schedule": plan.schedule,
        "trace": plan.trace,
        "status": "optimal" if proven else "feasible",
    }
    return SubmoduleSolution(
        **values,
        blocks=tuple(blocks),
        checkpointed=tuple(region.path for region in plan.regions),
        left_alone=left_alone,
    )


def _nothing(_region: Region) -> frozenset[str]:
    return frozenset()


def _left_alone(observed: Observed) -> Iterator[str]:
    outside_s = sum(p.forward_s for p in observed.pieces if not p.path)
    total_s = sum(p.forward_s for p in observed.pieces)
    yield f"{100 * outside_s / (total_s or 1.0):.0f} % of the forward pass runs outside of them"
    for piece in observed.pieces:
        if piece.overwritten:
            yield f"{piece.path} overwrites what it reads, or something after it does: kept"


__all__ = ["SCOPE", "FallbackError", "SubmoduleSolution", "plan_chain", "put"]
