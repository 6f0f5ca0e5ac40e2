"""Who reads a report: what it advises is said in the words that its reader types."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reader:
    """saves: writes the schedule. in_16_bits: plans with mixed precision, as a request. longer: how
    to give a search more time. last_bits: lets rewrites change last bits. measured: plans with the
    workspace that operators take on this device. on_host: plans with parameters in host memory.
    no_reserve: leaves the whole budget to the step.
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
