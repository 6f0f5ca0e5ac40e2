"""Whether a solution can be exported to a model, and which of its modules may be checkpointed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import nn

from graphs.capture import caching_configs, has_parallel_style
from graphs.fsdp import is_container, listed_blocks
from graphs.graph import Graph, is_under
from scheduler_runtime.execute import ExportedForward
from scheduler_runtime.planned import PlannedForward
from solver.module_checkpointing import ModuleTree
from solver.schedule import Solution


class ExportError(ValueError):
    """The plan cannot be exported to this model; the message says why and what to do instead."""


def check_exportable(model: nn.Module, solution: Solution, *, call: str) -> None:
    """Check that this solution can be exported to this model.

    call: name of the exporting function, for messages.

    Raises ExportError for a solution without a schedule, and for a model that has a plan already or
    is not the planned one; TypeError for anything but a Solution, such as a file.
    """
    if not isinstance(solution, Solution):
        raise TypeError(
            f"{call}() was given a {type(solution).__name__} as the plan; give the Solution of "
            "solve(model, batch, ...): a file does not hold the graph that it needs"
        )
    if solution.schedule is None or solution.simulation is None:
        raise ExportError(
            f"the solution has no schedule to export: its status is {solution.status}"
            f"{solution.obstacle_text}"
        )
    graph = solution.graph
    modules = dict(model.named_modules())
    for path, module in modules.items():
        forward = module.__dict__.get("forward")
        if isinstance(forward, PlannedForward):
            raise ExportError("a plan is applied to this model already; remove(model) it first")
        if isinstance(forward, ExportedForward):
            raise ExportError(
                f"a plan is exported to this model already (module {path!r}); remove() it first"
            )
    for path in caching_configs(model).keys() - set(graph.meta.unfilled_caches):
        config = f"model.{path}.config" if path else "model.config"
        raise ExportError(
            f"config.use_cache of {type(modules[path]).__name__} is on: blocks that are recomputed "
            "would fill the cache a second time, and the plan is for a step without it; set "
            f"{config}.use_cache = False"
        )
    if not graph.meta.parameters:
        raise ExportError(
            "the solution was made for a graph file that no module was traced into; export needs "
            "one from solve(model, batch, ...)"
        )
    missing = sorted(set(graph.meta.parameters) ^ dict(model.named_parameters()).keys())
    missing += sorted({n.module for n in graph.forward_nodes if n.module not in modules})
    if missing:
        raise ExportError(
            f"the solution was made for a {graph.meta.model or 'model'} that differs from "
            f"this {type(model).__name__} in {missing[0]!r}; export to the module that was given "
            "to solve, before it is wrapped by anything else"
        )


def differentiated_words(graph: Graph) -> str:
    """Words on the modules that are left alone since forward differentiates them; "": none."""
    paths = [path for path in graph.meta.differentiated_modules if path]
    if not graph.meta.differentiated_modules:
        return ""
    of = f" of {', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''}" if paths else ""
    return (
        f"forward itself takes gradients{of}, or calls them in a transform of torch.func: there, "
        "PyTorch's checkpoints and hooks of saved tensors would run at other times than planned, "
        "or fail"
    )


def module_tree(model: nn.Module, graph: Graph) -> ModuleTree:
    """The modules that may be checkpointed, of those that the step calls.

    The blocks are the members of the outermost ModuleLists and Sequentials; in a model without
    any, its children. In place of modules that the step never calls (lists in a list), there are
    the submodules that it calls.

    Four kinds of modules are left out. One with a parallel style of its own can only be recomputed
    by a module around it, since the style's collectives run outside of its forward. One that calls
    a loss in row chunks must run once, since a recomputation would call PyTorch's own loss function
    instead. One that leaves tensors in attributes must run once, since a recomputation would begin
    with what the first run has left. And checkpoints in modules that forward differentiates itself
    do not run as planned (`graphs.capture.differentiated`).
    """
    run_once = [str(call["module"]) for call in graph.meta.called_losses]
    run_once += [*graph.meta.leaving_modules, *graph.meta.differentiated_modules]
    refused = {
        path
        for path, module in model.named_modules()
        if has_parallel_style(module) or any(is_under(inside, path) for inside in run_once)
    }
    first: dict[str, int] = {}  # path -> position of the first operator in it
    for position, node in enumerate(graph.forward_nodes):
        for path in itertools.accumulate(node.module.split("."), "{}.{}".format):
            first.setdefault(path, position)

    # Replacing the forward of a module that is never called has no effect: that of a list, or of a
    # module whose other methods are called.
    called = set(graph.meta.module_calls)
    if not called:  # a file from before they were recorded
        called = {path for path, module in model.named_modules() if not is_container(module)}
    called |= {node.module for node in graph.forward_nodes}  # parts that are planned as one piece

    def outermost_called(path: str) -> Iterator[str]:
        """The module at this path if the step calls it, otherwise what it calls of its parts."""
        if path in called and path in first:
            yield path
        elif path not in called:
            yield from inside_of(path)

    def inside_of(path: str) -> Iterator[str]:
        for name, _ in model.get_submodule(path).named_children():
            yield from outermost_called(f"{path}.{name}" if path else name)

    def parts_of(path: str) -> tuple[str, ...]:
        return tuple(part for part in inside_of(path) if part not in refused)

    listed = [part for path in listed_blocks(model) for part in outermost_called(path)]
    blocks = [path for path in listed if path not in refused] or list(parts_of(""))
    blocks.sort(key=first.__getitem__)
    parts = {block: parts_of(block) for block in blocks}
    parts |= {part: parts_of(part) for inside in parts.values() for part in inside}
    around = [
        path
        for path, _ in model.named_modules()
        if path and path not in blocks and path not in refused and path in called
        if any(is_under(block, path) for block in blocks)
    ]
    # Only the modules nearest to the blocks: recomputing one further out would be almost the whole
    # step.
    nearest = [p for p in around if not any(o != p and is_under(o, p) for o in around)]
    return ModuleTree(blocks=tuple(blocks), parts=parts, around=tuple(nearest))
