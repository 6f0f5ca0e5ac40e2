"""The problem: a cost/memory graph of one training step. Imports nothing of ours.

Only `graphs.trace` (`from graphs.trace import trace`) and its helpers import torch.
"""

from graphs.files import FormatError
from graphs.graph import Graph, GraphError, GraphMeta, Node, Tensor
from graphs.moved_imports import announce_moves
from graphs.passes import PassesError
from graphs.pipeline import Pipeline, PipelineError
from graphs.zero import Zero, ZeroError

__all__ = [
    "FormatError",
    "Graph",
    "GraphError",
    "GraphMeta",
    "Node",
    "PassesError",
    "Pipeline",
    "PipelineError",
    "Tensor",
    "Zero",
    "ZeroError",
]

announce_moves()
