"""Turn an observed step into a coarse Graph, and its sequence of submodules into a chain."""

from __future__ import annotations

import dataclasses

from torch import nn

from graphs.capture import CPU_RANDOM_STATE_BYTES
from graphs.graph import Graph, GraphMeta, Node, Tensor
from graphs.model_calls import Call, environment_of, gradient_bytes
from scheduler_runtime.by_submodule.eager_step import ObservedStep
from scheduler_runtime.by_submodule.observe import Observed
from scheduler_runtime.execute import runs_in_a_loop
from solver.chain import Chain
from solver.module_checkpointing import SequentialSteps

SCOPE = "planned by submodules, measured in eager mode"


def find_loop(model: nn.Module, observed: Observed) -> Observed:
    """Find the nn.Sequential whose children are the submodules, all of them in order, and add the
    chain of its steps.

    The parts between the children, in which nothing runs, are dropped. Returns `observed` unchanged
    if there is no such nn.Sequential, if something runs between its children, or if there are fewer
    than two steps that can be recomputed.

    A step is one child, or several that must be recomputed together: if a child's argument is
    overwritten in place, by the child itself or later, the child is in one step with the child
    before it. The bytes of the chain are sums over parts, made so that no answer of the chain looks
    much better than it is; the graph has the final say.
    """
    members = [model.get_submodule(path) for path in observed.blocks]
    container = next(
        (
            path
            for path, module in model.named_modules()
            if runs_in_a_loop(module) and list(module) == members
        ),
        None,
    )
    first, *inside, last = observed.parts
    parts = (first, *(part for part in inside if part.path or part.made or part.saved), last)
    steps: list[list[int]] = []
    for k, part in enumerate(parts[1:-1], start=1):
        if part.overwritten and steps:
            steps[-1].append(k)
        elif not part.overwritten:
            steps.append([k])
    if container is None or len(steps) < 2 or not all(part.path for part in parts[1:-1]):
        return observed
    observed = dataclasses.replace(observed, parts=parts, container=container)
    # what each step reads, and the part after the last step
    read = [set(parts[step[0]].read) for step in steps] + [set(parts[steps[-1][-1] + 1].read)]
    input_bytes = tuple(observed.bytes_of(each) for each in read)
    saved_bytes = [0]
    for i, step in enumerate(steps):
        saved = {storage for k in step for storage in parts[k].saved} - read[i] - read[i + 1]
        saved_bytes.append(input_bytes[i + 1] + observed.bytes_of(saved))
    chain = Chain(
        forward_s=tuple(sum(parts[k].forward_s for k in step) for step in steps),
        backward_s=(*(sum(parts[k].backward_s for k in step) for step in steps), 0.0),
        input_bytes=input_bytes,
        saved_bytes=tuple(saved_bytes),
        forward_workspace_bytes=tuple(max(map(observed.workspace_bytes, step)) for step in steps),
        backward_workspace_bytes=(
            *(max(parts[k].backward_peak_bytes for k in step) for step in steps),
            0,
        ),
    )
    sequential = SequentialSteps(
        nodes=tuple(tuple(f"forward{k}" for k in step) for step in steps),
        modules=tuple(tuple(parts[k].path for k in step) for step in steps),
        chain=chain,
    )
    return dataclasses.replace(observed, steps=sequential)


def coarse_graph(step: ObservedStep, observed: Observed, *, unseen_bytes: int) -> Graph:
    """A Graph with one forward and one backward node for each part.

    In a loop, each submodule can be recomputed together with those before it.

    unseen_bytes: what a measured step took beyond its prediction; counted as resident.
    """
    parts, in_loop = observed.parts, observed.steps is not None
    resident = step.resident_bytes()
    other_bytes = {
        "random_state": CPU_RANDOM_STATE_BYTES * (len(parts) + 1),
        "unseen": unseen_bytes,
    }
    tensors = [Tensor(kind, n, kind) for kind, n in resident.items()]  # type: ignore[arg-type]
    tensors += [Tensor(name, n, "buffer") for name, n in other_bytes.items()]
    tensors += [Tensor(f"t{i}", n, "activation") for i, n in enumerate(observed.storage_bytes)]
    made_by = {i: k for k, part in enumerate(parts) for i in part.made}
    gradients = [0] * len(parts)  # of each part's parameters
    for name, parameter in step.model.named_parameters():
        if parameter.requires_grad:
            inside = [k for k, p in enumerate(parts) if p.path and name.startswith(f"{p.path}.")]
            # gradients of parameters in no submodule count from the start of backward
            gradients[inside[0] if inside else -1] += gradient_bytes(parameter)
    forward, backward = [], []
    for k, part in enumerate(parts):
        where = "submodule" if part.path else "outside"
        saved = [f"t{i}" for i in part.saved]
        read = [f"t{i}" for i in (*part.read, *(i for i in part.saved if made_by[i] < k))]
        # tensors of 0 bytes keep the parts in order
        tensors += [Tensor(f"x{k}", 0, "activation"), Tensor(f"g{k}", 0, "activation")]
        previous = [f"x{k - 1}"] if k else []
        following = f"g{k + 1}" if k + 1 < len(parts) else f"x{k}"
        gradient_names = [f"gradient{k}"] if gradients[k] else []
        tensors += [Tensor(name, gradients[k], "gradient") for name in gradient_names]
        forward.append(
            Node(
                name=f"forward{k}",
                op=f"{where}.forward",
                inputs=tuple(dict.fromkeys((*resident, *previous, *read))),
                outputs=(*(f"t{i}" for i in part.made), f"x{k}"),
                time_s=part.forward_s,
                workspace_bytes=observed.workspace_bytes(k),
                phase="forward",
                recomputable=bool(part.path) and (in_loop or not part.overwritten),
                module=part.path,
            )
        )
        backward.append(
            Node(
                name=f"backward{k}",
                op=f"{where}.backward",
                inputs=tuple(dict.fromkeys((following, *saved))),
                outputs=(f"g{k}", *gradient_names),
                time_s=part.backward_s,
                # includes the gradients of activations that come in and go out
                workspace_bytes=max(0, part.backward_peak_bytes - gradients[k])
                + _incoming_gradient_bytes(observed, k),
                phase="backward",
                recomputable=False,
                module=part.path,
            )
        )
    return Graph(
        nodes=(*forward, *reversed(backward)),
        tensors=tuple(tensors),
        outputs=tuple(tensor.name for tensor in tensors if tensor.kind == "gradient"),
        meta=GraphMeta(
            model=type(step.model).__name__,
            scope=SCOPE,
            costs={"model": "measured", "device": "here"},
            environment=environment_of(Call.of(step.args, step.kwargs), step.model),
        ),
    )


def _incoming_gradient_bytes(observed: Observed, k: int) -> int:
    """Bytes of the gradients that part k receives: those of the storages that the next part, or the
    one after it, reads from it."""
    made = set(observed.parts[k].made)
    if observed.parts[k].overwritten:  # its output may be on its argument's storage
        made |= set(observed.parts[k].read)
    read = {i for part in observed.parts[k + 1 : k + 3] for i in part.read}
    return observed.bytes_of(made & read)
