"""`python -m checkpoint_solver`: the command `solve`."""

import sys

from checkpoint_solver.cli import process

sys.exit(process())
