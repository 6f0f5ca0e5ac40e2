"""Make all ranks of a tensor-parallel step run the same plan, so that no rank waits for ever.

A rank that plans while the others run collectives, or that runs those of another plan, would leave
all of them waiting. So before each planned step, each rank writes to the group's store which batch
it has and whether it has a plan for it, and reads what the other ranks wrote. Before a new program
runs, the ranks also exchange what they have planned, or why they could not plan. If one rank fails,
all of them raise an error with its reason; a rank that does not answer in time is named. Then
collectives run in the same order on all ranks: that of the plan, which may run some of them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from graphs.model_calls import is_distributed
from solver.schedule import Schedule, Solution, ops_from_json, simulate

WAIT_S = 600.0
"""How long to wait for another rank, in seconds: planning may take that much longer there."""

_N_KEPT = 3
"""How many of its latest messages a rank leaves in the store. Before a rank writes again, it has
read the previous messages of all ranks or, after an error of its own, those before them. So all
ranks have read its older messages, and they can be deleted."""

_n_sent: Counter[str] = Counter()
"""Name of a group -> how many messages this rank has written in it."""


class RanksDisagreeError(ValueError):
    """Another rank has no plan, or the ranks' plans differ; the message says which."""


class Ranks:
    """The ranks that a module is distributed over."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name = group.group_name
        self.rank, self._n_ranks = dist.get_rank(group), dist.get_world_size(group)

    @property
    def _store(self) -> dist.Store:
        """The group's store. Looked up each time: an object that holds a group would keep its
        threads alive after destroy_process_group()."""
        group = distributed_c10d._resolve_process_group(self._name)
        return distributed_c10d._get_process_group_store(group)

    @classmethod
    def of(cls, model: nn.Module) -> Ranks | None:
        """The ranks of this module. None: it is not distributed, or this process stands for a
        single rank (in a group of one, or in a fake group)."""
        found: Any = next(filter(is_distributed, model.parameters()), None)
        if found is None or not dist.is_initialized():
            return None
        group = found.device_mesh.get_group()
        alone = dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"
        return None if alone else cls(group)

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Write a message and return those of all ranks, in rank order.

        Raises RanksDisagreeError if a rank does not answer within WAIT_S, or reports an error.
        """
        keys = self._send(message)
        seconds = datetime.timedelta(seconds=WAIT_S)
        messages = []
        for rank, key in enumerate(keys):
            try:
                self._store.wait([key], seconds)
                messages.append(json.loads(self._store.get(key)))
            except RuntimeError as error:  # the time is up, or the store's process has ended
                raise RanksDisagreeError(
                    f"rank {self.rank} waited for rank {rank} for up to {WAIT_S:.0f} s before a "
                    "planned step: it has ended, or has not called the model. All ranks have to "
                    "call it together, with batches of one shape"
                ) from error
        for rank, each in enumerate(messages):
            if "error" in each:
                raise RanksDisagreeError(f"rank {rank} cannot run the step: {each['error']}")
        return messages

    @contextlib.contextmanager
    def sending_errors(self) -> Iterator[None]:
        """In this context, an error is also sent to the ranks that wait for this one."""
        try:
            yield
        except RanksDisagreeError:
            raise  # all ranks raise it
        except Exception as error:
            self._send({"error": f"{type(error).__name__}: {error}"})
            raise

    def agree(self, message: Mapping[str, Any]) -> None:
        """Raise RanksDisagreeError on all ranks if messages differ in a field of `message`."""
        messages = self.exchange(message)
        for field in message:
            first = messages[0].get(field)
            for rank, each in enumerate(messages):
                if each.get(field) != first:
                    raise RanksDisagreeError(
                        f"ranks 0 and {rank} have different steps: {field} is {first} on rank 0 "
                        f"and {each.get(field)} on rank {rank}. {_REMEDIES.get(field, '')}"
                    )

    def with_plan_of_first(self, solution: Solution) -> Solution:
        """The solution with the plan of rank 0.

        Ranks may find different plans for the same step, with measured costs or where the time
        limit ends a search. If the plan of rank 0 does not fit this rank's budget, the solution is
        returned as it is, and a later comparison of the plans raises an error."""
        plan = None
        if solution.schedule is not None:
            plan = [list(solution.graph.meta.rewrites), solution.schedule.ops_to_json()]
        first_plan = self.exchange({"plan": plan})[0]["plan"]
        if first_plan in (plan, None):
            return solution
        with_first_plan = _with_plan(solution, *first_plan)
        assert with_first_plan.simulation is not None
        fits = with_first_plan.simulation.peak_bytes <= solution.request.available_bytes
        return with_first_plan if fits else solution

    def _send(self, message: Mapping[str, Any]) -> list[str]:
        """Write a message to the store. Returns the keys of all ranks' messages at this point."""
        n_sent = _n_sent[self._name]
        _n_sent[self._name] += 1
        keys = [self._key(n_sent, rank) for rank in range(self._n_ranks)]
        self._store.set(keys[self.rank], json.dumps(message))
        if n_sent >= _N_KEPT:
            self._store.delete_key(self._key(n_sent - _N_KEPT, self.rank))
        return keys

    def _key(self, n_sent: int, rank: int) -> str:
        return f"checkpoint_solver/{self._name}/{n_sent}/{rank}"


_REMEDIES = {
    "the batch": "Give all ranks batches of one shape: pad them, or drop the last one.",
    "a plan for it": (
        "Call the model the same number of times on every rank, and change it in the same way."
    ),
    "the plan": (
        "A search that the time limit ends, or measured costs, can differ from rank to rank: solve "
        "on one rank and give all of them its file (Solution.save), or use fit, which takes the "
        "plan of the first rank everywhere."
    ),
    "the exported plan": (
        "A search that the time limit ends, or measured costs, can differ from rank to rank: solve "
        "on one rank, and give to_torch_checkpoint that plan on all of them."
    ),
}


def _with_plan(solution: Solution, rewrites: Sequence[str], ops: Sequence[Any]) -> Solution:
    """The solution with the plan of another rank: these rewrites, and these ops as JSON."""
    variants = () if solution.variants is None else solution.variants.planned
    graph = next(
        each for each in (solution.graph, *variants) if list(each.meta.rewrites) == rewrites
    )
    schedule = Schedule(ops_from_json(ops, source="the plan of rank 0"), graph.graph_id)
    simulation = simulate(graph, schedule, places=solution.request.places)
    return dataclasses.replace(
        solution, status="feasible", graph=graph, schedule=schedule, simulation=simulation
    )
