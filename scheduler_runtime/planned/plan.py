"""`Plan`: the parts of a Solution or a schedule file that `apply` needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from graphs.capture import KeptCapture
from graphs.files import FormatError, Record
from graphs.fsdp import sharding_words
from graphs.graph import Graph
from graphs.host_state import buckets_in, optimizer_of, parameters_on_host
from graphs.rewrites import REWRITES
from graphs.zero import zero_words
from solver.methods import KnownPlan
from solver.schedule import Compute, Request, SavedSchedule, Schedule, Solution
from solver.sizes_deadlines_progress import describe_type

AnyPlan: TypeAlias = Solution | SavedSchedule | str | Path


def check_order(model: object, plan: object, *, call: str = "apply") -> None:
    """Raise TypeError unless these are a module and a plan (or a list of plans), in this order.

    call: name of the calling function, for messages.
    """
    right = f"{call}(model, solution)"
    if isinstance(model, AnyPlan) and isinstance(plan, nn.Module):
        raise TypeError(
            f"{call}() was given the plan first and the {type(plan).__name__} second; write {right}"
        )
    check_module(model, right)
    for each in plan if isinstance(plan, list | tuple) else [plan]:
        if not isinstance(each, AnyPlan):
            raise TypeError(
                f"{call}() was given {describe_type(each)} as the plan; pass what solve(model, "
                f"batch, ...) returned: {right}"
            )


def check_module(model: object, right: str) -> None:
    """Raise TypeError unless this is a module. right: the correct call, for the message."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {describe_type(model)}, not a torch.nn.Module: {right}")


@dataclass(frozen=True)
class Plan:
    """A schedule, the request that it answers, and the graph it was made for.

    environment: shapes, dtypes, mode, ... of the step (`graphs.model_calls.environment_of`).
    module_graph_id: graph id of the part of the step that the module runs.
    parameter_forms, buffer_forms, input_forms: of the planned module and call, as in `GraphMeta`
        (empty: not known).
    loss: the graph of a loss that the caller computes (without nodes: the model returns its loss;
        None: not known).
    graph: the whole step, with a loss outside of the model and the optimizer (None: the plan is
        from a schedule file).
    known: the plan's schedule and rewrites, from which plans for other calls are made.
    peak_bytes: peak of the whole step.
    saved_bytes: bytes on the device when the forward pass has ended, without resident tensors (0
        for an older file, which does not record it).
    kept: the traced program (None: it was traced in another process, or must be traced again).
    """

    schedule: Schedule
    request: Request
    environment: Mapping[str, Any]
    module_graph_id: str
    parameter_forms: Mapping[str, str]
    buffer_forms: Mapping[str, str]
    input_forms: Sequence[str]
    loss: Graph | None
    graph: Graph | None
    known: KnownPlan
    peak_bytes: int
    saved_bytes: int
    kept: KeptCapture | None = None

    @property
    def rewrites(self) -> tuple[str, ...]:
        """The rewrites that the planned graph was made with."""
        return self.known.rewrites

    @property
    def state_buckets(self) -> tuple[int, ...]:
        """The number of parameters in each bucket of optimizer state that is on the host; (): the
        state is on the device."""
        if not optimizer_of(self.environment).get("state_on_host"):
            return ()
        return tuple(bucket.n_parameters for bucket in buckets_in(self.environment))

    @property
    def host_parameters(self) -> dict[str, str]:
        """The parameters that are on the host while no operator reads them: their names in the
        module -> tensor of the graph."""
        return parameters_on_host(self.environment) if self.state_buckets else {}

    @property
    def module_operators(self) -> tuple[str, ...]:
        """The names of the operators that the module runs, in order (for an older file, followed
        by those of the optimizer)."""
        if self.graph is not None:
            return tuple(node.name for node in self.graph.module_part().nodes)
        of_caller = set() if self.loss is None else set(self.loss.node_by_name)
        computed = (op.node for op in self.schedule.ops if isinstance(op, Compute))
        names = [name for name in dict.fromkeys(computed) if name not in of_caller]
        known = Record(self.environment, where="environment")
        return tuple(names[: known.integer("n_module_operators", default=len(names))])

    @classmethod
    def of(cls, plan: Solution | SavedSchedule | str | Path) -> Plan:
        """Read a Solution, a loaded schedule file or the path of one.

        Raises FileNotFoundError, FormatError for a file that is damaged, and ValueError for a plan
        that cannot be applied.
        """
        if isinstance(plan, str | Path):
            if not Path(plan).is_file():
                raise FileNotFoundError(
                    f"there is no schedule file {str(plan)!r}; `solve -o schedule.json model.py` "
                    "and Solution.save write one"
                )
            plan = SavedSchedule.load(plan)
        if plan.schedule is None:
            why = plan if isinstance(plan, Solution) else f"its status is {plan.status}"
            raise ValueError(f"the solution has no schedule to apply: {why}")
        known, environment = KnownPlan.of(plan), plan.environment
        if isinstance(plan, Solution):
            assert plan.simulation is not None  # it has a schedule
            peak_bytes = plan.simulation.peak_bytes
            saved_bytes = plan.simulation.saved_bytes
            graph: Graph | None = plan.graph
            kept = None if plan.variants is None else plan.variants.kept
            module_graph_id = plan.graph.module_part().graph_id
            meta = plan.graph.meta
            forms = meta.parameter_forms, meta.buffer_forms, meta.input_forms
            loss: Graph | None = plan.graph.loss_part()
        else:
            saved_fields = Record(environment, where="environment")
            peak_bytes = plan.peak_bytes
            saved_bytes = saved_fields.integer("saved_bytes", default=0)
            graph, kept = None, None
            saved = environment.get("loss_graph")
            loss = None if saved is None else Graph.from_json(saved, source="loss_graph")
            _refuse_truncated(plan)
            module_graph_id = environment.get("module_graph_id", plan.schedule.graph_id)
            forms = (
                saved_fields.mapping("parameter_forms", default={}),
                saved_fields.mapping("buffer_forms", default={}),
                saved_fields.strings("input_forms", default=[]),
            )
        _refuse_inapplicable(environment, known.rewrites)
        return cls(
            plan.schedule,
            plan.request,
            environment,
            module_graph_id,
            *forms,
            loss=loss,
            graph=graph,
            known=known,
            peak_bytes=peak_bytes,
            saved_bytes=saved_bytes,
            kept=kept,
        )


