"""Graphs made from numbers, of `graphs.synthetic`. Imports no torch."""

from graphs.synthetic import Tape

__all__ = ["Tape"]
