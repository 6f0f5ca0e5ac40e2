"""Parse the command line and check it: sizes, options that exclude each other, files to write."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from checkpoint_solver.cli.arguments import AUTO, Arguments, flag_of, parser
from checkpoint_solver.cli.usage import UsageError
from solver.methods import METHODS
from solver.sizes_deadlines_progress import (
    BudgetError,
    UnknownCapacityError,
    parse_rate,
    parse_size,
    reject_share,
)
from solver.solving import given_rates


def parse(argv: Sequence[str]) -> Arguments:
    """Read and check the command line.

    Raises UsageError. `--help` and `--version` print and raise SystemExit(0), as argparse does.
    """
    # argparse takes the -5GB of `--budget -5GB` for an option. Joined as --budget=-5GB it reaches
    # the size parser, which has a better error message.
    words: list[str] = []
    for word in argv:
        if words and words[-1] in ("--budget", "--reserve") and re.match(r"-\.?[0-9]", word):
            words[-1] += "=" + word
        else:
            words.append(word)
    if "--explain" in argv:
        raise UsageError("no option --explain; write solve explain schedule.json graph.json")
    given = vars(parser().parse_args(words))
    arguments = Arguments(**given, command=shlex.join(("solve", *argv)))
    largest = arguments.largest is not None
    if arguments.budget is None and not largest:
        raise UsageError("the following arguments are required: --budget (see solve --help)")
    if largest:
        _exclude(arguments, "compare", "--max-batch or --max-seq")
    if arguments.fsdp is not None and arguments.host is not None:
        raise UsageError(
            "--host: FSDP2 runs exported plans, and an exported plan cannot copy during the "
            "computation; leave out --host or --fsdp"
        )
    if arguments.verify and (excluded := arguments.given_flags("fsdp", "tensor", "zero")):
        raise UsageError(
            f"--verify runs the step in one process and cannot be combined with {excluded}"
        )
    if arguments.emit is not None and arguments.tensor is not None:
        raise UsageError(
            "--emit finds settings for whole models only; leave out --tensor or --emit"
        )
    fsdp_options = arguments.given_flags(
        "fsdp_precision", "fsdp_reshard", "fsdp_replicas", "fsdp_link"
    )
    if fsdp_options and arguments.fsdp is None:
        raise UsageError(f"{fsdp_options}: only for FSDP2; give the number of ranks, --fsdp 8")
    _check_zero(arguments)
    _check_pipeline(arguments)
    if arguments.passes > 1:
        _exclude(arguments, "verify fsdp host disk budget_of emit", "--passes")
    _check_sizes(arguments)
    _check_copying(arguments)
    if arguments.disk is not None and ":" not in arguments.disk:
        raise UsageError(
            f"--disk {arguments.disk}: name a directory on the disk: "
            f"--disk {arguments.disk}:/scratch"
        )
    if arguments.host is not None and arguments.emit is not None:
        raise UsageError(
            "--emit: other systems have no setting for copies to the host; leave out --host"
        )
    if arguments.pareto and arguments.budget_of == "reserved":
        raise UsageError("--pareto sweeps budgets of allocated memory; leave out --budget-of")
    if arguments.throughput is not None and not largest:
        raise UsageError("--throughput requires --max-batch or --max-seq")
    _check_outputs(arguments)
    return arguments


def _check_pipeline(arguments: Arguments) -> None:
    """Raise UsageError for incomplete pipeline options, and for options that exclude a pipeline."""
    n_stages, stage = arguments.pipeline, arguments.stage
    if n_stages is None:
        if given := arguments.given_flags("microbatches", "schedule", "stage"):
            raise UsageError(
                f"{given}: only for a pipeline; give its number of stages, --pipeline 4"
            )
        return
    if arguments.microbatches is None:
        raise UsageError(
            f"--pipeline {n_stages}: give the number of micro-batches of a step, --microbatches 8"
        )
    if arguments.fsdp_reshard == "yes":
        raise UsageError(
            "--fsdp-reshard yes: a stage of a pipeline keeps whole parameters; give no or auto"
        )
    if stage is not None and n_stages == AUTO:
        raise UsageError(
            f"--stage {stage} needs a fixed number of stages, not --pipeline auto; give "
            "--pipeline 4"
        )
    if stage is not None and isinstance(n_stages, int) and stage >= n_stages:
        raise UsageError(
            f"--stage {stage} does not exist: the {n_stages} stages are numbered 0 to "
            f"{n_stages - 1}"
        )
    excluded = "compare verify fsdp_precision accumulate host disk budget_of pareto emit passes"
    excluded += "" if stage is None else " max_batch max_seq"
    _exclude(arguments, excluded, "--pipeline" if stage is None else "--pipeline with --stage")


def _check_zero(arguments: Arguments) -> None:
    """Raise UsageError for incomplete options of ZeRO, and for options that exclude it."""
    if arguments.zero is None:
        if given := arguments.given_flags("ranks", "ds_config"):
            raise UsageError(f"{given}: only for DeepSpeed's ZeRO; give its stage, --zero 2")
        return
    if arguments.ranks is None:
        raise UsageError(f"--zero {arguments.zero}: give the number of ranks, --ranks 8")
    _exclude(arguments, "fsdp tensor pipeline passes accumulate emit", "--zero")


def _exclude(arguments: Arguments, names: str, what: str) -> None:
    """Raise UsageError if any of these options, separated by blanks, is given besides `what`."""
    if given := arguments.given_flags(*names.split()):
        raise UsageError(f"{given} cannot be combined with {what}")


def _check_sizes(arguments: Arguments) -> None:
    """Raise UsageError for an invalid size or rate, before PyTorch is loaded.

    A share of the device's memory is resolved later, when PyTorch knows the device.
    """
    disk_size = None if arguments.disk is None else arguments.disk.partition(":")[0]
    device_sizes = ((arguments.budget, "budget", 1), (arguments.reserve, "reserve", 0))
    other_sizes = ((arguments.host, "host budget"), (disk_size, "disk budget"))
    try:
        for size, what, least_bytes in device_sizes:
            if size is not None:
                with contextlib.suppress(UnknownCapacityError):  # PyTorch is not loaded yet
                    parse_size(size, what=what, least_bytes=least_bytes)
        for size, what in other_sizes:
            if size is not None:
                reject_share(size, what=what)
                parse_size(size, what=what)
        for each in () if arguments.host_link is None else arguments.host_link.split(","):
            parse_rate(each, what="host link")
        if arguments.disk_rate is not None:
            given_rates(arguments.disk_rate)
    except BudgetError as error:
        raise UsageError(str(error)) from error


def _check_copying(arguments: Arguments) -> None:
    """Raise UsageError for --host with a method or option that cannot use it, and for a method or
    option that needs --host without it."""
    if arguments.optimizer_state == "host" and arguments.host is None:
        raise UsageError("--optimizer-state host: give the memory for it, --host 64GB")
    if arguments.parameters != "device" and arguments.host is None:
        raise UsageError(
            f"--parameters {arguments.parameters}: give the memory for them, --host 64GB"
        )
    if arguments.parameters != "device" and arguments.optimizer_state == "device":
        raise UsageError(
            f"--parameters {arguments.parameters}: parameters leave the device with the "
            "optimizer's state; leave out --optimizer-state device"
        )
    if arguments.compare:
        return
    method = METHODS[arguments.method or "auto"]
    if arguments.host is not None and not method.takes_places:
        copying = ", ".join(name for name, each in METHODS.items() if each.takes_places)
        raise UsageError(
            f"--host: method {arguments.method} copies nothing to the host; leave out --method, or "
            f"name one of {copying}"
        )
    if arguments.host is None and method.needs_places:
        raise UsageError(
            f"--method {arguments.method} is for host memory and disks beside the device; give "
            "--host 64GB, and --disk 500GB:/scratch --disk-rate 5GB/s,6GB/s for a disk behind it"
        )


def _check_outputs(arguments: Arguments) -> None:
    """Raise UsageError for output files that cannot be written, before minutes of solving."""
    option_of: dict[Path, str] = {}
    for entry in dataclasses.fields(arguments):
        path = getattr(arguments, entry.name)
        if not isinstance(path, Path) or entry.metadata["group"] != "output":
            continue
        option = entry.metadata["short"] or flag_of(entry.name)
        suffixes = entry.metadata.get("suffixes")
        if suffixes and path.suffix.lower() not in suffixes:
            raise UsageError(f"{option} {path}: the name must end in {' or '.join(suffixes)}")
        try:
            if path.is_dir():
                raise UsageError(f"{option} {path}: is a directory; name a file in it")
            if not path.parent.is_dir():
                raise UsageError(f"{option} {path}: no such directory: {path.parent}")
            # Files are written under a temporary name in their directory and then renamed, so the
            # directory must be writable.
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
                pass
        except OSError as error:
            raise UsageError(f"{option} {path}: cannot be written ({error.strerror})") from error
        first_option = option_of.setdefault(path.resolve(), option)
        if first_option != option:
            raise UsageError(f"{first_option} and {option} name the same file, {path}")
