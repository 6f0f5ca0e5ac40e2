"""The command-line options of `solve`.

`Arguments` is the only table of them: argparse, `--help` and the docs page are made from it.
"""

from __future__ import annotations

# ruff: noqa: RUF009  (each option is a dataclass field whose default is made by a function)
import argparse
import dataclasses
import sys
from dataclasses import dataclass, field
from functools import partial
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


def _option(help: str, *, default: Any = None, short: str = "", **settings: Any) -> Any:
    """One option as a field, whose name is that of the option.

    short: its one-letter form.
    settings: `group` (its heading in `--help`), `exclusive` (the options that exclude each other
        share this name), `suffixes` (those that the file's name may have); the others are for
        add_argument.
    """
    return field(default=default, metadata={"help": help, "short": short, **settings})


_search = partial(_option, group="search")
STEP = "training step (recorded in a graph file)"
_step = partial(_option, group=STEP)
_output = partial(_option, group="output")
_file = partial(_output, type=Path, metavar="FILE")
_PLOTS = (".png", ".svg")
_FLAG: dict[str, Any] = {"action": "store_true", "default": False}


def _number(*, least: int) -> dict[str, Any]:
    return {"type": at_least(least), "metavar": "N"}


def _largest(what: str, size: Size) -> Any:
    text = (
        f"find the {what} whose plan fits the budget (default: all memory of the named device), "
        f"calling get_batch({size}=...) with sizes from --{size.replace('_', '-')} on"
    )
    return _search(text, exclusive="size", **_FLAG)


