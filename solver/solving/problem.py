"""What `solve` is given, a module, a graph or its file, as the variants of one training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graphs.files import FormatError
from graphs.graph import Graph
from graphs.rewrites import Variants
from solver.sizes_deadlines_progress import check_names

if TYPE_CHECKING:
    from torch import nn

    from graphs.costs import CostModel
    from graphs.hardware import Hardware

_Traced = TypeVar("_Traced")


def is_traced(problem: object) -> bool:
    """Whether the problem is a graph or its file."""
    return isinstance(problem, Graph | str | Path)


def name_of(problem: nn.Module | Graph | str | Path) -> str:
    """What the lines that tell what runs call it: the model's class, or the file."""
    if isinstance(problem, str | Path):
        return Path(problem).name
    return problem.meta.model or "graph" if isinstance(problem, Graph) else type(problem).__name__


def as_step(
    problem: nn.Module | Graph | str | Path,
    batch: Any,
    trace_options: Mapping[str, Any],
    *,
    others: Iterable[str],
) -> tuple[Variants, Hardware | None, CostModel | None]:
    """The variants of the step, the device that was named, and the costs (None: none were).

    others: the options of `solve` that are not for tracing, one of which may have been meant.
    """
    if isinstance(problem, Graph | str | Path):
        if batch is not None or trace_options:
            given = ", ".join([*(["batch"] if batch is not None else []), *trace_options])
            raise TypeError(f"a graph is traced already: {given} would have no effect")
        graph = problem if isinstance(problem, Graph) else _loaded(problem)
        return Variants.of(graph), None, None
    if isinstance(problem, type):
        name = problem.__name__
        raise TypeError(f"{name} is a class; give a module: solve({name}(...), batch, budget=...)")
    from torch import nn

    if not isinstance(problem, nn.Module):
        raise TypeError(
            f"the problem is an object of type {type(problem).__name__}; give a torch.nn.Module "
            "(whose forward calls it, if it is a function), a Graph or a graph file"
        )
    if batch is None:
        raise TypeError(
            "a batch is missing: solve(model, batch, budget=...), with what the model is called "
            "with: a tensor, a tuple or a dict of tensors"
        )
    from graphs.trace import trace, trace_variants

    check_names("solve", trace_options, [*others, *inspect.signature(trace).parameters])
    return traced_for_device(
        problem,
        trace_options,
        lambda **options: trace_variants(problem, batch, **options),
    )


def traced_for_device(
    model: nn.Module, options: Mapping[str, Any], traced: Callable[..., _Traced]
) -> tuple[_Traced, Hardware | None, CostModel | None]:
    """What `traced(**options)` returns, with `device` and `costs` among them as words; the device
    that was named, and the costs (None: none were). Raises what it raises.
    """
    from solver.device_and_costs import find_target

    options = dict(options)
    device, costs = options.pop("device", None), options.pop("costs", None)
    if device is None and isinstance(costs, str):
        device = next((parameter.device for parameter in model.parameters()), "cpu")
    if device is None:  # the device of the model, found and checked by trace
        return traced(**options, costs=costs), None, costs
    found, target = find_target(device, costs).traced_with(
        lambda to: traced(**options, device=to.torch_device, costs=to.costs)
    )
    return found, target.hardware, target.costs


def _loaded(path: str | Path) -> Graph:
    """Read a graph file; says what would be right where the path is of something else."""
    name = str(path)
    if name.startswith("hf:") or Path(name).suffix == ".py":
        raise FormatError(
            f"{name}: solve() in Python takes a module and its batch, a Graph or a graph file "
            "(.json); a model file or configuration is for the command (solve --budget SIZE "
            f"{name}); here import it: solve(get_model(), get_batch(), budget=...)"
        )
    try:
        return Graph.load(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name}: no such file; give a graph file (--graph-out or Graph.save writes one)"
        ) from error
