"""Parts of a model that cannot be traced: each is one node of the graph and runs in eager mode."""

from graphs.capture.opaque.forms import RandomSources
from graphs.capture.opaque.nodes import StandIn
from graphs.capture.opaque.search import OpaquePart, Planned, refuse_most, with_opaque_parts
from graphs.capture.opaque.targets import OpaqueBackward, OpaqueForward, bind
