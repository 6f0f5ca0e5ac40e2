"""Seconds to plan chains, `solver.chain` beside checkpoint-schedules and on its own.

    python -m benchmarks.chain_speed [--only revolve|dp] [--out benchmarks/results/chain_speed.json]

revolve: 10^6 equal steps, 40 snapshots; each side's schedule is iterated to its end and nothing is
done with the actions. Both run in this process, in turns; the best of three counts.

dp: random chains of 200 and 1000 unequal steps on 500 memory slots, each in a process of its own,
whose peak resident memory is the chain's. Starting Python is not in the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata, util
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row
from solver.chain import Chain, n_extra_steps, reversal, solve_chain

N_STEPS = 10**6
N_SNAPSHOTS = 40
N_TURNS = 3
N_SLOTS = 500
CHAIN_LENGTHS = (200, 1000)
BUDGET_SHARE = 0.3
"""Of the bytes that the chain saves without checkpointing."""
MAX_INPUT_BYTES = 64 * 10**6
PEER = "checkpoint-schedules"


def main() -> None:
    parser = harness.parser("chain_speed", __doc__)
    parser.add_argument("--only", choices=("revolve", "dp"), help="one of the two parts")
    parser.add_argument("--dp-length", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dp_length is not None:
        print(json.dumps(time_dp(arguments.dp_length)))
        return
    rows: Row = {}
    if arguments.only != "dp":
        if util.find_spec("checkpoint_schedules") is None:
            parser.error(f"{PEER} is not installed; pip install '.[test]' brings it")
        rows["revolve"] = time_revolve()
    if arguments.only != "revolve":
        rows["dp"] = [_dp_in_own_process(length) for length in CHAIN_LENGTHS]
    print(json.dumps(rows, indent=1))
    circumstances = harness.circumstances() | {"load_average": os.getloadavg()}
    if util.find_spec("checkpoint_schedules") is not None:
        circumstances["versions"][PEER] = metadata.version(PEER)
    harness.write(arguments.out, {"circumstances": circumstances, **rows})


def time_revolve() -> Row:
    """Both sides in turns. Each one's forward steps without saving are counted, untimed."""
    # Imported here: the processes that time dp are to hold nothing that dp does not need.
    import checkpoint_schedules as peer  # type: ignore[import-untyped]

    sides: dict[str, Callable[[], Iterable[Any]]] = {
        "ours": lambda: reversal(n_steps=N_STEPS, n_snapshots=N_SNAPSHOTS),
        "peer": lambda: peer.MultistageCheckpointSchedule(N_STEPS, N_SNAPSHOTS, 0),
    }
    times_s: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(N_TURNS):
        for side, actions in sides.items():
            began_s = time.perf_counter()
            for _ in actions():
                pass
            times_s[side].append(time.perf_counter() - began_s)
    ours_s, peer_s = min(times_s["ours"]), min(times_s["peer"])
    return {
        "n_steps": N_STEPS,
        "n_snapshots": N_SNAPSHOTS,
        "ours_s": ours_s,
        "peer_s": peer_s,
        "ratio": peer_s / ours_s,
        "all_s": times_s,
        "n_extra_steps_closed_form": n_extra_steps(n_steps=N_STEPS, n_snapshots=N_SNAPSHOTS),
        "n_extra_steps_ours": sum(
            stop - start for kind, start, stop in sides["ours"]() if kind == "advance"
        ),
        "n_extra_steps_peer": sum(
            action.n1 - action.n0
            for action in sides["peer"]()
            if isinstance(action, peer.Forward) and not action.write_adj_deps
        ),
        "n_actions_ours": sum(1 for _ in sides["ours"]()),
        "n_actions_peer": sum(1 for _ in sides["peer"]()),
    }


def _dp_in_own_process(length: int) -> Row:
    """`time_dp` by itself: a process's peak memory never goes down again."""
    command = [sys.executable, "-m", "benchmarks.chain_speed", "--dp-length", str(length)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def time_dp(length: int) -> Row:
    """Solve one chain; the peak is this process's, Python and NumPy included."""
    rng = random.Random(length)
    input_bytes = [rng.randint(1, MAX_INPUT_BYTES) for _ in range(length + 1)]
    # Entry 0 is unused; a block saves its output and up to seven times as much besides.
    saved_bytes = [0, *(int(size * rng.uniform(1, 8)) for size in input_bytes[1:])]
    chain = Chain(
        forward_s=tuple(rng.uniform(1e-3, 1e-2) for _ in range(length)),
        backward_s=tuple(rng.uniform(2e-3, 2e-2) for _ in range(length + 1)),
        input_bytes=tuple(input_bytes),
        saved_bytes=tuple(saved_bytes),
        forward_workspace_bytes=tuple(rng.randint(0, 10**6) for _ in range(length)),
        backward_workspace_bytes=tuple(rng.randint(0, 10**6) for _ in range(length + 1)),
    )
    budget_bytes = int(BUDGET_SHARE * (input_bytes[0] + sum(saved_bytes)))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    solution = solve_chain(chain, budget_bytes=budget_bytes, n_slots=N_SLOTS)
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    once_s = sum(chain.forward_s) + sum(chain.backward_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "n_blocks": length,
        "n_slots": N_SLOTS,
        "budget_bytes": budget_bytes,
        "seconds": took_s,
        "cpu_seconds": took_cpu_s,
        "peak_rss_bytes": peak if sys.platform == "darwin" else peak * 1024,  # Linux: in KiB
        "overhead": None if solution is None else solution.cost_s / once_s - 1,
        "peak_bytes": None if solution is None else solution.peak_bytes,
        "n_ops": None if solution is None else len(solution.ops),
    }


if __name__ == "__main__":
    main()
