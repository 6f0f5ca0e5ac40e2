"""What is measured before a compiled step is used: the bytes of the whole training step."""

from __future__ import annotations

import torch
from torch import nn

from scheduler_runtime import compile, compile_reports


def test_what_only_the_loss_reads_counts() -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(2, 4), torch.randn(1000, 4))
    compile(
        model,
        batch,
        budget="1GB",
        backend="aot_eager",
        inputs=lambda batch: (batch[0],),
        loss=lambda output, batch: (output - batch[1][:2]).square().mean(),
    )
    (report,) = compile_reports(model)
    assert report.chosen.measured_bytes is not None
    assert report.chosen.measured_bytes >= batch[1].nbytes
    assert report.optimizer_peak_bytes >= batch[1].nbytes
