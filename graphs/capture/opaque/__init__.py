"""Opaque parts: modules, methods and functions that cannot be traced and are planned as one piece.

Each call of such a part is one forward and one backward node of the graph, and runs in eager mode.
"""

from graphs.capture.opaque.forms import RandomSources
from graphs.capture.opaque.nodes import StandIn
from graphs.capture.opaque.search import (
    OpaquePart,
    Planned,
    refuse_dominant_part,
    with_opaque_parts,
)
from graphs.capture.opaque.targets import OpaqueBackward, OpaqueForward, bind
