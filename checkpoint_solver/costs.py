"""Costs of operators, and named devices, of `graphs.costs` and `graphs.hardware`."""

from graphs.costs import (
    Cost,
    CostModel,
    Measured,
    OpCall,
    Roofline,
    bytes_moved,
    cpu_peak_bytes,
    flops_of,
)
from graphs.hardware import Hardware, named

__all__ = [
    "Cost",
    "CostModel",
    "Hardware",
    "Measured",
    "OpCall",
    "Roofline",
    "bytes_moved",
    "cpu_peak_bytes",
    "flops_of",
    "named",
]
