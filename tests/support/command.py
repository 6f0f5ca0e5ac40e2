"""What the tests of the command share: a model file to write, and a failure to read."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

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
    """A model file: the good one, or that with lines replaced or added. Returns its path."""
    text = textwrap.dedent(MODEL)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = directory / name
    path.write_text(text + textwrap.dedent(add))
    return str(path)


def failed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Run, expect failure: the exit code and the last line on stderr. Before it, only what was said
    before a model that cannot be traced was run, and the sizes that were tried."""
    code = main(argv)
    printed = capsys.readouterr()
    lines = without_progress(printed.err).strip().splitlines()
    *told, last = lines
    begins = "solve: not traced: ", "searching for the largest "
    assert all(line.startswith(begins) for line in told), printed.err
    assert last.startswith("solve: ")
    assert "Traceback" not in printed.err
    return code, last


def without_progress(err: str) -> str:
    """stderr without the lines of what takes long, which a busy machine adds."""
    return re.sub(r"^.* \(\d+ s\)\.\.\.\n", "", err, flags=re.MULTILINE)
