"""Run a program as part of autograd: a chain of functions, one for each piece of the backward pass.

A single autograd function would return all gradients at once, so all of them would be held until
its backward ends: with accumulation two copies of every gradient, and hooks would fire late. A
chain of functions that pass on an empty token returns each gradient as soon as it is complete:

    token -> Link(leaves of the last piece) -> ... -> Link(leaves of the first piece) -> Outputs

In the backward pass the engine runs the chain from the right, and accumulates into `.grad` after
each function. `Outputs` runs the whole forward piece. Its backward only stores the gradients of the
outputs: the engine holds the arguments of a function until it returns, so a piece of the backward
pass could not free them where the plan does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from scheduler_runtime.execute.before_step import StateBeforeStep
from scheduler_runtime.execute.program import Program
from scheduler_runtime.execute.restart_step import RestartableStep
from scheduler_runtime.execute.run import Run
from scheduler_runtime.execute.without_dispatch_modes import leave_modes


class Outputs(torch.autograd.Function):
    """The forward pass; its backward receives the gradients of the outputs."""

    @staticmethod
    def forward(ctx: Any, run: Run, token: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.run = run
        outputs = run.forward()
        planned = dict(run.program.tangents)
        ctx.tangents = [planned.get(index) for index in range(len(outputs))]
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(outputs) if i not in run.program.differentiable)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a planned step has no second derivative, which create_graph=True asks for: call "
                "torch.autograd.grad in the forward of a module around this one, and plan that "
                "module instead (docs/derivatives.md), or use the plain model "
                "(checkpoint_solver.remove(model))"
            )
        ctx.run.start_backward(ctx.tangents, gradients)
        return None, ctx.run.token_gradient


def program_of_output(tensor: torch.Tensor) -> Program | None:
    """The program whose `run_step` has returned this tensor (None: it is not such an output)."""
    is_made = isinstance(tensor.grad_fn, Outputs._backward_cls)
    function: Any = tensor.grad_fn
    return function.run.program if is_made else None


class Link(torch.autograd.Function):
    """A function of the chain: its backward runs one piece and returns the gradients of its leaves.

    leaf_nodes: the placeholders of the leaves, in the order of the leaves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        position: int,
        leaf_nodes: tuple[fx.Node, ...],
        token: torch.Tensor,
        *leaves: torch.Tensor,
    ) -> torch.Tensor:
        ctx.run, ctx.position, ctx.leaf_nodes = run, position, leaf_nodes
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _token: torch.Tensor) -> Any:
        run: Run = ctx.run
        leave_modes(only_finished=True)
        gradients = run.backward(ctx.position, ctx.leaf_nodes)
        return (
            None,
            None,
            None,
            None if ctx.position == len(run.program.backward) - 1 else run.token_gradient,
            *(gradients.get(node) for node in ctx.leaf_nodes),
        )


def run_step(
    program: Program,
    tensors: Mapping[fx.Node, torch.Tensor],
    *,
    restartable: RestartableStep | None = None,
    before: StateBeforeStep | None = None,
) -> tuple[Any, ...]:
    """Run the forward pass of a program as part of autograd; returns `Program.computed_outputs`.

    tensors: placeholder of the traced graph -> parameter, buffer or batch tensor.
    restartable, before: as in `Run`.
    """
    run = Run(program, tensors, restartable, before)
    token: Any = run.token
    other_leaves = {} if restartable is None else dict.fromkeys(restartable.leaves)
    for position in range(len(program.backward) - 1, -1, -1):
        nodes = tuple(node for node, _ in program.backward[position].gradients)
        for node in nodes:
            other_leaves.pop(node, None)
        if position == 0:  # leaves without a planned gradient: another program may give them one
            nodes += tuple(other_leaves)
        token = Link.apply(run, position, nodes, token, *(tensors[node] for node in nodes))
    outputs: Any = Outputs.apply(run, token)
    return outputs if isinstance(outputs, tuple) else (outputs,)
