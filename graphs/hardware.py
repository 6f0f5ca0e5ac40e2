"""Named devices: what each can compute and move in a second, and how much it holds.

The figures are the makers' dense peak rates (no sparsity); nobody reaches them, but a plan depends
on ratios between operators, and measured costs are one option away. float32 is the plain rate; that
of TF32 ("tfloat32"), which PyTorch uses by default in convolutions but not in matrix products, is a
figure of its own. Only matrix products, convolutions and attention are costed by these rates, so
they are those of tensor cores wherever the card has them for the dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_GIGA = 1e9
_TERA = 1e12

_PCIE_3, _PCIE_4, _PCIE_5 = 16, 32, 64
"""GB/s of a PCI Express link of 16 lanes, one way, of which about 0.9 can be had."""


@dataclass(frozen=True)
class Hardware:
    """One kind of device.

    name: by which it is asked for; title: for people. kind: torch's device type.
    flops_per_s: by dtype name ("float32", ...; "tfloat32" is float32 rounded in tensor cores); a
        dtype that is not listed runs at float32's rate.
    bytes_per_s: of the device's memory.
    capacity_bytes: of its memory, as sold (a driver may keep a percent of it back); None: unknown,
        so that a share of it is no budget.
    host_link_bytes_per_s: to the host, one way.
    source: where the figures are from.
    """

    name: str
    title: str
    kind: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    capacity_bytes: int | None
    host_link_bytes_per_s: float
    source: str

    def __post_init__(self) -> None:
        if "float32" not in self.flops_per_s:
            raise ValueError(f"flops_per_s of {self.name} has no float32, the rate of last resort")
        figures = {
            **{f"flops_per_s[{dtype!r}]": rate for dtype, rate in self.flops_per_s.items()},
            "bytes_per_s": self.bytes_per_s,
            "host_link_bytes_per_s": self.host_link_bytes_per_s,
        }
        if self.capacity_bytes is not None:
            figures["capacity_bytes"] = self.capacity_bytes
        for figure, value in figures.items():
            if not value > 0:
                raise ValueError(f"{figure} of {self.name} is {value}; it must be above 0")

    def rate(self, dtype: str) -> float:
        """FLOP/s for a dtype by its torch name without the prefix."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


