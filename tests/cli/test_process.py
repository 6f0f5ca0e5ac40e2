"""The command as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from graphs.synthetic.nets import residual
from tests.cli.test_command import GPT2
from tests.support.command import without_progress, write_model
from tests.support.paths import ROOT


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "checkpoint_solver", *argv],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_a_real_process(tmp_path):
    done = run("--budget", "4GB", "-o", str(tmp_path / "s.json"), GPT2)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert "optimal" in done.stdout
    assert (tmp_path / "s.json").exists()


@pytest.mark.slow
def test_the_end_of_the_process_is_quiet_and_calls_what_a_model_file_registers(tmp_path):
    """triton 3.9, which torch 2.15 imports, prints objects that are left at the end as leaks."""
    at_exit = """
    import atexit, os
    atexit.register(os.write, 2, b"written at exit")
    """
    done = run("--budget", "1GB", write_model(tmp_path, add=at_exit))
    assert (done.returncode, without_progress(done.stderr)) == (0, "written at exit")
    assert "optimal" in done.stdout
    impossible = run("--budget", "1kB", write_model(tmp_path))
    assert impossible.returncode == 3
    assert without_progress(impossible.stderr).count("\n") == 1


@pytest.mark.slow
def test_what_c_code_prints_stays_out_of_the_json_object():
    noisy = """
import os, sys
from checkpoint_solver.cli import command
search = command.attempt
command.attempt = lambda *given, **named: (os.write(1, b"noise"), search(*given, **named))[1]
sys.exit(command.process())
"""
    done = subprocess.run(
        [sys.executable, "-c", noisy, "--budget", "4GB", "--method", "sqrt", "--json", GPT2],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "noise" in done.stderr


@pytest.mark.slow
def test_a_wide_terminal():
    wide = run("--budget", "4GB", "--method", "none", GPT2, COLUMNS="120", NO_COLOR="1")
    assert max(map(len, wide.stdout.splitlines())) > 80


def test_a_name_that_the_terminal_cannot_show(tmp_path):
    path = tmp_path / "grün.json"
    residual(n_blocks=3).save(path)
    done = run("--budget", "1GB", str(path), PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert r"gr\xfcn.json" in done.stdout.replace("\n", "")


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m checkpoint_solver --budget 4GB --method sqrt {GPT2} | head -1"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert without_progress(done.stderr) == ""
