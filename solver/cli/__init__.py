"""The command `solve`."""

from solver.cli.arguments import help_text, parser
from solver.cli.command import main
