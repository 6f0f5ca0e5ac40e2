"""The ranks of a tensor-parallel step: one plan for all, and no rank that waits for ever.

Before each planned step, each rank says in the group's store which batch it has and whether there
is a plan for it, and reads what the others say: a rank that plans while the others run collectives,
or runs those of another plan, would leave all waiting. Before a new program runs they say as well
what they have planned, or why they could not. A rank that fails therefore fails on all, with its
reason; and one that does not come is named when the time is up. Collectives then run in the same
order everywhere: that of the plan, which may run some again.
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
"""For another rank: as long as planning may take longer there."""

_N_KEPT = 3
"""What a rank has said stays so long. To speak again it has read what all said before, or, after an
error of its own, what they said before that; so the others have read what is older."""

_n_said: Counter[str] = Counter()
"""By the name of a group: what has been said in it, by this rank."""


class RanksDisagreeError(ValueError):
    """Another rank has no plan, or the ranks have plans that do not fit together; says which."""


class Ranks:
    """The ranks that a module is distributed over."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name = group.group_name
        self.rank, self._n_ranks = dist.get_rank(group), dist.get_world_size(group)

    @property
    def _store(self) -> dist.Store:
        """Not kept: what holds on to a group keeps its threads beyond destroy_process_group()."""
        group = distributed_c10d._resolve_process_group(self._name)
        return distributed_c10d._get_process_group_store(group)

    @classmethod
    def of(cls, model: nn.Module) -> Ranks | None:
        """None: the module is not distributed, or this process stands for one rank alone."""
        found: Any = next(filter(is_distributed, model.parameters()), None)
        if found is None or not dist.is_initialized():
            return None
        group = found.device_mesh.get_group()
        alone = dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"
        return None if alone else cls(group)

    def said(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank says at this point, in their order. Raises RanksDisagreeError."""
        keys = self._say(mine)
        seconds = datetime.timedelta(seconds=WAIT_S)
        found = []
        for rank, key in enumerate(keys):
            try:
                self._store.wait([key], seconds)
                found.append(json.loads(self._store.get(key)))
            except RuntimeError as error:  # of the store: the time is up, or its process has ended
                raise RanksDisagreeError(
                    f"rank {self.rank} waited for rank {rank} for up to {WAIT_S:.0f} s before a "
                    "planned step: it has ended, or has not called the model. All ranks have to "
                    "call it together, with batches of one shape"
                ) from error
        for rank, words in enumerate(found):
            if "error" in words:
                raise RanksDisagreeError(f"rank {rank} cannot run the step: {words['error']}")
        return found

    @contextlib.contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """An error inside reaches the ranks that wait for this one."""
        try:
            yield
        except RanksDisagreeError:
            raise  # the others have seen the same
        except Exception as error:
            self._say({"error": f"{type(error).__name__}: {error}"})
            raise

    def agree(self, mine: Mapping[str, Any]) -> None:
        """Raise RanksDisagreeError on all ranks where what they say differs, field by field."""
        all_of_them = self.said(mine)
        for field in mine:
            first = all_of_them[0].get(field)
            for rank, words in enumerate(all_of_them):
                if words.get(field) != first:
                    raise RanksDisagreeError(
                        f"ranks 0 and {rank} have different steps: {field} is {first} on rank 0 "
                        f"and {words.get(field)} on rank {rank}. {_REMEDIES.get(field, '')}"
                    )

    def with_plan_of_first(self, solution: Solution) -> Solution:
        """The plan of the first rank, where this one has found another for the same step: with
        measured costs, or when the time limit ends a search, ranks may."""
        plan = None
        if solution.schedule is not None:
            plan = [list(solution.graph.meta.rewrites), solution.schedule.ops_to_json()]
        first = self.said({"plan": plan})[0]["plan"]
        if first in (plan, None):
            return solution
        taken = _with_plan(solution, *first)
        assert taken.simulation is not None
        fits = taken.simulation.peak_bytes <= solution.request.available_bytes
        return taken if fits else solution  # with an error to come: the budgets differ

    def _say(self, words: Mapping[str, Any]) -> list[str]:
        """Returns the key of each rank at this point."""
        n_said = _n_said[self._name]
        _n_said[self._name] += 1
        keys = [self._key(n_said, rank) for rank in range(self._n_ranks)]
        self._store.set(keys[self.rank], json.dumps(words))
        if n_said >= _N_KEPT:
            self._store.delete_key(self._key(n_said - _N_KEPT, self.rank))
        return keys

    def _key(self, n_said: int, rank: int) -> str:
        return f"checkpoint_solver/{self._name}/{n_said}/{rank}"


_REMEDIES = {
    "the batch": "Give all ranks batches of one shape: pad them, or drop the last one.",
    "a plan for it": (
        "Call the model the same number of times on every rank, and change it in the same way."
    ),
    "the plan": (
        "Solve on one rank and give all of them its file (Solution.save), or use fit, which takes "
        "the plan of the first rank everywhere."
    ),
    "the exported plan": (
        "Give to_torch_checkpoint the same plan on all ranks, made for the same budget."
    ),
}


def _with_plan(solution: Solution, rewrites: Sequence[str], ops: Sequence[Any]) -> Solution:
    variants = () if solution.variants is None else solution.variants.planned
    graph = next(
        each for each in (solution.graph, *variants) if list(each.meta.rewrites) == rewrites
    )
    schedule = Schedule(ops_from_json(ops, source="the plan of rank 0"), graph.graph_id)
    simulation = simulate(graph, schedule, places=solution.request.places)
    return dataclasses.replace(
        solution, status="feasible", graph=graph, schedule=schedule, simulation=simulation
    )
