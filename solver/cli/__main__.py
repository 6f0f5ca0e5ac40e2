"""`python -m solver.cli`."""

import sys

from solver.cli.command import main

sys.exit(main())
