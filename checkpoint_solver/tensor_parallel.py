"""Planning for one rank of tensor parallelism, of `graphs.trace`."""

from graphs.capture import MeshError
from graphs.trace import fake_mesh

__all__ = ["MeshError", "fake_mesh"]
