"""The default method: cuts, eviction and recombination, with a proven bound."""

from solver.methods.auto.stages import auto
