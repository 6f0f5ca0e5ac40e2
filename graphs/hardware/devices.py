"""Known devices: peak compute rates, memory bandwidth and capacity, and the link to their host.

Rates are the vendors' dense peaks (no sparsity). No kernel reaches them, but a plan depends only on
ratios between operators, and costs can be measured instead. "float32" is the rate without TF32;
"tfloat32" is the TF32 rate, which PyTorch uses by default in convolutions but not in matrix
products. Only matrix products, convolutions and attention are costed by these rates, so they are
tensor-core rates wherever the card has them for the dtype.

Rates of links to the host are published measurements, for one direction at a time and pinned
memory; PCI Express reaches 0.8 to 0.9 of its nominal rate. The amount of host memory depends on the
machine, not on the card, so it is given only for a superchip (GH200), which includes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_DTYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16")
_GEFORCE_NOTE = ", appendix A; fp16 accumulated in fp32, fp64 1/64 of fp32"
_DENSE_NOTE = ", halved where it states sparsity; fp64 by its tensor cores"


@dataclass(frozen=True)
class HostCopies:
    """Rates of copies from a device to its host's memory (out) and back to the device (in).

    out_bytes_per_s, in_bytes_per_s: rates of large copies.
    latency_s: what each copy takes besides, regardless of its size.
    source: where the figures come from.
    capacity_bytes: size of the host memory if it is part of the device (None: it depends on the
        machine).

    Raises ValueError for a rate that is not above zero and for a latency below zero.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float
    source: str
    capacity_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_s", "in_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not self.latency_s >= 0:
            raise ValueError(f"latency_s is {self.latency_s}; it must be 0 or more")


_CALL_S = 6e-6
_LATENCY_SOURCE = (
    "; latency: 5 to 7 microseconds for each cudaMemcpyAsync (Wu et al. 2026, arXiv 2602.21548, "
    "section 5.2)"
)
_PCIE_3 = HostCopies(
    13.2e9, 12.4e9, _CALL_S, "nvbandwidth's copies over 16 lanes of PCI Express 3" + _LATENCY_SOURCE
)
_PCIE_4 = HostCopies(
    25.2e9,
    25.2e9,
    _CALL_S,
    "nvbandwidth 0.5 on an A10 over 16 lanes of PCI Express 4, towards the device; away from it "
    "taken to be the same" + _LATENCY_SOURCE,
)
_PCIE_5 = HostCopies(
    55.2e9,
    55.4e9,
    _CALL_S,
    "nvbandwidth 0.10 on eight cards over 16 lanes of PCI Express 5; NVIDIA's article on the tool "
    "has 55.6 towards the device" + _LATENCY_SOURCE,
)
_C2C = HostCopies(
    295.2e9,
    337.6e9,
    _CALL_S,
    "nvbandwidth 0.6 on a GH200 480GB, from the tests of Microsoft's superbenchmark (nominal: 450 "
    "each way; both at once are slower)" + _LATENCY_SOURCE,
    capacity_bytes=480 * 10**9,
)


