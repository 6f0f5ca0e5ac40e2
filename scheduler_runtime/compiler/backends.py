"""Backends of torch.compile that take a partitioner of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen

from scheduler_runtime.compiler.partitioner import BudgetPartitioner

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def _inductor(partitioner: BudgetPartitioner) -> Backend:
    from torch._inductor.compile_fx import compile_fx

    def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled: Any = compile_fx(
            module, inputs, config_patches={"custom_partitioner_fn": partitioner}
        )
        return compiled  # type: ignore[no-any-return]

    return compile_graph


def _aot_eager(partitioner: BudgetPartitioner) -> Backend:
    """Operator by operator as traced: no fusion, no code to build, the bits of eager operators."""
    compile_graph: Backend = aot_autograd(
        fw_compiler=_as_it_is,
        bw_compiler=_as_it_is,
        partition_fn=partitioner,
        keep_inference_input_mutations=True,
    )
    return compile_graph


def _as_it_is(module: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
    """Generated code that takes its inputs in a list and drops each after its last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()

    def run(inputs: list[Any]) -> Any:
        return module.forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


BACKENDS: dict[str, Callable[[BudgetPartitioner], Backend]] = {
    "inductor": _inductor,
    "aot_eager": _aot_eager,
}


def backend_of(name: str, partitioner: BudgetPartitioner) -> Backend:
    """The backend of that name around the partitioner. Raises ValueError."""
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; one of {', '.join(BACKENDS)}")
    return BACKENDS[name](partitioner)
