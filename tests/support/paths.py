"""Paths of the repository and of the tests' data."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
INSTALLED = ("checkpoint_solver", "graphs", "solver", "scheduler_runtime")
"""The folders that are installed."""
GPT2 = DATA / "gpt2_small_b8_t1024.json"
