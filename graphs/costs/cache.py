"""Measured costs cached on disk, so that each call is measured once per device.

One file per device and library versions. It maps a digest of the call (operator, options, and the
shape, strides and dtype of each tensor) to seconds and workspace bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from graphs.files import FormatError, write_json

FORMAT = "costs/2"
"""Changes whenever calls are measured differently. Files of older formats are ignored: the format
is part of the hash in the file's name."""


def default_cache_file(device: torch.device | str) -> Path:
    """The cache file of this device, below $XDG_CACHE_HOME, else ~/.cache."""
    file_key = {"format": FORMAT, **circumstances(device)}
    stem = hashlib.sha256(json.dumps(file_key, sort_keys=True).encode()).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "checkpoint-solver" / f"costs-{stem[:16]}.json"


def circumstances(device: torch.device | str) -> dict[str, Any]:
    """The versions and settings that decide which kernels run on this device, and how fast."""
    where = torch.device(device)
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": where.type,
        "float32_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if where.type == "cuda":
        card = torch.cuda.get_device_properties(where)
        found |= {
            "card": card.name,
            "memory_bytes": card.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    else:
        found |= {
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.node(),  # a home directory may be shared by different machines
        }
    return found


class CostCache:
    """Costs by call. Nothing is written to disk before `save`."""

    def __init__(self, path: Path, device: torch.device | str) -> None:
        self._path = path
        self._head = {"format": FORMAT, "circumstances": circumstances(device)}
        self._costs = self._read()
        self._is_changed = False

    def __len__(self) -> int:
        return len(self._costs)

    def get(self, key: Any) -> tuple[float, int] | None:
        """Seconds and workspace bytes of a call, by its `OpCall.key()`; None: not cached."""
        return self._costs.get(_digest(key))

    def put(self, key: Any, time_s: float, workspace_bytes: int) -> None:
        self._costs[_digest(key)] = (time_s, workspace_bytes)
        self._is_changed = True

    def save(self) -> None:
        """Write new costs, merged with what other processes have written meanwhile."""
        if not self._is_changed:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {**self._head, "costs": {**self._read(), **self._costs}})
        self._is_changed = False

    def _read(self) -> dict[str, tuple[float, int]]:
        """The costs in the file; raises FormatError unless it is a cost file of this device."""
        path = self._path
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            for field, expected in self._head.items():
                if found[field] != expected:
                    raise FormatError(
                        f"{path}: {field} is {found[field]}, expected {expected}; delete the file "
                        "or give another path"
                    )
            return {key: (float(time_s), int(n)) for key, (time_s, n) in found["costs"].items()}
        except FormatError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(
                f"{path}: not a file of measured costs ({error}); delete it"
            ) from error


def _digest(key: Any) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]
