"""One thread for each worker: two workers of two threads wait for one another on two cores."""

from __future__ import annotations

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
