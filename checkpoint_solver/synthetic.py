"""Graphs made from numbers instead of models (from `graphs.synthetic`). Imports no torch."""

from graphs.synthetic import Tape

__all__ = ["Tape"]
