"""What releases of `torch.distributed.pipelining` hold."""

from __future__ import annotations

import torch


def n_unheld(schedule: str, n_in_flight: int, n_microbatches: int) -> int:
    """Tensors of a micro-batch's output that plans count in a stage that sends outputs, and that
    torch 2.15 no longer holds: outputs that have been sent (of the micro-batches in flight, and
    under 1F1B one more), and buffers for gradients of outputs that have not arrived."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        return 0
    return n_in_flight + (1 if schedule == "1f1b" else 0) + n_microbatches - 1
