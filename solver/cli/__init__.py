"""The command `solve`. Nothing of it is loaded before it is needed: `--version` answers at once."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from solver.cli.installed import version


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. argv: without the name of the program."""
    if list(sys.argv[1:] if argv is None else argv) == ["--version"]:
        print(f"solve {version()}")
        return 0
    from solver.cli import command

    return command.main(argv)


def parser() -> ArgumentParser:
    """What parses the command line; `shtab solver.cli.parser` writes completion scripts from it."""
    from solver.cli import arguments

    return arguments.parser()


def help_text() -> str:
    """What `solve --help` prints, at 100 columns at most, without trailing blanks."""
    from solver.cli import arguments

    return arguments.help_text()
