"""Planning for one rank of tensor parallelism (from `graphs.trace` and `graphs.capture`)."""

from graphs.capture import MeshError
from graphs.trace import fake_mesh

__all__ = ["MeshError", "fake_mesh"]
