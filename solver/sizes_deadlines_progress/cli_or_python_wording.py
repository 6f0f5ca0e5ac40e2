"""Advice in reports and errors, worded as command-line options or as Python arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reader:
    """What the reader of a report types to follow each piece of advice.

    saves: to write the schedule to a file.
    in_16_bits: to plan with mixed precision, as a full instruction.
    longer: to give a search more time, as a full instruction.
    last_bits: to allow rewrites that change the last bits of results.
    measured: to plan with costs and workspace measured on this device.
    host: to let the plan use host memory.
    on_host: to plan with parameters in host memory.
    no_reserve: to leave the whole budget to the step.
    """

    saves: str
    in_16_bits: str
    longer: str
    last_bits: str
    measured: str
    host: str
    on_host: str
    no_reserve: str


OF_THE_COMMAND = Reader(
    saves="-o schedule.json",
    in_16_bits="plan with --autocast bf16",
    longer="extend it with --time-limit",
    last_bits="--rewrites allclose",
    measured="--costs measured",
    host="--host 64GB",
    on_host="--host 64GB --parameters host",
    no_reserve="--reserve 0",
)
IN_PYTHON = Reader(
    saves='solution.save("schedule.json")',
    in_16_bits="call solve under torch.autocast with bfloat16, as training will run",
    longer="extend it with time_limit_s=",
    last_bits='rewrites="allclose"',
    measured='costs="measured"',
    host='solve(..., host_budget="64GB")',
    on_host='solve(..., host_budget="64GB", parameters="host")',
    no_reserve="reserve=0",
)
