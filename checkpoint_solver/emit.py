"""The closest setting of another training system, of `solver.emit`. Imports no torch."""

from solver.emit import SYSTEMS, Emitted, NoLayersError, layers, nearest

__all__ = ["SYSTEMS", "Emitted", "NoLayersError", "layers", "nearest"]
