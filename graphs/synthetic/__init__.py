"""Graphs made from numbers, for tests and benchmarks. Imports no torch."""

from graphs.synthetic.tape import Tape