def _refuse_inapplicable(environment: Mapping[str, Any], rewrites: Sequence[str]) -> None:
    """Raise ValueError for a plan that cannot be applied, FormatError if it is damaged."""
    if words := sharding_words(environment):
        raise ValueError(
            f"the plan is for a sharded step ({words}): FSDP gathers parameters in hooks of "
            "submodules, which a planned step does not run. Export it with "
            "checkpoint_solver.export.to_torch_checkpoint(model, solution), then shard the "
            "model with checkpoint_solver.fsdp.shard(model, solution)"
        )
    if words := zero_words(environment, sharded=True):
        raise ValueError(
            f"the plan is for a sharded step ({words}): the engine gathers parameters in hooks "
            "of submodules, which a planned step does not run. Export it with "
            "checkpoint_solver.export.to_torch_checkpoint(model, solution), then give the "
            "model to deepspeed.initialize"
        )
    chosen = environment.get("gradient_outputs", [])
    if not isinstance(chosen, list) or not all(isinstance(index, int) for index in chosen):
        raise FormatError(
            f"environment: field 'gradient_outputs' is {chosen!r:.60}; expected a list of integers"
        )
    for name in ("gradient_layouts", "gradient_strides"):  # the latter in older files
        layouts = environment.get(name, [])
        if not _are_layouts(layouts, as_strides=name == "gradient_strides"):
            raise FormatError(
                f"environment: field {name!r} is {layouts!r:.60}; expected lists of the index of "
                "an output, the order of its dimensions and, if there are gaps, shape and strides"
            )
    if not chosen:
        raise ValueError(
            "the plan was made from a graph file, not from a traced module; apply needs a plan "
            "from solve(model, batch, ...) or `solve model.py`"
        )
    if unknown := [name for name in rewrites if name not in REWRITES]:
        raise ValueError(
            f"the plan was made with the rewrite {unknown[0]!r}, which this version does not "
            "know; plan again, or use the version that made it"
        )


def _refuse_truncated(plan: SavedSchedule) -> None:
    """Raise FormatError if a file's ops compute fewer operators than the module runs."""
    assert plan.schedule is not None
    n_planned = Record(plan.environment, where="environment").integer(
        "n_module_operators", default=0
    )
    n_computed = len({op.node for op in plan.schedule.ops if isinstance(op, Compute)})
    if n_computed < n_planned:
        raise FormatError(
            f"ops: {n_computed} operators are computed, and the planned module has {n_planned}: "
            "the file is damaged, or was edited; plan again"
        )


def _are_layouts(item: Any, *, as_strides: bool) -> bool:
    """as_strides: whether there are strides in place of the order."""
    return isinstance(item, list) and all(
        isinstance(each, list)
        and (len(each) == 2 or (len(each) == 4 and not as_strides))
        and isinstance(each[0], int)
        and all(_are_sizes(sizes) and len(sizes) == len(each[1]) for sizes in each[1:])
        and (as_strides or sorted(each[1]) == list(range(len(each[1]))))
        for each in item
    )


def _are_sizes(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(size, int) and size >= 0 for size in item)
