"""A training step as one rank of DeepSpeed's ZeRO runs it. Imports no torch."""

from graphs.zero.rank import TAKES, Zero, ZeroError, with_zero, zero_figures, zero_words
from graphs.zero.sharded import sharded_figures

__all__ = [
    "TAKES",
    "Zero",
    "ZeroError",
    "sharded_figures",
    "with_zero",
    "zero_figures",
    "zero_words",
]
