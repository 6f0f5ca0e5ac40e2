"""Turn the problem given to `solve` (a module, a graph or its file) into variants of one step."""

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
    """Whether the problem is a graph or a graph file, so that nothing has to be traced."""
    return isinstance(problem, Graph | str | Path)


def name_of(problem: nn.Module | Graph | str | Path) -> str:
    """The problem's name in progress messages: the model's class, or the file's name."""
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
    """Trace a module, or load a graph: return its variants, the named device and the costs.

    Device and costs are None if none were given.

    others: names of the other options of `solve`, to suggest one if an option is misspelt.

    Raises TypeError for a problem, batch or option that `solve` does not take, TraceError for a
    module that cannot be traced, FormatError and FileNotFoundError for a graph file.
    """
    if isinstance(problem, Graph | str | Path):
        if batch is not None or trace_options:
            given = ", ".join([*(["batch"] if batch is not None else []), *trace_options])
            raise TypeError(f"a graph is traced already: {given} would have no effect")
        graph = problem if isinstance(problem, Graph) else _load_graph(problem)
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
    model: nn.Module, options: Mapping[str, Any], trace: Callable[..., _Traced]
) -> tuple[_Traced, Hardware | None, CostModel | None]:
    """Resolve the options `device` and `costs`, which may be words, and call `trace(**options)`.

    Returns its result, the named device and the costs (None: none were given). Raises what `trace`
    raises, and DeviceError.
    """
    from solver.device_and_costs import find_target

    options = dict(options)
    device, costs = options.pop("device", None), options.pop("costs", None)
    if device is None and isinstance(costs, str):
        device = next((parameter.device for parameter in model.parameters()), "cpu")
    if device is None:  # the device of the model, found and checked by trace
        return trace(**options, costs=costs), None, costs
    found, target = find_target(device, costs).traced_with(
        lambda to: trace(**options, device=to.torch_device, costs=to.costs)
    )
    return found, target.hardware, target.costs


def _load_graph(path: str | Path) -> Graph:
    """Read a graph file. The error says what to do if the path is of something else."""
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
