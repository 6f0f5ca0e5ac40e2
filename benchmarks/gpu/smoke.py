"""The part "smoke": run the tests of tests/gpu on one device, one file per case."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[2] / "tests" / "gpu"


def groups(_settings: object) -> list[str]:
    """The files of tests; each is a case and so a separate process, which may crash alone."""
    return sorted(path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py"))


class _Checks:
    """A pytest plugin that collects each test's outcome and the findings that it recorded."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(nodeid, file=sys.stderr, flush=True)  # if the process is killed: the test that ran

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        if report.failed:
            message = report.longreprtext.strip().splitlines()[-8:]
            self.found[name] = f"FAILS ({report.when}): {' | '.join(message)[-900:]}"
        elif report.skipped:
            self.found[name] = f"skipped: {report.longrepr[2]}"  # type: ignore[index]
        elif report.when == "call":
            findings = "; ".join(
                str(value).replace("\n", ";") for _, value in report.user_properties
            )
            self.found[name] = f"holds ({report.duration:.1f} s): {findings}"


def run(group: str, device: torch.device, backend: str) -> dict[str, Any]:
    """Run one file of tests and return its row; "checks" has each test's outcome as text."""
    started_s = time.monotonic()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    checks = _Checks()
    marks = "gpu" if device.type == "cuda" else "not gpu"
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--no-summary"]
    if backend != "inductor":
        options += ["-k", "not inductor"]
    path = str(TESTS / f"test_{group}.py")
    code = pytest.main([*options, "-m", marks, path], plugins=[checks])
    failed = [name for name, found in checks.found.items() if found.startswith("FAILS")]
    ran = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return {
        "status": "ran" if ran else "failed",
        "reason": "" if ran else ", ".join(failed) or f"pytest ended with {code!s}",
        "n_held": sum(found.startswith("holds") for found in checks.found.values()),
        "n_failed": len(failed),
        "seconds": time.monotonic() - started_s,
        "checks": checks.found,
    }
