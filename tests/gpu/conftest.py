"""One harness for all checks on a device; every path once, on tiny models.

    pytest -n 0 -m gpu tests/gpu      # on a machine with CUDA: the CUDA cases
    pytest -m "not gpu" tests/gpu     # the same checks on the CPU, those that make sense there

A test that asks for `device` has a case on the CPU and one, marked `gpu`, on CUDA; a test that asks
for `cuda` has only the latter. `python -m benchmarks.gpu --parts smoke` runs these tests file by
file and prints what each hands to `finding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

ON_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def _opened(kind: str) -> Iterator[Any]:
    import torch

    from benchmarks.gpu.bench import free_unreferenced

    if kind == "cpu":
        device = torch.device("cpu")
    elif torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")
    yield device
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()  # compiled code would hold the test's tensors
    free_unreferenced(device)


@pytest.fixture(params=["cpu", ON_CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from _opened(request.param)


@pytest.fixture(params=[ON_CUDA])
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from _opened(request.param)


@pytest.fixture
def finding(record_property: Callable[[str, object], None]) -> Callable[[object], None]:
    """Hands a fact about this machine to the report: a figure, a name, a list of kernels."""
    return lambda fact: record_property("finding", str(fact))
