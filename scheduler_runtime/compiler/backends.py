"""torch.compile backends that use our partitioner (`scheduler_runtime.compiler.partitioner`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen

from scheduler_runtime.compiler.partitioner import BudgetPartitioner

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def _inductor(partitioner: BudgetPartitioner) -> Backend:
    from torch._inductor.compile_fx import compile_fx

    patches = {"custom_partitioner_fn": partitioner}
    return functools.partial(compile_fx, config_patches=patches)  # type: ignore[return-value]


def _aot_eager(partitioner: BudgetPartitioner) -> Backend:
    """Runs the traced operators one by one, without fusion: bitwise identical to eager mode."""
    return aot_autograd(
        fw_compiler=_boxed,
        bw_compiler=_boxed,
        partition_fn=partitioner,
        keep_inference_input_mutations=True,
    )


def _boxed(module: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
    """Generated code that takes its inputs in a list, and frees each after its last use."""
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
    """The backend of this name, with this partitioner. Raises ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; one of {', '.join(BACKENDS)}")
    return BACKENDS[name](partitioner)
