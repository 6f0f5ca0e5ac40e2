"""The problem to solve: a graph of one training step, with the time of its operators and the bytes
of its tensors.

Imports neither of the other packages, `solver` and `scheduler_runtime`. Only `graphs.trace` (`from
graphs.trace import trace`) and its helpers import torch.
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
