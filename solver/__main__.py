"""`python -m solver`: the command."""

import sys

from solver.cli import main

sys.exit(main())
