"""Deep chains where one activation in twenty fits: `auto` beside the exact chain program.

    python -m benchmarks.deep_chains [--out benchmarks/results/deep_chains.json]
        [--graphs residual-1000,lstm-2000] [--share 0.05] [--time-limit S]

The budget is what is resident plus a share of what the step holds beside it at its peak. The chain
of all blocks, uncoarsened, is solved by `solver.chain` for the same budget, less what is on the
device beside the chain: the best persistent schedule of whole blocks, as the chain models the
graph. Its time is that model's; its schedule is also simulated on the graph. `auto` decides
operator by operator, so it may well be faster than the best schedule of whole blocks; its own gap
is to the cut bound, which holds for every schedule.
"""

from __future__ import annotations

import json
import time

from benchmarks import harness
from benchmarks.harness import Row
from graphs.graph import Graph
from graphs.synthetic import nets
from solver.chain import chain_to_schedule, constant_bytes, solve_chain, split_into_blocks, to_chain
from solver.methods import METHODS
from solver.schedule import baseline, simulate

GRAPHS = {
    "residual-1000": lambda: nets.residual(n_blocks=1000),
    "lstm-2000": lambda: nets.recurrent(n_steps=2000),
}


def main() -> None:
    parser = harness.parser("deep_chains", __doc__, time_limit_s=60.0)
    parser.add_argument("--graphs", type=harness.names(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--share", type=float, default=0.05, help="of the activations")
    arguments = parser.parse_args()
    report: Row = {"circumstances": harness.circumstances(arguments.time_limit), "graphs": {}}
    for name in arguments.graphs:
        row = measure(GRAPHS[name](), share=arguments.share, limit_s=arguments.time_limit)
        report["graphs"][name] = row
        print(name, json.dumps(row, indent=1), flush=True)
        harness.write(arguments.out, report)


def measure(graph: Graph, *, share: float, limit_s: float) -> Row:
    """Both on one graph; overheads are shares of the step without checkpointing."""
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    budget_bytes = graph.resident_bytes + int(share * (peak_bytes - graph.resident_bytes))
    began_s = time.perf_counter()
    proposal = METHODS["auto"](graph, budget_bytes=budget_bytes, time_limit_s=limit_s, seed=0)
    auto_s = time.perf_counter() - began_s
    found = None if proposal.schedule is None else simulate(graph, proposal.schedule)
    return {
        "n_nodes": len(graph.nodes),
        "budget_bytes": budget_bytes,
        "baseline_peak_bytes": peak_bytes,
        "auto": {
            "overhead": None if found is None else found.time_s / graph.baseline_time_s - 1.0,
            "peak_bytes": None if found is None else found.peak_bytes,
            "bound": proposal.lower_bound_s / graph.baseline_time_s - 1.0,
            "seconds": auto_s,
        },
        "chain": _exact_chain(graph, budget_bytes=budget_bytes),
    }


def _exact_chain(graph: Graph, *, budget_bytes: int) -> Row | None:
    """The chain program's own time, and its schedule simulated on the graph; None: infeasible."""
    blocks = split_into_blocks(graph)
    began_s = time.perf_counter()
    chain = to_chain(graph, blocks)
    solution = solve_chain(chain, budget_bytes=budget_bytes - constant_bytes(graph, blocks))
    if solution is None:
        return None
    seconds = time.perf_counter() - began_s
    once_s = sum(chain.forward_s) + sum(chain.backward_s)
    schedule = chain_to_schedule(graph, blocks, solution.ops)
    simulation = simulate(graph, schedule)
    return {
        "n_blocks": blocks.n_blocks,
        "overhead_of_the_chain": solution.cost_s / once_s - 1.0,
        "overhead": simulation.time_s / graph.baseline_time_s - 1.0,
        "peak_bytes": simulation.peak_bytes,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
