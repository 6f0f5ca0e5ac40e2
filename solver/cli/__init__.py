"""The command `solve`."""

from solver.cli.arguments import help_text
from solver.cli.command import main
