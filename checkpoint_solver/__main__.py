"""`python -m checkpoint_solver`: the command `solve`."""

import sys

from solver.cli import process

sys.exit(process())
