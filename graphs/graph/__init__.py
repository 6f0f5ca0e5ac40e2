"""The type Graph: the nodes and tensors of one training step, validated, and its file format."""

from graphs.graph.eager_memory import (
    as_eager,
    with_dead_code,
    with_function_lifetimes,
    with_saved,
    without_random_states,
)
from graphs.graph.meta import FROZEN, GraphMeta
from graphs.graph.parts import DROP, RANDOM_STATE, GraphError, Kind, Node, Phase, Tensor
from graphs.graph.step_graph import Graph, is_under
from graphs.graph.users_line import warn as warn
