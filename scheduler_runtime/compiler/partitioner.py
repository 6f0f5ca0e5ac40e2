"""A partitioner for torch.compile: chooses what to save for backward, within a budget in bytes.

Inductor gives a partitioner the joint graph of a step as it will compile it: decomposed,
functionalised, and after its joint passes. PyTorch's own partitioner (min-cut) runs first; its
choice is the baseline, without extra time. If its peak is above the budget, `solver` plans which of
the saved values to drop and recompute. `scheduler_runtime.compiler.compile_model` has the loop
around the partitioner, which measures.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from graphs import hardware
from graphs.costs import Roofline, finish_measuring, measured
from scheduler_runtime.compiler.fused_costs import FusedCosts
from scheduler_runtime.compiler.joined import Joined, join
from scheduler_runtime.compiler.split import split
from solver.schedule import Obstacle, Request, Schedule, Simulation, Solution
from solver.solving import answer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partition:
    """What was decided for one compiled graph.

    solution: the plan; its peaks count the outputs of all operators, though a compiler keeps some
        of them in registers.
    saved_bytes: bytes saved for backward, without the step's inputs.
    """

    solution: Solution
    saved_bytes: int

    @property
    def predicted_bytes(self) -> int:
        """Peak of the plan, by the simulator."""
        return self._simulation.peak_bytes

    @property
    def overhead(self) -> float:
        """Extra time as a share of PyTorch's partition, by the cost model."""
        return self._simulation.time_s / (self.solution.baseline.time_s or 1.0) - 1.0

    @property
    def lower_bound(self) -> float:
        """A lower bound on the overhead of any plan within the budget."""
        return max(0.0, self.solution.lower_bound_overhead)

    @property
    def n_recomputed(self) -> int:
        """Operators recomputed beyond those of PyTorch's partition."""
        return self._simulation.n_recomputed

    @property
    def _simulation(self) -> Simulation:
        assert self.solution.simulation is not None
        return self.solution.simulation


class NothingFitsError(ValueError):
    """No plan of the compiled graph fits.

    obstacle: the smallest peak found, and its schedule.
    """

    def __init__(self, message: str, *, obstacle: Obstacle | None) -> None:
        super().__init__(message)
        self.obstacle = obstacle

    @property
    def found(self) -> tuple[Schedule, ...]:
        """The schedule with the smallest peak, if the search has kept it."""
        schedule = None if self.obstacle is None else self.obstacle.schedule
        return () if schedule is None else (schedule,)

    @property
    def is_cut_short(self) -> bool:
        """Whether the time limit ended the search."""
        return self.obstacle is not None and self.obstacle.cut_short

    def excludes(self, budget_bytes: int) -> bool:
        """Whether another search for this budget would find nothing either."""
        least = self.obstacle
        return least is not None and not least.cut_short and budget_bytes < least.reached_bytes


class BudgetPartitioner(CustomPartitionerFn):
    """Splits each joint graph so that its peak, by the simulator, fits `budget_bytes`.

    budget_bytes: budget for the graph's own tensors: parameters, batch, activations, gradients
        (None: no budget; PyTorch's partition is taken, and its peak is predicted).
    method, time_limit_s, seed: as in `solver.solve`.
    costs: cost model of the operators (None: measured on CUDA, a generic CPU's roofline elsewhere).
    starts: known schedules, used if the compiled graph is theirs.
    partitions: what was decided, in the order of compilation.

    Raises NothingFitsError, and TraceError for graphs whose sizes depend on data.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None,
        method: str = "auto",
        time_limit_s: float = 60.0,
        seed: int = 0,
        costs: FusedCosts | None = None,
        starts: Sequence[Schedule] = (),
    ) -> None:
        self.budget_bytes = budget_bytes
        self.method = method
        self.time_limit_s = time_limit_s
        self.seed = seed
        self.partitions: list[Partition] = []
        self._costs = costs
        self._starts = starts
        self._is_sealed = False

    def seal(self) -> None:
        """Warn of compilations from now on, since their peak will not be measured."""
        self._is_sealed = True

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if self._is_sealed:
            logger.warning(
                "torch.compile recompiles the module: a call differs from the measured one; "
                "it is planned for %s bytes too, but its peak is not measured",
                self.budget_bytes,
            )
        static_inputs = options.get("static_lifetime_input_indices") or ()
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        costs = self._costs or _default_costs(gm)
        n_outputs = options["num_fwd_outputs"]
        joined = join(
            forward, backward, n_outputs=n_outputs, static_inputs=static_inputs, costs=costs
        )
        finish_measuring(costs.products)
        solution = self._solve(joined)
        saved_bytes = joined.bytes_of(joined.saved)
        assert solution.schedule is not None
        if solution.simulation is not None and solution.simulation.n_recomputed:
            forward, backward, saved_bytes = split(joined, solution.schedule)
        saved_bytes += _save_copies(forward, joined.overwritten, n_outputs=n_outputs)
        self.partitions.append(Partition(solution, saved_bytes))
        return forward, backward

    def uuid(self) -> Any:
        """None turns the cache off for partitions: cached ones would be missing in the report.
        Kernels are cached all the same."""
        return None

    def _solve(self, joined: Joined) -> Solution:
        budget_bytes = 2**60 if self.budget_bytes is None else self.budget_bytes
        request = Request(budget_bytes, 0, self.method, self.time_limit_s, self.seed)
        solution = answer(joined.graph, request, starts=self._starts)
        if solution.schedule is None:
            raise NothingFitsError(
                f"no plan of the compiled graph fits {budget_bytes} bytes ({solution.status})"
                f"{solution.obstacle_text}",
                obstacle=solution.obstacle,
            )
        return solution


def _save_copies(forward: fx.GraphModule, overwritten: Collection[str], *, n_outputs: int) -> int:
    """Save copies of the inputs that the forward pass overwrites, if the backward pass reads them.
    Returns their bytes.

    The inputs themselves have their new values by then, and other versions after a second forward
    pass, which autograd refuses. PyTorch's own partition may read them, too.
    """
    output: Any = forward.graph.output_node()
    returned, saved = output.args[0][:n_outputs], output.args[0][n_outputs:]
    # functionalisation puts all writes at the end
    writes = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    copies: dict[fx.Node, fx.Node] = {}
    with forward.graph.inserting_before(next(iter(writes), output)):
        for node in saved:
            if isinstance(node, fx.Node) and node.name in overwritten:
                copies[node] = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
                copies[node].meta["val"] = node.meta["val"]
    output.args = ((*returned, *(copies.get(node, node) for node in saved)),)
    forward.recompile()
    return sum(node.meta["val"].nbytes for node in copies)


def _default_costs(gm: fx.GraphModule) -> FusedCosts:
    """On CUDA, operators with FLOPs are measured; elsewhere, the roofline of a generic CPU."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            products = measured(value.device)
            return FusedCosts(products.roofline.hardware, products=products)
    cpu = hardware.named("cpu")
    return FusedCosts(cpu, products=Roofline(cpu))
