"""The closest setting of another framework (`solver.framework_settings`). Imports no torch."""

from solver.framework_settings import SYSTEMS, Emitted, NoLayersError, layers, nearest

__all__ = ["SYSTEMS", "Emitted", "NoLayersError", "layers", "nearest"]
