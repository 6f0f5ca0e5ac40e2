"""The command-line options of `solve`.

`Arguments` is the only table of them: argparse, `--help` and the docs page are made from it.
"""

from __future__ import annotations

# ruff: noqa: RUF009  (each option is a dataclass field whose default is made by a function)
import argparse
import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint_solver.cli import version
from checkpoint_solver.cli.usage import Parser, at_least, seconds
from graphs.hardware import DISKS
from graphs.host_state import WHERE
from graphs.rewrites import WORDS
from solver.methods import METHODS
from solver.module_checkpointing.for_other_frameworks import SYSTEMS
from solver.plan_analysis import Size
from solver.schedule import BUDGETS_OF

_EPILOG = """\
problem:
  model.py[:factory]          a file that defines get_model() and get_batch(), each of which may
                              accept batch_size and seq_length; optionally get_inputs(batch) (the
                              part of the batch that the model is called with), get_loss(output,
                              batch), get_optimizer(model) and parallelize(model, mesh) (for
                              --tensor); :factory names another function than get_model
  package.module[:factory]    the same, from an installed package
  hf:config.json              a Hugging Face configuration or its directory: the model class named
                              in "architectures", with a random batch
  graph.json                  a graph written by --graph-out; planned without loading torch

explain:
  solve explain schedule.json graph.json [--op NAME]
                              why an op is recomputed, what is live at the peak, and what a larger
                              or smaller budget would change

sizes:  16GB = 16*10^9, 15.5GiB = 15.5*2^30, 800MB, 1TB, a number of bytes, 60% of device memory

exit codes:  0 solved   2 invalid usage   3 infeasible   4 model cannot be loaded or traced
             5 --verify failed   6 nothing found within the time limit   130 interrupted
"""