@dataclass(frozen=True)
class Hardware:
    """One kind of device.

    name: as given to --device.
    title: as shown in reports.
    kind: torch's device type.
    flops_per_s: FLOP/s by dtype name ("float32", ...; "tfloat32" is float32 rounded in tensor
        cores); a dtype that is not listed runs at float32's rate.
    bytes_per_s: memory bandwidth.
    capacity_bytes: memory as sold (the driver may keep back a percent of it); None: unknown, and a
        budget cannot be given as a share of it.
    host_copies: rates of copies to the host's memory and back.
    source: where the figures come from.
    compute_capability: of a CUDA card, (major, minor); None: not a card, or unknown.

    Raises ValueError if float32 has no rate, or a rate or the capacity is not above zero.
    """

    name: str
    title: str
    kind: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    capacity_bytes: int | None
    host_copies: HostCopies
    source: str
    compute_capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if "float32" not in self.flops_per_s:
            raise ValueError(f"flops_per_s of {self.name} has no float32, the default rate")
        figures = {
            **{f"flops_per_s[{dtype!r}]": rate for dtype, rate in self.flops_per_s.items()},
            "bytes_per_s": self.bytes_per_s,
        }
        if self.capacity_bytes is not None:
            figures["capacity_bytes"] = self.capacity_bytes
        for figure, value in figures.items():
            if not value > 0:
                raise ValueError(f"{figure} of {self.name} is {value}; it must be above 0")

    def rate(self, dtype: str) -> float:
        """FLOP/s for a dtype, given its torch name without the prefix ("bfloat16")."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


# fmt: off
_CARDS: tuple[
    tuple[str, str, tuple[int, int], tuple[float, ...], float, int, HostCopies, str], ...
] = (
    # name, title, compute capability, TFLOP/s of the dtypes in _DTYPES, memory GB/s, memory GB,
    # link, source
    # T4 and V100 have no tf32 and no bf16: these run at float32's rate
    ("t4", "NVIDIA T4 16 GB", (7, 5), (0.254, 8.1, 8.1, 65, 8.1), 320, 16, _PCIE_3,
     "NVIDIA T4 datasheet (2019), fp64 1/32 of fp32; bandwidth: 256 bits at 10 Gbit/s"),
    ("v100-16gb", "NVIDIA V100 16 GB SXM2", (7, 0), (7.8, 15.7, 15.7, 125, 15.7), 900, 16, _PCIE_3,
     "NVIDIA V100 datasheet (2020), SXM2 column; no tf32, no bf16"),
    ("v100-32gb", "NVIDIA V100 32 GB SXM2", (7, 0), (7.8, 15.7, 15.7, 125, 15.7), 900, 32, _PCIE_3,
     "NVIDIA V100 datasheet (2020), SXM2 column; no tf32, no bf16"),
    ("a10", "NVIDIA A10 24 GB", (8, 6), (0.488, 31.2, 62.5, 125, 125), 600, 24, _PCIE_4,
     "NVIDIA A10 datasheet (2021), halved where it states sparsity; fp64 1/64 of fp32"),
    ("rtxa6000", "NVIDIA RTX A6000 48 GB", (8, 6), (0.605, 38.7, 77.4, 154.8, 154.8), 768, 48,
     _PCIE_4,
     "NVIDIA RTX A6000 datasheet (2021), halved where it states sparsity; fp64 1/64 of fp32"),
    ("l4", "NVIDIA L4 24 GB", (8, 9), (0.473, 30.3, 60, 121, 121), 300, 24, _PCIE_4,
     "NVIDIA L4 datasheet (2023), halved where it states sparsity; fp64 1/64 of fp32"),
    ("l40s", "NVIDIA L40S 48 GB", (8, 9), (1.43, 91.6, 183, 362, 362), 864, 48, _PCIE_4,
     "NVIDIA L40S datasheet (2023), halved where it states sparsity; fp64 1/64 of fp32"),
    ("rtx3090", "NVIDIA GeForce RTX 3090 24 GB", (8, 6), (0.556, 35.6, 35.6, 71, 71), 936, 24,
     _PCIE_4, "NVIDIA Ampere GA102 whitepaper (2021)" + _GEFORCE_NOTE),
    ("rtx4090", "NVIDIA GeForce RTX 4090 24 GB", (8, 9), (1.29, 82.6, 82.6, 165.2, 165.2), 1008, 24,
     _PCIE_4, "NVIDIA Ada GPU architecture whitepaper (2022)" + _GEFORCE_NOTE),
    ("a100-40gb", "NVIDIA A100 40 GB", (8, 0), (19.5, 19.5, 156, 312, 312), 1555, 40, _PCIE_4,
     "NVIDIA A100 datasheet (2020); fp64 by its tensor cores"),
    ("a100-80gb", "NVIDIA A100 80 GB SXM", (8, 0), (19.5, 19.5, 156, 312, 312), 2039, 80, _PCIE_4,
     "NVIDIA A100 datasheet (2021), SXM column; fp64 by its tensor cores"),
    ("h100", "NVIDIA H100 80 GB SXM", (9, 0), (67, 67, 494.5, 989.5, 989.5), 3350, 80, _PCIE_5,
     "NVIDIA H100 datasheet (2023), SXM column" + _DENSE_NOTE),
    ("h100-pcie", "NVIDIA H100 80 GB PCIe", (9, 0), (51, 51, 378, 756.5, 756.5), 2000, 80, _PCIE_5,
     "NVIDIA H100 datasheet (2022), PCIe column" + _DENSE_NOTE),
    ("gh200", "NVIDIA GH200 96 GB", (9, 0), (67, 67, 494.5, 989.5, 989.5), 4000, 96, _C2C,
     "NVIDIA GH200 Grace Hopper datasheet (2023), HBM3" + _DENSE_NOTE),
    ("h200", "NVIDIA H200 141 GB SXM", (9, 0), (67, 67, 494.5, 989.5, 989.5), 4800, 141, _PCIE_5,
     "NVIDIA H200 datasheet (2024), SXM column" + _DENSE_NOTE),
    ("b200", "NVIDIA B200 180 GB SXM", (10, 0), (37, 75, 1100, 2250, 2250), 7700, 180, _PCIE_5,
     "NVIDIA Blackwell datasheet (2025), one GPU of HGX B200" + _DENSE_NOTE),
)
# fmt: on

_DEVICES = (
    Hardware(
        name="cpu",
        title="generic CPU",
        kind="cpu",
        flops_per_s={"float32": 1e11, "float64": 5e10, "bfloat16": 1e11, "float16": 1e11},
        bytes_per_s=2e10,
        capacity_bytes=None,
        host_copies=HostCopies(1e10, 1e10, 0.0, "half of the memory bandwidth: read and written"),
        source="round figures of a few cores with AVX2 and two channels of DDR4; no one machine",
    ),
    *(
        Hardware(
            name=name,
            title=title,
            kind="cuda",
            flops_per_s={d: 1e12 * rate for d, rate in zip(_DTYPES, tera_rates, strict=True)},
            bytes_per_s=1e9 * memory_gb_per_s,
            capacity_bytes=10**9 * gb,
            host_copies=link,
            source=source,
            compute_capability=capability,
        )
        for name, title, capability, tera_rates, memory_gb_per_s, gb, link, source in _CARDS
    ),
)
_ALIASES = {
    "a100": "a100-80gb",
    "a6000": "rtxa6000",
    "h100-sxm": "h100",
    "v100": "v100-16gb",
}
DEVICES: Mapping[str, Hardware] = {device.name: device for device in _DEVICES}


def named(name: str) -> Hardware:
    """The device of that name; case, spaces, "-" and "_" do not matter ("RTX 4090", "A100_80GB").

    Raises ValueError, listing the known names.
    """
    known = _BY_KEY.get(name_key(name))
    if known is None:
        raise ValueError(f"device is {name!r}; one of {', '.join([*DEVICES, *_ALIASES])}")
    return known


def name_key(name: str) -> str:
    """The key by which a name is looked up: lower case, without spaces, "-" and "_"."""
    return re.sub(r"[\s_-]", "", name.lower())


_BY_KEY = {
    **{name_key(name): device for name, device in DEVICES.items()},
    **{name_key(alias): DEVICES[name] for alias, name in _ALIASES.items()},
}


def card_called(torch_name: str, *, capacity_bytes: int) -> Hardware | None:
    """The known device for a CUDA card, from the driver's name for it; None: an unknown card.

    "NVIDIA A100-SXM4-40GB" is a100-40gb, "NVIDIA H100 PCIe" is h100-pcie: the model must be one
    word of the driver's name. Among variants, the one with the most words in common wins, then the
    one nearest in capacity.

    torch_name: the name as torch gives it (`get_device_properties(...).name`).
    capacity_bytes: the card's memory.
    """
    words = set(re.split(r"[^a-z0-9]+", torch_name.lower().replace("rtx ", "rtx")))
    candidates = [
        (len(words.intersection(name.split("-"))), hardware)
        for name, hardware in DEVICES.items()
        if hardware.kind == "cuda" and name.split("-")[0] in words
    ]
    if not candidates:
        return None

    def distance(candidate: tuple[int, Hardware]) -> tuple[int, int]:
        n_common, hardware = candidate
        return -n_common, abs((hardware.capacity_bytes or 0) - capacity_bytes)

    return min(candidates, key=distance)[1]


def is_cuda(costs: Mapping[str, object]) -> bool:
    """Whether a cost model's description is for a CUDA card."""
    device = DEVICES.get(str(costs.get("device")))
    return device is not None and device.kind == "cuda"
