"""The problem: a cost/memory graph of one training step. Imports nothing of ours, torch lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphs.files import FormatError
from graphs.graph import Graph, GraphError, Node, Tensor

if TYPE_CHECKING:
    from graphs.trace import TraceError, trace

__all__ = ["FormatError", "Graph", "GraphError", "Node", "Tensor", "TraceError", "trace"]


def __getattr__(name: str) -> Any:
    """`graphs.trace` imports torch: only when it is asked for."""
    if name in ("TraceError", "trace"):
        import graphs.trace

        return getattr(graphs.trace, name)
    raise AttributeError(f"module 'graphs' has no attribute {name!r}")
