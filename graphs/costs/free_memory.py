"""How much memory is free."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> float:
    """How many bytes can still be allocated on the device; infinite if unknown.

    On CUDA: what the driver reports as free, plus what PyTorch's allocator has reserved but not
    allocated. On the CPU: what Linux reports as available; a process that exceeds it is killed.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * int(sizes["MemAvailable"].split()[0]) if "MemAvailable" in sizes else float("inf")
