"""Modules that have moved: importing an old path fails with the new one in the message."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

MOVED_TO = {
    "checkpoint_solver.cli": "solver.cli solver.usage",
    "graphs.graph": "graphs.eager eager_memory meta parts",
    "graphs.hardware": "links",
    "graphs.host_state": "parameter_loads",
    "graphs.trace": ("captured_graph fake_mesh layers mixed_precision step_variants traced_device"),
    "graphs.model_calls": "graphs.calls nested call strides",
    "graphs.capture": (
        "shell extract own_checkpoints eager_kernels eager_rnn autocast_casts fake_kernels "
        "known_values library_branches side_effects generators held_tensors overlaps one_dtype "
        "capturing_hooks"
    ),
    "graphs.costs": "operators workspace cost_cache default_costs memory_events seeds",
    "graphs.fsdp": "sharding sharded fsdp_groups module_blocks",
    "graphs.synthetic": "tape",
    "graphs.training_step": "step optimizer outside loss_only",
    "scheduler_runtime.compiler": (
        "graphs.fused_costs graphs.joined budgeted compile_loop rehearsal backends partitioner "
        "split"
    ),
    "graphs.moved_imports": "moved",
    "scheduler_runtime": "apply fit measure verify",
    "scheduler_runtime.export": "export_copies exportable selective_calls",
    "scheduler_runtime.host_memory": "host_state host_parameters on_host",
    "scheduler_runtime.verifying": (
        "errors rounding_errors solver.scheduler_runtime_bridge solver.runtime_calls "
        "solver.runtime_hooks solver.submodules solver.verification"
    ),
    "scheduler_runtime.by_submodule": "coarse observe eager_step submodule_solution",
    "scheduler_runtime.execute": (
        "program piece function random_state checkpointed segmented cuda_graph"
    ),
    "scheduler_runtime.integrations.hugging_face": "hugging_face",
    "scheduler_runtime.integrations.lightning": "lightning",
    "scheduler_runtime.planned": "compiled plan stand_in settings mismatch replan",
    "scheduler_runtime.surroundings": "foreign_checkpoints data_parallel free_memory",
    "solver": "solve report show simulate",
    "solver.plan_analysis": "solver.analysis pareto largest explain advice block_table",
    "solver.bound": "step highs cut bounds",
    "solver.chain": "blocks dp revolve block_chain playback",
    "solver.sizes_deadlines_progress": "solver.common budget clock figures",
    "solver.device_and_costs": "solver.device solver.target_device target trace_target",
    "solver.methods": "proposal fastest every_block sqrt chain_methods ilp stages evict least",
    "solver.methods.auto": "auto search replay anchor refine recombine improve",
    "solver.module_checkpointing.for_other_frameworks": (
        "solver.framework_settings solver.emit settings layers"
    ),
    "solver.module_checkpointing": "regions region_replay segments stretches by_module eager",
    "solver.python_api": "solver.reporting.python_api",
    "solver.reporting": "wording table page",
    "solver.reporting.plot": "plot",
    "solver.schedule": "rematerialise breakdown occupancy solution",
}
"""By new place, the old modules; those without a dot were in the same top-level package."""

_NEW_PLACE = {
    old if "." in old else f"{new.partition('.')[0]}.{old}": new
    for new, names in MOVED_TO.items()
    for old in names.split()
}


class MovedFinder(MetaPathFinder):
    """Comes first, so that an older installation does not answer for a module that has moved."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raise ModuleNotFoundError for a module that has moved."""
        if name in _NEW_PLACE:
            raise ModuleNotFoundError(f"{name} has moved to {_NEW_PLACE[name]}", name=name)


def announce_moves() -> None:
    """Install the finder, once."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())
