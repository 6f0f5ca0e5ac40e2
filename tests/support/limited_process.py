"""Train in a process whose memory limit is below what the fastest plan takes.

`python -m tests.support.limited_process` prints, for each of two steps, whether its gradients are
those of the step without the limit, and whether more than one plan was made.
"""

from __future__ import annotations

import gc
import resource
import warnings
from pathlib import Path

import scipy.optimize  # noqa: F401  its libraries are mapped before the limit
import torch
from torch import nn

from scheduler_runtime import fit, plans_of
from tests.support.bitwise import are_equal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in model.parameters()]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, x = fit(Net(), budget="10GB", on_pressure="replan"), torch.randn(16384, 256)
    expected = gradients(model, x)
    solution = plans_of(model)[0].solution
    step_bytes = solution.simulation.peak_bytes - solution.graph.resident_bytes
    gc.collect()
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_bytes = mapped_bytes + int(0.6 * step_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    for _ in range(2):
        print(are_equal(expected, gradients(model, x)), len(plans_of(model)) > 1)


if __name__ == "__main__":
    main()
