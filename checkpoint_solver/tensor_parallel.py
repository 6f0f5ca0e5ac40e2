"""Planning for one rank of tensor parallelism, of `graphs.fake_mesh`."""

from graphs.capture import MeshError
from graphs.fake_mesh import fake_mesh

__all__ = ["MeshError", "fake_mesh"]
