"""The command line of `solve`: what may be given, checked before anything is loaded."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from solver.analysis import Size
from solver.emit import SYSTEMS
from solver.methods import METHODS

PICTURES = (".png", ".svg")
PAGES = (".html", ".htm")
DEFAULT_TIME_LIMIT_S = 60.0

_EPILOG = """\
problem:
  model.py[:factory]          a file that defines get_model() and get_batch(), each of which may
                              take batch_size and seq_length, and may define get_inputs(batch)
                              (what the model is called with; the rest is for the loss),
                              get_loss(output, batch) and get_optimizer(model); :factory names
                              another function than get_model
  package.module[:factory]    the same of an installed package
  hf:config.json              a Hugging Face configuration, or the directory that holds it: the
                              model that its architectures name, with random data
  graph.json                  a graph that --graph-out wrote; starts at once

explain:
  solve explain schedule.json graph.json [--op NAME]
                              why an op runs again, where the peak is, what a gigabyte more or
                              less would change

sizes:  16GB = 16*10^9, 15.5GiB = 15.5*2^30, 800MB, 1TB, plain bytes, 60% of the device's memory

exit codes:  0 solved   2 wrong usage   3 infeasible   4 the model cannot be loaded or traced
             5 --verify failed   6 nothing found within the time limit   130 interrupted
"""


class UsageError(ValueError):
    """An invalid command line; the message says what would be valid."""


@dataclass(frozen=True)
class Arguments:
    """The command line. None: not given, so the default of the place that reads it holds.

    budget, reserve: sizes as they were written. time_limit_s: of the search, per method. largest:
    the size to maximise. command: all of it, as a shell takes it. n_ranks: of FSDP2.
    """

    problem: str
    budget: str | None
    methods: tuple[str, ...]
    device: str | None
    costs: str | None
    batch_size: int | None
    seq_length: int | None
    autocast: str | None
    accumulate: bool
    reserve: str | None
    time_limit_s: float
    seed: int
    schedule_out: Path | None
    graph_out: Path | None
    plot: Path | None
    pareto: Path | None
    report: Path | None
    throughput: Path | None
    verify: bool
    emit: str | None
    json: bool
    quiet: bool
    n_ranks: int | None = None
    largest: Size | None = None
    command: str = ""


def parse(argv: Sequence[str]) -> Arguments:
    """Read the command line and check the output paths.

    Raises UsageError. `--help` and `--version` print and raise SystemExit(0), as argparse does.
    """
    given = _parser().parse_args(_sizes_joined(argv))
    outputs = {
        "-o": given.output,
        "--graph-out": given.graph_out,
        "--plot": given.plot,
        "--pareto": given.pareto,
        "--report": given.report,
        "--throughput": given.throughput,
    }
    _check_together(given)
    _check_outputs({option: path for option, path in outputs.items() if path is not None})
    return Arguments(
        problem=given.problem,
        budget=given.budget,
        methods=tuple(METHODS) if given.compare else (given.method or "auto",),
        device=given.device,
        costs=given.costs,
        batch_size=given.batch_size,
        seq_length=given.seq_length,
        autocast=given.autocast,
        accumulate=given.accumulate,
        reserve=given.reserve,
        time_limit_s=given.time_limit,
        seed=given.seed,
        schedule_out=given.output,
        graph_out=given.graph_out,
        plot=given.plot,
        pareto=given.pareto,
        report=given.report,
        throughput=given.throughput,
        verify=given.verify,
        emit=given.emit,
        json=given.json,
        quiet=given.quiet,
        n_ranks=given.fsdp,
        largest=given.largest,
        command=shlex.join(("solve", *argv)),
    )


class Parser(argparse.ArgumentParser):
    """argparse prints usage and exits; here every error is raised, so that one place reports it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the options)")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="solve",
        usage="solve --budget SIZE [options] model.py[:factory] | package.module[:factory] | "
        "hf:config.json | graph.json",
        description="Fit a training step into a number of bytes at the least extra time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("problem", help="model file, package:function, or graph file; see below")
    parser.add_argument("--budget", metavar="SIZE", help="bytes for the whole step")
    _add_search(parser)
    _add_model(parser)
    _add_output(parser)
    parser.add_argument("--version", action="version", version=f"solve {version()}")
    return parser


