"""The closest checkpointing setting of another framework. Imports no torch."""

from solver.module_checkpointing.for_other_frameworks import (
    SYSTEMS,
    Emitted,
    NoLayersError,
    layers,
    nearest,
)

__all__ = ["SYSTEMS", "Emitted", "NoLayersError", "layers", "nearest"]
