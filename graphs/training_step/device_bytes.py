"""Memory that a CUDA card holds during a step besides the step's tensors, as far as it is known
beforehand.

    cuBLAS workspaces   one per thread that multiplies matrices, from its first product on
    rounding            each tensor takes a multiple of 512 bytes

These become resident tensors that no node reads, so they count towards every peak. The rest (the
CUDA context, cuDNN's workspace, fragmentation) is unknown and has to fit in the reserve.
"""

from __future__ import annotations

import dataclasses
import os
import re

from graphs.graph import Graph
from graphs.hardware import Hardware
from graphs.training_step.around import with_resident

ALLOCATION_BYTES = 512
"""Sizes are rounded up to a multiple of this: kMinBlockSize in PyTorch's
c10/cuda/CUDACachingAllocator.cpp."""

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
_OTHER_OPS_WITH_PRODUCTS = re.compile(
    r"linear_cross_entropy|chunked|^head_loop\(|^opaque_(forward|backward)\(", re.IGNORECASE
)
"""Other ops that multiply matrices: loops over chunks of rows; and modules that are planned as one
piece, which may."""


def with_device_bytes(graph: Graph, hardware: Hardware | None) -> Graph:
    """Add the memory that a card holds besides the step's tensors; for other devices, the graph is
    returned unchanged."""
    if hardware is None or hardware.kind != "cuda":
        return graph
    # If the step multiplies at all, the caller's thread does, and so does autograd's thread in the
    # backward pass, if only to recompute products.
    multiplies = any(
        node.op.rpartition(".")[0] in _PRODUCTS or _OTHER_OPS_WITH_PRODUCTS.search(node.op)
        for node in graph.nodes
    )
    n_threads = multiplies * (1 + any(node.phase == "backward" for node in graph.nodes))
    # Sizes in a graph are not rounded, so that `graph_id` is the same for every device. This counts
    # the rounding of all tensors, as if they were on the device at once: an upper bound.
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

    The environment variable CUBLAS_WORKSPACE_CONFIG (pairs of KiB and count) overrides the default,
    as in PyTorch.
    """
    pairs = re.findall(":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * _KIB
    # an unknown card may be of any generation: assume the larger default
    capability = hardware.compute_capability or (9, 0)
    return _HOPPER_WORKSPACE_BYTES if capability[0] >= 9 else _OTHER_WORKSPACE_BYTES
