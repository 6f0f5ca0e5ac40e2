"""`python -m solver.cli`."""

import sys

from solver.cli import process

sys.exit(process())
