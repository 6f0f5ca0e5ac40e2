"""Costs of operators, named devices and links (from `graphs.costs` and `graphs.hardware`)."""

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
from graphs.hardware import Hardware, Link, link_named, named

__all__ = [
    "Cost",
    "CostModel",
    "Hardware",
    "Link",
    "Measured",
    "OpCall",
    "Roofline",
    "bytes_moved",
    "cpu_peak_bytes",
    "flops_of",
    "link_named",
    "named",
]