def _cuda(
    name: str,
    title: str,
    *,
    fp64: float,
    fp32: float,
    tf32: float | None,
    fp16: float,
    bf16: float,
    bandwidth_gb: float,
    capacity_gb: int,
    link_gb: float,
    source: str,
) -> Hardware:
    """A CUDA card; rates in TFLOP/s (tf32=None: it has none), bandwidth and capacity in GB."""
    return Hardware(
        name=name,
        title=title,
        kind="cuda",
        flops_per_s={
            "float64": fp64 * _TERA,
            "float32": fp32 * _TERA,
            "tfloat32": (fp32 if tf32 is None else tf32) * _TERA,
            "float16": fp16 * _TERA,
            "bfloat16": bf16 * _TERA,
        },
        bytes_per_s=bandwidth_gb * _GIGA,
        capacity_bytes=capacity_gb * 10**9,
        host_link_bytes_per_s=link_gb * _GIGA,
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
        fp64=0.254,
        fp32=8.1,
        tf32=None,
        fp16=65,
        bf16=8.1,  # no bf16 units: done at the fp32 rate
        bandwidth_gb=320,
        capacity_gb=16,
        link_gb=_PCIE_3,
        source="NVIDIA T4 datasheet (2019), fp64 1/32 of fp32; bandwidth: 256 bits at 10 Gbit/s",
    ),
    _cuda(
        "rtx3090",
        "NVIDIA GeForce RTX 3090 24 GB",
        fp64=0.556,
        fp32=35.6,
        tf32=35.6,
        fp16=71,
        bf16=71,
        bandwidth_gb=936,
        capacity_gb=24,
        link_gb=_PCIE_4,
        source="NVIDIA Ampere GA102 whitepaper (2021), appendix A; fp16 accumulated in fp32, "
        "fp64 1/64 of fp32",
    ),
    _cuda(
        "rtx4090",
        "NVIDIA GeForce RTX 4090 24 GB",
        fp64=1.29,
        fp32=82.6,
        tf32=82.6,
        fp16=165.2,
        bf16=165.2,
        bandwidth_gb=1008,
        capacity_gb=24,
        link_gb=_PCIE_4,
        source="NVIDIA Ada GPU architecture whitepaper (2022), appendix A; fp16 accumulated in "
        "fp32, fp64 1/64 of fp32",
    ),
    _cuda(
        "a100-40gb",
        "NVIDIA A100 40 GB",
        fp64=19.5,
        fp32=19.5,
        tf32=156,
        fp16=312,
        bf16=312,
        bandwidth_gb=1555,
        capacity_gb=40,
        link_gb=_PCIE_4,
        source="NVIDIA A100 datasheet (2020); fp64 by its tensor cores",
    ),
    _cuda(
        "a100-80gb",
        "NVIDIA A100 80 GB SXM",
        fp64=19.5,
        fp32=19.5,
        tf32=156,
        fp16=312,
        bf16=312,
        bandwidth_gb=2039,
        capacity_gb=80,
        link_gb=_PCIE_4,
        source="NVIDIA A100 datasheet (2021), SXM column; fp64 by its tensor cores",
    ),
    _cuda(
        "h100",
        "NVIDIA H100 80 GB SXM",
        fp64=67,
        fp32=67,
        tf32=494.5,
        fp16=989.5,
        bf16=989.5,
        bandwidth_gb=3350,
        capacity_gb=80,
        link_gb=_PCIE_5,
        source="NVIDIA H100 datasheet (2023), SXM column, halved where it states sparsity; "
        "fp64 by its tensor cores",
    ),
    _cuda(
        "h100-pcie",
        "NVIDIA H100 80 GB PCIe",
        fp64=51,
        fp32=51,
        tf32=378,
        fp16=756.5,
        bf16=756.5,
        bandwidth_gb=2000,
        capacity_gb=80,
        link_gb=_PCIE_5,
        source="NVIDIA H100 datasheet (2022), PCIe column, halved where it states sparsity; "
        "fp64 by its tensor cores",
    ),
    _cuda(
        "h200",
        "NVIDIA H200 141 GB SXM",
        fp64=67,
        fp32=67,
        tf32=494.5,
        fp16=989.5,
        bf16=989.5,
        bandwidth_gb=4800,
        capacity_gb=141,
        link_gb=_PCIE_5,
        source="NVIDIA H200 datasheet (2024), SXM column, halved where it states sparsity; "
        "fp64 by its tensor cores",
    ),
    _cuda(
        "b200",
        "NVIDIA B200 180 GB SXM",
        fp64=37,
        fp32=75,
        tf32=1100,
        fp16=2250,
        bf16=2250,
        bandwidth_gb=7700,
        capacity_gb=180,
        link_gb=_PCIE_5,
        source="NVIDIA Blackwell datasheet (2025), one GPU of HGX B200, halved where it states "
        "sparsity; fp64 by its tensor cores",
    ),
)
_ALIASES = {"a100": "a100-80gb", "h100-sxm": "h100"}
DEVICES: Mapping[str, Hardware] = {device.name: device for device in _DEVICES}


def named(name: str) -> Hardware:
    """The device of that name, however it is spaced and capitalised ("RTX 4090", "A100_80GB").

    Raises ValueError with the names that there are.
    """
    known = _BY_KEY.get(_key(name))
    if known is None:
        raise ValueError(f"device is {name!r}; one of {', '.join([*DEVICES, *_ALIASES])}")
    return known


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())


_BY_KEY = {
    **{_key(name): device for name, device in DEVICES.items()},
    **{_key(alias): DEVICES[name] for alias, name in _ALIASES.items()},
}


def card_called(torch_name: str, *, capacity_bytes: int) -> Hardware | None:
    """The named device that a CUDA card is, by what its driver calls it; None: it is none of them.

    "NVIDIA A100-SXM4-40GB" is a100-40gb, "NVIDIA H100 PCIe" is h100-pcie: the model must be one
    word of the name, and of several variants the one with most words in common is taken, then the
    one that is nearest in capacity.
    """
    words = set(re.split(r"[^a-z0-9]+", torch_name.lower().replace("rtx ", "rtx")))
    candidates = [
        (len(words.intersection(name.split("-"))), hardware)
        for name, hardware in DEVICES.items()
        if hardware.kind == "cuda" and name.split("-")[0] in words
    ]
    if not candidates:
        return None
    return min(
        candidates,
        key=lambda item: (-item[0], abs((item[1].capacity_bytes or 0) - capacity_bytes)),
    )[1]


def is_cuda(costs: Mapping[str, object]) -> bool:
    """Whether what is planned for is a CUDA card, by a cost model's description."""
    planned_for = DEVICES.get(str(costs.get("device")))
    return planned_for is not None and planned_for.kind == "cuda"
