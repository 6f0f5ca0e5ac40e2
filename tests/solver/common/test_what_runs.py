"""What runs is told: by default on stderr, and by the usual means of logging."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys

import pytest

from solver.common import telling as from_the_face
from solver.common import untold
from solver.common.what_runs import logger, tell, telling
from tests.support.paths import ROOT


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that has not configured logging; pytest has."""
    monkeypatch.setattr(logger, "hasHandlers", lambda: False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(
    ("configured", "printed"),
    [
        ("", "Net: planned\n"),
        ("logging.getLogger('checkpoint_solver').setLevel(logging.WARNING)", ""),
        ("logging.basicConfig(level=logging.INFO)", "INFO:checkpoint_solver:Net: planned\n"),
        ("logging.basicConfig(level=logging.WARNING)", ""),
        ("logging.getLogger('checkpoint_solver').addHandler(logging.NullHandler())", ""),
    ],
)
def test_a_program_of_its_own(configured, printed):
    program = f"import logging; {configured}; from solver.common import tell; tell('Net: planned')"
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", program.replace("; ;", ";")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", printed)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("unconfigured")
def test_lines_are_printed_on_stderr_by_default(capsys):
    with telling("tracing Net..."):
        pass
    tell("Net: planned")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "tracing Net...\nNet: planned\n")


@pytest.mark.usefixtures("unconfigured")
def test_the_level_of_the_logger_turns_them_off(capsys, monkeypatch):
    monkeypatch.setattr(logger, "level", logging.WARNING)
    with telling("tracing Net..."):
        tell("Net: planned")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("unconfigured")
def test_disabling_logging_turns_them_off(capsys):
    logging.disable(logging.INFO)
    try:
        tell("Net: planned")
    finally:
        logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("unconfigured")
def test_of_several_processes_the_first_prints(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    tell("Net: planned")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    tell("Net: planned")
    assert capsys.readouterr().err == "Net: planned\n"


def test_where_logging_is_configured_they_are_records_and_nothing_else(capsys, caplog):
    with caplog.at_level(logging.INFO), telling("tracing 100 % of Net..."):
        pass
    assert caplog.record_tuples == [("checkpoint_solver", logging.INFO, "tracing 100 % of Net...")]
    assert capsys.readouterr().err == ""


def test_configured_logging_at_warning_stays_silent(capsys, caplog):
    with caplog.at_level(logging.WARNING):
        tell("Net: planned")
    assert not caplog.records
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("unconfigured")
def test_a_caller_that_says_itself_what_runs(capsys):
    with untold(), telling("tracing Net...") as say:
        say("planning Net...")
        tell("Net: planned")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("unconfigured")
def test_parts_say_how_far_the_whole_is(capsys, monkeypatch):
    clock = iter([0.0, 3.0, 3.1, 5.0])
    monkeypatch.setattr("solver.common.what_runs.now_s", lambda: next(clock))
    with telling("verifying..."):
        with telling("tracing Net..."):  # at 3.0 s
            tell("traced")  # at 3.1 s: too soon after
        tell("measuring")  # at 5.0 s
    tell("verified")
    lines = ["verifying...", "tracing Net...", "measuring", "verified"]
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.usefixtures("unconfigured")
def test_hours_of_work_take_few_lines_of_a_log(capsys, monkeypatch):
    clock = {"s": 0.0}
    monkeypatch.setattr("solver.common.what_runs.now_s", lambda: clock["s"])
    with telling("sweeping...") as say:
        for second in range(10_000):
            clock["s"] = float(second)
            say(f"{second} of 10000 plans")
    lines = capsys.readouterr().err.splitlines()
    seconds = [int(line.split()[0]) for line in lines[1:]]
    assert seconds == [2 * 2**n for n in range(13)]


@pytest.mark.usefixtures("unconfigured")
def test_a_terminal_shows_how_far_it_is_and_keeps_two_lines(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with telling("tracing [Net]...") as say:
        say("planning [Net] (7 ops)...")
    tell("[Net]: planned")
    shown = terminal.getvalue()
    assert shown.startswith("tracing [Net]...\n")
    assert "planning [Net] (7 ops)..." in shown
    assert shown.endswith("[Net]: planned\n")
    last = shown[: -len("[Net]: planned\n")]
    assert last.endswith("\x1b[2K")  # the line of the spinner is erased


@pytest.mark.usefixtures("unconfigured")
def test_a_notebook_shows_no_error_but_output(capsys, monkeypatch):
    kernels = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    stream = kernels()
    monkeypatch.setattr(sys, "stderr", stream)
    tell("Net: planned")
    assert stream.getvalue() == ""
    assert capsys.readouterr().out == "Net: planned\n"


@pytest.mark.usefixtures("unconfigured")
def test_without_stderr_nothing_fails(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with telling("tracing Net..."):
        tell("Net: planned")


@pytest.mark.usefixtures("unconfigured")
def test_an_error_is_not_followed_by_an_end(capsys):
    with pytest.raises(ValueError, match="no"), from_the_face("tracing Net..."):
        raise ValueError("no")
    tell("next")
    assert capsys.readouterr().err == "tracing Net...\nnext\n"