def _number_of_stages(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    try:
        return at_least(2)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {AUTO}") from error


AUTO = "auto"
SEARCH, STEP, OUTPUT = "search", "training step (recorded in a graph file)", "output"


def _option(flags: str, help: str, group: str = "", default: Any = None, **settings: Any) -> Any:
    """One option as a field. group: its heading in `--help`. settings: for add_argument."""
    settings |= {"flags": flags.split(", "), "help": help, "group": group}
    return field(default=default, metadata=settings)


def _flag(flags: str, help: str, group: str, **settings: Any) -> Any:
    return _option(flags, help, group, default=False, action="store_true", **settings)


def _file(flags: str, help: str) -> Any:
    return _option(flags, help, OUTPUT, type=Path, metavar="FILE")


def _number(flags: str, help: str, group: str, *, least: int, default: int | None = None) -> Any:
    return _option(flags, help, group, default, type=at_least(least), metavar="N")


def _largest(flag: str, what: str, size: Size) -> Any:
    text = (
        f"find the {what} whose plan fits the budget (default: all memory of the named device), "
        f"calling get_batch({size}=...) with sizes from --{size.replace('_', '-')} on"
    )
    return _flag(flag, text, SEARCH, exclusive="size")


@dataclass(frozen=True)
class Arguments:
    """The command line. None: not given. command: all of it as text, quoted for a shell."""

    problem: str = field(default="", metadata={"help": "what to plan; see below"})
    budget: str | None = _option("--budget", "memory for the whole training step", metavar="SIZE")
    method: str | None = _option(
        "--method",
        ", ".join(METHODS),
        SEARCH,
        choices=tuple(METHODS),
        metavar="NAME",
        exclusive="methods",
    )
    compare: bool = _flag(
        "--compare", "run all methods and compare them in a table", SEARCH, exclusive="methods"
    )
    reserve: str | None = _option(
        "--reserve",
        "part of the budget that the step may not use (default: 750MB on CUDA, else 0)",
        SEARCH,
        metavar="SIZE",
    )
    budget_of: str = _option(
        "--budget-of",
        "what the budget limits: allocated (default), the bytes of live tensors, or reserved, what "
        "PyTorch's allocator reserves for them on the card (simulated)",
        SEARCH,
        default="allocated",
        choices=BUDGETS_OF,
        metavar="WHAT",
    )
    host: str | None = _option(
        "--host",
        "host memory that the plan may copy to, besides recomputing (default: none)",
        SEARCH,
        metavar="SIZE",
    )
    host_link: str | None = _option(
        "--host-link",
        "rate of copies to the host and back, such as 50GB/s (default: the device's)",
        SEARCH,
        metavar="RATE[,RATE]",
    )
    disk: str | None = _option(
        "--disk",
        "disk that the plan may copy to by way of --host, and a directory on it, such as "
        "500GB:/scratch (default: none)",
        SEARCH,
        metavar="SIZE:PATH",
    )
    disk_rate: str | None = _option(
        "--disk-rate",
        f"bytes per second that the disk writes and reads, such as 5GB/s,6GB/s; its kind, for "
        f"published rates: {', '.join(DISKS)}; or measured (the default with --costs measured)",
        SEARCH,
        metavar="RATE[,RATE]",
    )
    optimizer_state: str = _option(
        "--optimizer-state",
        "where the optimizer's state is kept between its steps: device, host (memory of --host), "
        "or auto (default), whichever gives the faster plan",
        SEARCH,
        default="auto",
        choices=WHERE,
        metavar="WHERE",
    )
    parameters: str = _option(
        "--parameters",
        "where parameters are kept while no operator reads them: device (default), host (all that "
        "can be), or auto, whichever gives the faster plan; on the host only with the optimizer's "
        "state",
        SEARCH,
        default="device",
        choices=WHERE,
        metavar="WHERE",
    )
    time_limit: float = _option(
        "--time-limit",
        "seconds that each method may search for a plan (default: 60); the searches for the curve "
        "of --pareto share them",
        SEARCH,
        default=60.0,
        type=seconds,
        metavar="S",
    )
    max_batch: bool = _largest("--max-batch", "largest batch", "batch_size")
    max_seq: bool = _largest("--max-seq", "longest sequence", "seq_length")
    seed: int = _number("--seed", "random seed (default: 0)", SEARCH, least=0, default=0)
    device: str | None = _option(
        "--device",
        "cpu, cuda, cuda:1, or a card such as h100 (default: cuda if available, else cpu)",
        STEP,
        metavar="NAME",
    )
    costs: str | None = _option(
        "--costs",
        "op times from the rates of the device, or measured on this machine (default: measured on "
        "a local CUDA device, else roofline)",
        STEP,
        choices=("roofline", "measured"),
    )
    batch_size: int | None = _number(
        "--batch-size",
        "batch_size to call get_batch and the model factory with, where they accept it",
        STEP,
        least=1,
    )
    seq_length: int | None = _number(
        "--seq-length",
        "seq_length to call get_batch and the model factory with, where they accept it",
        STEP,
        least=1,
    )
    autocast: str | None = _option(
        "--autocast", "run the model under torch.autocast", STEP, choices=("bf16", "fp16")
    )
    accumulate: bool = _flag("--accumulate", "gradients already exist when the step starts", STEP)
    fsdp: int | None = _number(
        "--fsdp",
        "plan for one of N ranks of FSDP2 (fully_shard on each block, then on the model)",
        STEP,
        least=2,
    )
    fsdp_precision: str | None = _option(
        "--fsdp-precision",
        "the dtype that FSDP2 computes in, then after a comma the dtype that it reduces gradients "
        "in, such as bfloat16,float32 (default: those of the parameters)",
        STEP,
        metavar="DTYPE",
    )
    fsdp_reshard: str | None = _option(
        "--fsdp-reshard",
        "whether FSDP2's groups free their whole parameters after the forward pass: yes, no, or "
        "auto, whichever is faster (default: yes; no with --pipeline)",
        STEP,
        choices=("yes", "no", AUTO),
    )
    fsdp_replicas: int = _number(
        "--fsdp-replicas",
        "hybrid sharding: N replicas of the --fsdp ranks that share each parameter (default: 1)",
        STEP,
        least=1,
        default=1,
    )
    fsdp_link: str | None = _option(
        "--fsdp-link",
        "the link between FSDP2's ranks, such as nvlink4 or ib-ndr (default: the named card's; on "
        "the CPU communication takes no time)",
        STEP,
        metavar="NAME",
    )
    zero: int | None = _option(
        "--zero",
        "stage of DeepSpeed's ZeRO: plan for one of --ranks, including the memory that the engine "
        "holds (in stage 3: may hold)",
        STEP,
        type=int,
        choices=(1, 2, 3),
    )
    ranks: int | None = _number("--ranks", "data-parallel ranks of --zero", STEP, least=2)
    ds_config: Path | None = _option(
        "--ds-config",
        "DeepSpeed's config for --zero (JSON; default: DeepSpeed's defaults)",
        STEP,
        type=Path,
        metavar="FILE",
    )
    tensor: int | None = _number(
        "--tensor",
        "plan for one of N ranks of tensor parallelism: parallelize(model, mesh) of the model file "
        "distributes the model",
        STEP,
        least=2,
    )
    pipeline: int | str | None = _option(
        "--pipeline",
        "divide the layers of a torch.nn.Sequential into N pipeline stages so that the slowest "
        "stage is as fast as possible; the budget is per rank, the batch a micro-batch. auto: as "
        "few stages as fit",
        STEP,
        type=_number_of_stages,
        metavar="N",
    )
    microbatches: int | None = _number(
        "--microbatches", "micro-batches per step of the pipeline", STEP, least=1
    )
    schedule: str = _option(
        "--schedule",
        "pipeline schedule: 1f1b (default) or gpipe",
        STEP,
        default="1f1b",
        choices=("1f1b", "gpipe"),
    )
    stage: int | None = _number(
        "--stage", "pipeline stage to report, counted from 0 (default: the slowest)", STEP, least=0
    )
    passes: int = _number(
        "--passes",
        "plan for N forward passes, each on a batch like this one, before one backward pass "
        "(default: 1)",
        STEP,
        least=1,
        default=1,
    )
    rewrites: str = _option(
        "--rewrites",
        "how the plan may rewrite the step: bitwise (default; results stay bitwise identical), "
        "allclose (last bits may change), lossless (also stores masks as bits), bf16, fp8, int8 "
        "(also round what is saved for backward) or none",
        STEP,
        default="bitwise",
        choices=WORDS,
    )
    output: Path | None = _file(
        "-o, --output",
        "write the schedule (JSON); with --pipeline one file per stage: -o plan.json writes "
        "plan.stage0.json, plan.stage1.json, ...",
    )
    graph_out: Path | None = _file("--graph-out", "write the traced graph (JSON)")
    plot: Path | None = _file("--plot", "plot memory over the step (.png, .svg)")
    pareto: Path | None = _file(
        "--pareto", "plot overhead against budget (.png, .svg); 20 plans share another --time-limit"
    )
    throughput: Path | None = _file(
        "--throughput", "plot throughput against size, with --max-batch or --max-seq (.png, .svg)"
    )
    snapshot: Path | None = _file(
        "--snapshot",
        "write the predicted allocations of the plan for pytorch.org/memory_viz (.pickle)",
    )
    report: Path | None = _file("--report", "write the report and its plots as one page (.html)")
    emit: str | None = _option(
        "--emit",
        f"also find the closest setting of another system: {', '.join(SYSTEMS)}",
        OUTPUT,
        choices=tuple(SYSTEMS),
        metavar="SYSTEM",
    )
    verify: bool = _flag(
        "--verify", "run one step with and without the plan and compare them", OUTPUT
    )
    json: bool = _flag("--json", "print one JSON object instead of the report", OUTPUT)
    quiet: bool = _flag("--quiet", "print no report and no progress", OUTPUT)
    command: str = ""

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods to run; with a host, those that can use it."""
        if not self.compare:
            return (self.method or "auto",)
        return tuple(
            name
            for name, method in METHODS.items()
            if (method.needs_places if self.host is None else method.takes_places)
            == (self.host is not None)
        )

    @property
    def largest(self) -> Size | None:
        """The size to maximize."""
        return "batch_size" if self.max_batch else "seq_length" if self.max_seq else None

    def given_flags(self, *names: str) -> str:
        """Which of the named options differ from their default: "--fsdp, --tensor"; "": none."""
        options = [entry for entry in dataclasses.fields(self) if entry.name in names]
        return ", ".join(
            entry.metadata["flags"][-1]
            for entry in options
            if getattr(self, entry.name) != entry.default
        )


def parser() -> argparse.ArgumentParser:
    """Make the parser from the fields of `Arguments`."""
    command = Parser(
        prog="solve",
        usage="solve --budget SIZE [options] model.py[:factory] | package.module[:factory] | "
        "hf:config.json | graph.json",
        description="Fit a training step into a memory budget at the least extra time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _complete_files(command.add_argument("problem", help="what to plan; see below"))
    groups: dict[str, Any] = {"": command}
    for option in dataclasses.fields(Arguments):
        settings = dict(option.metadata)
        if "flags" not in settings:
            continue
        flags, group, exclusive = (settings.pop(k, None) for k in ("flags", "group", "exclusive"))
        if group not in groups:
            groups[group] = command.add_argument_group(group)
        if exclusive and exclusive not in groups:
            groups[exclusive] = groups[group].add_mutually_exclusive_group()
        target = groups[exclusive or group]
        action = target.add_argument(*flags, default=option.default, **settings)
        if settings.get("type") is Path:
            _complete_files(action)
    command.add_argument("--version", action="version", version=f"solve {version()}")
    return command


def _complete_files(action: argparse.Action) -> None:
    """Let the shell complete file names for this argument, if shtab is what reads the parser."""
    if "shtab" in sys.modules:
        action.complete = sys.modules["shtab"].FILE  # type: ignore[attr-defined]


def help_text() -> str:
    """The text of `solve --help`, without trailing blanks."""
    return "\n".join(line.rstrip() for line in parser().format_help().splitlines())
