"""Plots: memory over the step, overhead against budget, throughput against size, a schedule.

Each function draws into `ax`, or into a new figure that pyplot does not know, and returns the axes.
`save` writes the figure atomically. Imports Matplotlib.
"""

from solver.reporting.plot.of_budgets import pareto
from solver.reporting.plot.of_memory import before_and_after, memory
from solver.reporting.plot.of_schedule import schedule
from solver.reporting.plot.of_sizes import throughput
from solver.reporting.plot.style import NARROW_IN, WIDE_IN, inline_svg, save
