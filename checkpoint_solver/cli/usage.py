"""The error for an invalid command line, the argparse parser that raises it, and its numbers."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn


class UsageError(ValueError):
    """An invalid command line; the message says what would be valid."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError where argparse would print the usage and exit."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, but first name the closest option for one that does not exist, which argparse
        would report only after missing arguments."""
        for word in args or ():
            option = word.partition("=")[0]
            if option.startswith("--") and option not in self._option_string_actions:
                near = difflib.get_close_matches(option, self._option_string_actions, n=1)
                if near:
                    self.error(f"no option {option}; did you mean {near[0]}?")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def seconds(text: str) -> float:
    """Parse a positive number of seconds; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"invalid number of seconds {text!r}: must be above zero")
    return value


def at_least(minimum: int) -> Callable[[str], int]:
    """The function that parses a whole number of at least `minimum`; it raises
    ArgumentTypeError."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"invalid value {text!r}: at least {minimum} expected")
        return int(text)

    return read
