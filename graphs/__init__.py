"""The problem: a cost/memory graph of one training step. Imports nothing of ours.

Only `graphs.trace` (`from graphs.trace import trace`) and its helpers import torch.
"""

from graphs.files import FormatError
from graphs.graph import Graph, GraphError, Node, Tensor
from graphs.meta import GraphMeta
from graphs.moved_imports import announce_moves
from graphs.pipeline import Pipeline, PipelineError

__all__ = [
    "FormatError",
    "Graph",
    "GraphError",
    "GraphMeta",
    "Node",
    "Pipeline",
    "PipelineError",
    "Tensor",
]

announce_moves()