def flag_of(name: str) -> str:
    """The option of a field of `Arguments`: "--budget-of"."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Arguments:
    """The command line. None: not given. command: all of it as text, quoted for a shell."""

    problem: str = ""
    budget: str | None = _option("memory for the whole training step", metavar="SIZE")
    method: str | None = _search(
        ", ".join(METHODS), choices=tuple(METHODS), metavar="NAME", exclusive="methods"
    )
    compare: bool = _search(
        "run all methods and compare them in a table", **_FLAG, exclusive="methods"
    )
    reserve: str | None = _search(
        "part of the budget that the step may not use (default: 750MB on CUDA, else 0)",
        metavar="SIZE",
    )
    budget_of: str = _search(
        "what the budget limits: allocated (default), the bytes of live tensors, or reserved, what "
        "PyTorch's allocator reserves for them on the card (simulated)",
        default="allocated",
        choices=BUDGETS_OF,
        metavar="WHAT",
    )
    host: str | None = _search(
        "host memory that the plan may copy to, besides recomputing (default: none)", metavar="SIZE"
    )
    host_link: str | None = _search(
        "rate of copies to the host and back, such as 50GB/s (default: the device's)",
        metavar="RATE[,RATE]",
    )
    disk: str | None = _search(
        "disk that the plan may copy to by way of --host, and a directory on it, such as "
        "500GB:/scratch (default: none)",
        metavar="SIZE:PATH",
    )
    disk_rate: str | None = _search(
        f"bytes per second that the disk writes and reads, such as 5GB/s,6GB/s; its kind, for "
        f"published rates: {', '.join(DISKS)}; or measured (the default with --costs measured)",
        metavar="RATE[,RATE]",
    )
    optimizer_state: str = _search(
        "where the optimizer's state is kept between its steps: device, host (memory of --host), "
        "or auto (default), whichever gives the faster plan",
        default="auto",
        choices=WHERE,
        metavar="WHERE",
    )
    parameters: str = _search(
        "where parameters are kept while no operator reads them: device (default), host (all that "
        "can be), or auto, whichever gives the faster plan; on the host only with the optimizer's "
        "state",
        default="device",
        choices=WHERE,
        metavar="WHERE",
    )
    time_limit: float = _search(
        "seconds that each method may search for a plan (default: 60); the searches for the curve "
        "of --pareto share them",
        default=60.0,
        type=seconds,
        metavar="S",
    )
    max_batch: bool = _largest("largest batch", "batch_size")
    max_seq: bool = _largest("longest sequence", "seq_length")
    seed: int = _search("random seed (default: 0)", default=0, **_number(least=0))
    device: str | None = _step(
        "cpu, cuda, cuda:1, or a card such as h100 (default: cuda if available, else cpu)",
        metavar="NAME",
    )
    costs: str | None = _step(
        "op times from the rates of the device, or measured on this machine (default: measured on "
        "a local CUDA device, else roofline)",
        choices=("roofline", "measured"),
    )
    batch_size: int | None = _step(
        "batch_size to call get_batch and the model factory with, where they accept it",
        **_number(least=1),
    )
    seq_length: int | None = _step(
        "seq_length to call get_batch and the model factory with, where they accept it",
        **_number(least=1),
    )
    autocast: str | None = _step("run the model under torch.autocast", choices=("bf16", "fp16"))
    accumulate: bool = _step("gradients already exist when the step starts", **_FLAG)
    fsdp: int | None = _step(
        "plan for one of N ranks of FSDP2 (fully_shard on each block, then on the model)",
        **_number(least=2),
    )
    fsdp_precision: str | None = _step(
        "the dtype that FSDP2 computes in, then after a comma the dtype that it reduces gradients "
        "in, such as bfloat16,float32 (default: those of the parameters)",
        metavar="DTYPE",
    )
    fsdp_reshard: str | None = _step(
        "whether FSDP2's groups free their whole parameters after the forward pass: yes, no, or "
        "auto, whichever is faster (default: yes; no with --pipeline)",
        choices=("yes", "no", AUTO),
    )
    fsdp_replicas: int = _step(
        "hybrid sharding: N replicas of the --fsdp ranks that share each parameter (default: 1)",
        default=1,
        **_number(least=1),
    )
    fsdp_link: str | None = _step(
        "the link between FSDP2's ranks, such as nvlink4 or ib-ndr (default: the named card's; on "
        "the CPU communication takes no time)",
        metavar="NAME",
    )
    zero: int | None = _step(
        "stage of DeepSpeed's ZeRO: plan for one of --ranks, including the memory that the engine "
        "holds (in stage 3: may hold)",
        type=int,
        choices=(1, 2, 3),
    )
    ranks: int | None = _step("data-parallel ranks of --zero", **_number(least=2))
    ds_config: Path | None = _step(
        "DeepSpeed's config for --zero (JSON; default: DeepSpeed's defaults)",
        type=Path,
        metavar="FILE",
    )
    tensor: int | None = _step(
        "plan for one of N ranks of tensor parallelism: parallelize(model, mesh) of the model file "
        "distributes the model",
        **_number(least=2),
    )
    pipeline: int | str | None = _step(
        "divide the layers of a torch.nn.Sequential into N pipeline stages so that the slowest "
        "stage is as fast as possible; the budget is per rank, the batch a micro-batch. auto: as "
        "few stages as fit",
        type=_number_of_stages,
        metavar="N",
    )
    microbatches: int | None = _step("micro-batches per step of the pipeline", **_number(least=1))
    schedule: str = _step(
        "pipeline schedule: 1f1b (default) or gpipe", default="1f1b", choices=("1f1b", "gpipe")
    )
    stage: int | None = _step(
        "pipeline stage to report, counted from 0 (default: the slowest)", **_number(least=0)
    )
    passes: int = _step(
        "plan for N forward passes, each on a batch like this one, before one backward pass "
        "(default: 1)",
        default=1,
        **_number(least=1),
    )
    rewrites: str = _step(
        "how the plan may rewrite the step: bitwise (default; results stay bitwise identical), "
        "allclose (last bits may change), lossless (also stores masks as bits), bf16, fp8, int8 "
        "(also round what is saved for backward) or none",
        default="bitwise",
        choices=WORDS,
    )
    output: Path | None = _file(
        "write the schedule (JSON); with --pipeline one file per stage: -o plan.json writes "
        "plan.stage0.json, plan.stage1.json, ...",
        short="-o",
    )
    graph_out: Path | None = _file("write the traced graph (JSON)")
    plot: Path | None = _file("plot memory over the step (.png, .svg)", suffixes=_PLOTS)
    pareto: Path | None = _file(
        "plot overhead against budget (.png, .svg); 20 plans share another --time-limit",
        suffixes=_PLOTS,
    )
    throughput: Path | None = _file(
        "plot throughput against size, with --max-batch or --max-seq (.png, .svg)",
        suffixes=_PLOTS,
    )
    snapshot: Path | None = _file(
        "write the predicted allocations of the plan for pytorch.org/memory_viz (.pickle)"
    )
    report: Path | None = _file(
        "write the report and its plots as one page (.html)", suffixes=(".html", ".htm")
    )
    emit: str | None = _output(
        f"also find the closest setting of another system: {', '.join(SYSTEMS)}",
        choices=tuple(SYSTEMS),
        metavar="SYSTEM",
    )
    verify: bool = _output("run one step with and without the plan and compare them", **_FLAG)
    json: bool = _output("print one JSON object instead of the report", **_FLAG)
    quiet: bool = _output("print no report and no progress", **_FLAG)
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
        return ", ".join(
            flag_of(entry.name)
            for entry in dataclasses.fields(self)
            if entry.name in names and getattr(self, entry.name) != entry.default
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
        if "short" not in (settings := dict(option.metadata)):  # no option: `problem`, `command`
            continue
        own = ("short", "group", "exclusive", "suffixes")
        short, group, exclusive, _ = (settings.pop(key, "") for key in own)
        if group not in groups:
            groups[group] = command.add_argument_group(group)
        if exclusive and exclusive not in groups:
            groups[exclusive] = groups[group].add_mutually_exclusive_group()
        flags = [short, flag_of(option.name)] if short else [flag_of(option.name)]
        action = groups[exclusive or group].add_argument(*flags, default=option.default, **settings)
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
