"""Helpers for the tests of the command: write a model file, run the command and read its error."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from checkpoint_solver.cli.command import main

MODEL = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.square().mean()

    def get_model():
        return Net()

    def get_batch(batch_size=64):
        return torch.randn(batch_size, 32)
"""


def write_model(
    directory: Path, *changes: tuple[str, str], add: str = "", name: str = "model.py"
) -> str:
    """Write a model file, MODEL with some text replaced or added, and return its path."""
    text = textwrap.dedent(MODEL)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = directory / name
    path.write_text(text + textwrap.dedent(add))
    return str(path)


def json_of(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    """Run the command with `--json`, which must end with this exit code, and return the answer."""
    assert main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def failed(capsys: pytest.CaptureFixture[str], *argv: str, code: int) -> str:
    """Run the command, which must end with this exit code, and return the last line on stderr.

    Before that line, only these are allowed: that the model cannot be traced, and progress of the
    search for the largest size.
    """
    assert main(argv) == code
    printed = capsys.readouterr()
    lines = without_progress(printed.err).strip().splitlines()
    *told, last = lines
    begins = "solve: not traced: ", "searching for the largest "
    assert all(line.startswith(begins) for line in told), printed.err
    assert last.startswith("solve: ")
    assert "Traceback" not in printed.err
    return last


def without_progress(err: str) -> str:
    """stderr without the lines on slow operations, which appear on a busy machine."""
    return re.sub(r"^.* \(\d+ s\)\.\.\.\n", "", err, flags=re.MULTILINE)
