"""Plots that draw into Matplotlib axes (from `solver.reporting.plot`)."""

from solver.reporting.plot import before_and_after, memory, pareto, save, schedule, throughput

__all__ = ["before_and_after", "memory", "pareto", "save", "schedule", "throughput"]
