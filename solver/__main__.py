"""`python -m solver`: the command."""

import sys

from solver.cli import process

sys.exit(process())
