"""What runs is told: by default on stderr, and by the usual means of logging."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from solver.sizes_deadlines_progress import silenced
from solver.sizes_deadlines_progress import telling as from_the_face
from solver.sizes_deadlines_progress.progress_in_logs import Lines, Say
from solver.sizes_deadlines_progress.progress_in_python import logger, tell, telling
from tests.support.paths import ROOT


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that has not configured logging; pytest has."""
    monkeypatch.setattr(logger, "hasHandlers", lambda: False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.slow(sample=8)
@pytest.mark.parametrize(
    ("configured", "printed"),
    [
        ("", "Net: planned\n"),
        ("logging.getLogger('checkpoint_solver').setLevel(logging.WARNING)", ""),
        ("logging.basicConfig(level=logging.INFO)", "INFO:checkpoint_solver:Net: planned\n"),
        ("logging.basicConfig(level=logging.WARNING)", ""),
        ("logging.getLogger('checkpoint_solver').addHandler(logging.NullHandler())", ""),
        ("logging.getLogger('checkpoint_solver').propagate = False", ""),
        ("logging.getLogger().setLevel(logging.ERROR)", ""),
        ("logging.getLogger().setLevel(logging.INFO)", "Net: planned\n"),
        (
            "logging.root.setLevel(40); logging.getLogger('checkpoint_solver').setLevel(20)",
            "Net: planned\n",
        ),
    ],
)
def test_a_program_of_its_own(configured, printed):
    tells = "from solver.sizes_deadlines_progress import tell; tell('Net: planned')"
    program = f"import logging; {configured}; {tells}"
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", program.replace("; ;", ";")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
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
    with silenced(), telling("tracing Net...") as say:
        say("planning Net...")
        tell("Net: planned")
    assert capsys.readouterr().err == ""


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[Lines]:
    """Of the lines that a log file gets: the ones that were begun. No thread ticks them."""
    made: list[Lines] = []

    @contextlib.contextmanager
    def begun(what: str, write: Say) -> Iterator[Say]:
        lines = Lines(what, write)
        made.append(lines)
        yield lambda line: setattr(lines, "what", line)

    monkeypatch.setattr("solver.sizes_deadlines_progress.progress_in_python.log_progress", begun)
    return made


@pytest.mark.usefixtures("unconfigured")
def test_parts_say_how_far_the_whole_is(capsys, monkeypatch, stages):
    clock = {"s": 0.0}
    monkeypatch.setattr(
        "solver.sizes_deadlines_progress.progress_in_logs.now_s", lambda: clock["s"]
    )
    with telling("verifying...") as say:
        (lines,) = stages
        with telling("tracing Net..."):
            clock["s"] = 3.0
            lines.tick()
            clock["s"] = 3.1  # too soon after
            lines.tick()
        tell("Net: planned")  # which is not what runs
        clock["s"] = 5.0
        lines.tick()
        say("measuring")
        clock["s"] = 9.0
        lines.tick()
    tell("verified")
    assert len(stages) == 1
    told = ["verifying...", "tracing Net (3 s)...", "verifying (5 s)...", "measuring (9 s)..."]
    told += ["verified"]
    assert capsys.readouterr().err.splitlines() == told


def test_a_long_silent_stage_is_told_to_configured_logging_too(caplog, monkeypatch, stages):
    clock = {"s": 0.0}
    monkeypatch.setattr(
        "solver.sizes_deadlines_progress.progress_in_logs.now_s", lambda: clock["s"]
    )
    with caplog.at_level(logging.INFO), telling("tracing Net..."):
        clock["s"] = 4.0
        stages[0].tick()
    assert caplog.messages == ["tracing Net...", "tracing Net (4 s)..."]


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
def test_inside_a_training_step_a_terminal_gets_plain_lines(monkeypatch):
    """The progress bar of the training is live there."""
    import torch
    from torch import nn

    from scheduler_runtime import fit

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    model = nn.Linear(2, 2)
    fit(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    first, *others = terminal.getvalue().splitlines()
    assert first == "tracing Linear..."
    assert any(line.startswith("Linear: peak ") for line in others)
    assert "\x1b" not in terminal.getvalue()


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
