"""Named devices: what each can compute and move in a second, and how much it holds.

The figures are the makers' dense peak rates (no sparsity); nobody reaches them, but a plan depends
on ratios between operators, and measured costs are one option away. fp32 is the plain fp32 rate:
PyTorch does not use TF32 for matrix products unless it is told to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GB = 10**9
_TERA = 1e12


@dataclass(frozen=True)
class Hardware:
    """One kind of device.

    flops_per_s: by dtype name ("float32", ...); a dtype that is not listed runs at float32's rate.
    bytes_per_s: of the device's memory. capacity_bytes: of its memory, as sold (None: unknown, so
    that a share of it is no budget). host_link_bytes_per_s: to the host, one way. kind: torch's
    device type. source: where the figures are from.
    """

    name: str
    title: str
    kind: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    capacity_bytes: int | None
    host_link_bytes_per_s: float
    source: str

    def rate(self, dtype: str) -> float:
        """FLOP/s for a dtype by its torch name without the prefix."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


def _cuda(
    name: str,
    title: str,
    *,
    fp32: float,
    half: float,
    bandwidth_gb: float,
    capacity_gb: int,
    link_gb: float,
    source: str,
    bf16: float | None = None,
) -> Hardware:
    """A CUDA card; rates in TFLOP/s, bandwidth and capacity in GB."""
    return Hardware(
        name=name,
        title=title,
        kind="cuda",
        flops_per_s={
            "float32": fp32 * _TERA,
            "float16": half * _TERA,
            "bfloat16": (half if bf16 is None else bf16) * _TERA,
        },
        bytes_per_s=bandwidth_gb * 1e9,
        capacity_bytes=capacity_gb * _GB,
        host_link_bytes_per_s=link_gb * 1e9,
        source=source,
    )


_DEVICES = (
    Hardware(
        name="cpu",
        title="generic CPU",
        kind="cpu",
        flops_per_s={"float32": 1e11, "float64": 5e10, "bfloat16": 1e11, "float16": 1e11},
        bytes_per_s=2e10,
        capacity_bytes=None,
        host_link_bytes_per_s=2e10,
        source="round figures of a few cores with AVX2 and two channels of DDR4; no one machine",
    ),
    _cuda(
        "t4",
        "NVIDIA T4 16 GB",
        fp32=8.1,
        half=65,
        bf16=8.1,  # no bf16 units: emulated at the fp32 rate
        bandwidth_gb=300,
        capacity_gb=16,
        link_gb=16,
        source="NVIDIA T4 datasheet (2019)",
    ),
    _cuda(
        "rtx3090",
        "NVIDIA GeForce RTX 3090 24 GB",
        fp32=35.6,
        half=71,
        bandwidth_gb=936,
        capacity_gb=24,
        link_gb=32,
        source="NVIDIA Ampere GA102 whitepaper, appendix A (fp16 with fp32 accumulation)",
    ),
    _cuda(
        "rtx4090",
        "NVIDIA GeForce RTX 4090 24 GB",
        fp32=82.6,
        half=165.2,
        bandwidth_gb=1008,
        capacity_gb=24,
        link_gb=32,
        source="NVIDIA Ada GPU architecture whitepaper, appendix A (fp16 with fp32 accumulation)",
    ),
    _cuda(
        "a100-40gb",
        "NVIDIA A100 40 GB",
        fp32=19.5,
        half=312,
        bandwidth_gb=1555,
        capacity_gb=40,
        link_gb=32,
        source="NVIDIA A100 datasheet (2020)",
    ),
    _cuda(
        "a100-80gb",
        "NVIDIA A100 80 GB SXM",
        fp32=19.5,
        half=312,
        bandwidth_gb=2039,
        capacity_gb=80,
        link_gb=32,
        source="NVIDIA A100 80GB datasheet (2021)",
    ),
    _cuda(
        "h100",
        "NVIDIA H100 80 GB SXM",
        fp32=67,
        half=989.4,
        bandwidth_gb=3350,
        capacity_gb=80,
        link_gb=64,
        source="NVIDIA H100 datasheet (2023), SXM column, halved where it states sparsity",
    ),
    _cuda(
        "h100-pcie",
        "NVIDIA H100 80 GB PCIe",
        fp32=51,
        half=756,
        bandwidth_gb=2000,
        capacity_gb=80,
        link_gb=64,
        source="NVIDIA H100 datasheet (2022), PCIe column, halved where it states sparsity",
    ),
    _cuda(
        "h200",
        "NVIDIA H200 141 GB SXM",
        fp32=67,
        half=989.4,
        bandwidth_gb=4800,
        capacity_gb=141,
        link_gb=64,
        source="NVIDIA H200 datasheet (2024), SXM column, halved where it states sparsity",
    ),
    _cuda(
        "b200",
        "NVIDIA B200 180 GB SXM",
        fp32=75,
        half=2250,
        bandwidth_gb=7700,
        capacity_gb=180,
        link_gb=64,
        source="NVIDIA HGX B200 datasheet (2025), an eighth of the board, dense",
    ),
)
_ALIASES = {"a100": "a100-80gb", "h100-sxm": "h100"}
DEVICES: Mapping[str, Hardware] = {device.name: device for device in _DEVICES}


def named(name: str) -> Hardware:
    """The device of that name; raises ValueError with the names that there are."""
    known = DEVICES.get(_ALIASES.get(name.lower(), name.lower()))
    if known is None:
        raise ValueError(f"device is {name!r}; one of {', '.join([*DEVICES, *_ALIASES])}")
    return known
