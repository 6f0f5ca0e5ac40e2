"""Traces a module whose parameters are DTensors, as the operators of one rank."""

from graphs.capture.tensor_parallel.as_dtensors import (
    forget_placements,
    meshes_on,
    report_gradient_placement,
    rewrite_for_local_parts,
    with_local_part,
)
from graphs.capture.tensor_parallel.checks import (
    MeshError,
    has_distributed,
    has_parallel_style,
    is_of_parallel_style,
    refuse_distributed,
)
