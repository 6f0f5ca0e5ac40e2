"""What a CUDA card holds for a step besides the step's tensors, and is known beforehand.

    workspaces of cuBLAS    one per thread that multiplies, from its first product on
    rounding                each tensor is allocated in steps of 512 bytes

They are resident tensors of the graph that no node reads, so they count towards every peak. What
remains unknown (the context, cuDNN's workspace, fragmentation) is what the reserve is for.
"""

from __future__ import annotations

import dataclasses
import os
import re

from graphs.graph import Graph
from graphs.hardware import Hardware
from graphs.training_step.around import with_resident

ALLOCATION_BYTES = 512
"""kMinBlockSize in PyTorch's c10/cuda/CUDACachingAllocator.cpp: sizes are rounded up to it."""

_KIB = 1024
_HOPPER_WORKSPACE_BYTES = 32 * 1024 * _KIB
_OTHER_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * _KIB
"""Defaults of aten/src/ATen/cuda/CublasHandlePool.cpp, which allocates the workspaces: 32 MiB for
Hopper and Blackwell (compute capability 9 to 12), `:4096:2:16:8` for others. cublasLt uses the same
ones since torch 2.7."""

_PRODUCTS = {
    f"aten.{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_grouped_mm")
}
_WITH_PRODUCTS = re.compile(
    r"linear_cross_entropy|chunked|^head_loop\(|^opaque_(forward|backward)\(", re.IGNORECASE
)
"""Loops over chunks of rows, which they multiply; and modules planned as one piece, which may."""


def with_device_bytes(graph: Graph, hardware: Hardware | None) -> Graph:
    """Add what the card holds besides the step's tensors; the same graph for other devices."""
    if hardware is None or hardware.kind != "cuda":
        return graph
    # The caller's thread multiplies, and autograd's where there is a backward pass: it multiplies
    # too, or recomputes products.
    multiplies = any(
        node.op.rpartition(".")[0] in _PRODUCTS or _WITH_PRODUCTS.search(node.op)
        for node in graph.nodes
    )
    n_threads = multiplies * (1 + any(node.phase == "backward" for node in graph.nodes))
    # Sizes in a graph are not rounded, so that its `graph_id` is the same for every device. This is
    # at most what rounding adds, as if all tensors were on the device at once.
    sizes = (t.size_bytes for t in graph.tensors if t.alias_of is None)
    added = {
        "cublas_workspaces": n_threads * cublas_workspace_bytes(hardware),
        "allocator_rounding": sum(-size % ALLOCATION_BYTES for size in sizes),
    }
    for name, size_bytes in added.items():
        graph = with_resident(graph, name, size_bytes)
    names = [name for name, size_bytes in added.items() if size_bytes]
    return dataclasses.replace(graph, meta=dataclasses.replace(graph.meta, device_bytes=names))


def cublas_workspace_bytes(hardware: Hardware) -> int:
    """Bytes of the workspace that PyTorch gives each cuBLAS handle.

    The environment's CUBLAS_WORKSPACE_CONFIG decides, as it does in PyTorch: pairs of KiB and
    count.
    """
    pairs = re.findall(":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * _KIB
    # an unknown card may be of any generation: the larger one
    capability = hardware.compute_capability or (9, 0)
    return _HOPPER_WORKSPACE_BYTES if capability[0] >= 9 else _OTHER_WORKSPACE_BYTES