def help_text() -> str:
    """What `solve --help` prints, at 100 columns at most, without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in _parser().format_help().splitlines())


def _check_together(given: argparse.Namespace) -> None:
    """What options ask of one another. Raises UsageError."""
    if given.budget is None and given.largest is None:
        raise UsageError("the following arguments are required: --budget (solve --help lists all)")
    if given.largest is not None and given.compare:
        raise UsageError("--compare plans one step; --max-batch and --max-seq plan many: leave one")
    if given.fsdp is not None and given.verify:
        raise UsageError(
            "--verify runs the step in one process, --fsdp plans for several: leave one"
        )
    if given.throughput is not None and given.largest is None:
        raise UsageError("--throughput draws what --max-batch or --max-seq finds: give one of them")


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the search")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--method", choices=tuple(METHODS), metavar="NAME", help=", ".join(METHODS))
    which.add_argument("--compare", action="store_true", help="all methods, in one table")
    group.add_argument(
        "--reserve",
        metavar="SIZE",
        help="part of the budget that the step may not use "
        "(default: 750MB on CUDA devices, else 0)",
    )
    group.add_argument(
        "--time-limit",
        type=seconds,
        default=DEFAULT_TIME_LIMIT_S,
        metavar="S",
        help="seconds that each method may search (default: 60), of many plans each a share",
    )
    size = group.add_mutually_exclusive_group()
    for flag, name, what in (
        ("--max-batch", "batch_size", "the largest batch"),
        ("--max-seq", "seq_length", "the longest sequence"),
    ):
        size.add_argument(
            flag,
            dest="largest",
            action="store_const",
            const=name,
            help=f"find {what} whose plan fits the budget (default: all of the named device's "
            f"memory) by calling get_batch({name}=...), from --{name.replace('_', '-')} on",
        )
    group.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="(default: 0)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the step (a graph file has these in it)")
    group.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:1, or a card such as h100 (default: cuda where there is one, else "
        "cpu)",
    )
    group.add_argument(
        "--costs",
        choices=("roofline", "measured"),
        help="times from the device's rates, or measured on this machine (default: measured on a "
        "CUDA device that is here, else roofline)",
    )
    group.add_argument("--batch-size", type=_at_least(1), metavar="N", help="for get_batch")
    group.add_argument("--seq-length", type=_at_least(1), metavar="N", help="for get_batch")
    group.add_argument("--autocast", choices=("bf16", "fp16"), help="run the model under autocast")
    group.add_argument(
        "--accumulate", action="store_true", help="gradients are there before the step starts"
    )
    group.add_argument(
        "--fsdp",
        type=_at_least(2),
        metavar="N",
        help="plan for one of N ranks of FSDP2 (fully_shard on each block, then on the model)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    for flags, what in (
        (("-o", "--output"), "write the schedule (JSON)"),
        (("--graph-out",), "write the traced graph (JSON)"),
        (("--plot",), "draw the memory over the step (.png, .svg)"),
        (("--pareto",), "draw overhead against budget (.png, .svg); takes as long again"),
        (("--throughput",), "draw samples per second against size, for --max-batch (.png, .svg)"),
        (("--report",), "write the report with its pictures as one page (.html)"),
    ):
        group.add_argument(*flags, type=Path, metavar="FILE", help=what)
    group.add_argument(
        "--emit",
        choices=tuple(SYSTEMS),
        metavar="SYSTEM",
        help=f"the nearest setting of another system, judged alike: {', '.join(SYSTEMS)}",
    )
    group.add_argument(
        "--verify", action="store_true", help="run one step with and without the plan, and compare"
    )
    group.add_argument("--json", action="store_true", help="one JSON object instead of the report")
    group.add_argument("--quiet", action="store_true", help="no report and no progress")


def version() -> str:
    """The installed distribution's version, or "0" in a source tree that is not installed."""
    try:
        return metadata.version("checkpoint-solver")
    except metadata.PackageNotFoundError:
        return "0 (not installed)"


def _sizes_joined(argv: Sequence[str]) -> list[str]:
    """`--budget -5GB` as `--budget=-5GB`: argparse takes -5GB for an option, the size parser can
    say what is wrong with it."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] in ("--budget", "--reserve") and re.match(r"-\.?[0-9]", word):
            joined[-1] += "=" + word
        else:
            joined.append(word)
    return joined


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """A positive number; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above zero")
    return value


def _check_outputs(outputs: dict[str, Path]) -> None:
    """Find out now, not after minutes of solving, that a file cannot be written."""
    option_of: dict[Path, str] = {}
    for option, path in outputs.items():
        if option in ("--plot", "--pareto", "--throughput") and path.suffix.lower() not in PICTURES:
            raise UsageError(f"{option} {path}: the name must end in .png or .svg")
        if option == "--report" and path.suffix.lower() not in PAGES:
            raise UsageError(f"{option} {path}: the name must end in .html")
        try:
            _check_place(path, option)
        except OSError as error:
            raise UsageError(f"{option} {path}: cannot be written ({error.strerror})") from error
        other = option_of.setdefault(path.resolve(), option)
        if other != option:
            raise UsageError(f"{other} and {option} name the same file, {path}")


def _check_place(path: Path, option: str) -> None:
    if path.is_dir():
        raise UsageError(f"{option} {path}: that is a directory; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}")
    # Files are written beside their place and renamed, so their directory must take new ones.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
        pass
