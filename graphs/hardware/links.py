"""Links between devices that train together, and how long collectives take over them.

    all_reduce_s(n_bytes, n_ranks=8, link=named("nvlink4"))

Rates and latencies of links between GPUs are those that NCCL assumes when it chooses its algorithms
(`topo.h` and `tuning.cc` in `src/graph` of NVIDIA/nccl, in 2026; also in torch's
`_inductor/comm_analysis.py`). They are what NCCL expects a ring to reach, below the nominal rates.
The times are those of a ring under the "simple" protocol, as nccl-tests' `doc/PERFORMANCE.md`
counts them: each rank sends and receives (n - 1) / n of the bytes, twice for an all-reduce. Not
modelled: reductions inside switches (NVLink SHARP reaches 476 GB/s where a ring reaches 371;
NVIDIA/nccl-tests issue 290), the faster protocols for small messages, several nodes with several
links each, and communication that overlaps computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphs.hardware.devices import Hardware, name_key


def is_collective(op: str) -> bool:
    """Whether the operator of this name is a collective, which all ranks of tensor parallelism call
    together."""
    return op.startswith("_c10d_functional.")


@dataclass(frozen=True)
class Link:
    """What connects one device with the others.

    name: as users give it.
    title: as shown in reports.
    bytes_per_s: what one device sends (and receives) per second.
    call_s: what each collective takes besides, regardless of its size.
    step_s: what each message that a rank waits for takes besides.
    source: where the figures come from.

    Raises ValueError for a rate that is not above zero and for a latency below zero.
    """

    name: str
    title: str
    bytes_per_s: float
    call_s: float
    step_s: float
    source: str

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}; it must be above 0")
        for name in ("call_s", "step_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


_CALL_S = 8.4e-6
_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14.0e-6
_LATENCY_SOURCE = "; latencies: tuning.cc, ring, simple protocol"

# fmt: off
LINKS: Mapping[str, Link] = {link.name: link for link in (
    Link("nvlink2", "NVLink 2", 6 * 20.0e9, _CALL_S, _NVLINK_S,
         "NCCL topo.h, SM70: 20.0 GB/s for each of 6 links (V100)" + _LATENCY_SOURCE),
    Link("nvlink3", "NVLink 3", 12 * 20.0e9, _CALL_S, _NVLINK_S,
         "NCCL topo.h, SM80: 20.0 GB/s for each of 12 links (A100)" + _LATENCY_SOURCE),
    Link("nvlink4", "NVLink 4", 18 * 20.6e9, _CALL_S, _NVLINK_S,
         "NCCL topo.h, SM90: 20.6 GB/s for each of 18 links (H100, H200)" + _LATENCY_SOURCE),
    Link("nvlink5", "NVLink 5", 18 * 40.1e9, _CALL_S, _NVLINK_S,
         "NCCL topo.h, SM100: 40.1 GB/s for each of 18 links (B200)" + _LATENCY_SOURCE),
    Link("pcie3", "PCI Express 3, 16 lanes", 12.0e9, _CALL_S, _PCIE_S,
         "NCCL topo.h, PCI_BW" + _LATENCY_SOURCE),
    Link("pcie4", "PCI Express 4, 16 lanes", 24.0e9, _CALL_S, _PCIE_S,
         "NCCL topo.h, twice PCI_BW" + _LATENCY_SOURCE),
    Link("pcie5", "PCI Express 5, 16 lanes", 48.0e9, _CALL_S, _PCIE_S,
         "NCCL topo.h, four times PCI_BW" + _LATENCY_SOURCE),
    Link("ib-hdr", "InfiniBand HDR, 200 Gbit/s for each device", 24.0e9, _CALL_S, _NETWORK_S,
         "NCCL topo.h, twice NET_BW" + _LATENCY_SOURCE),
    Link("ib-ndr", "InfiniBand NDR, 400 Gbit/s for each device", 47.0e9, _CALL_S, _NETWORK_S,
         "46 to 48 GB/s for each adapter (NVIDIA/nccl-tests issue 290)" + _LATENCY_SOURCE),
    Link("gloo", "gloo on one machine", 1e9, 1e-4, 5e-5,
         "round figures of processes on one CPU; no one machine"),
)}
# fmt: on


def link_named(name: str) -> Link:
    """The link of that name; case, spaces, "-" and "_" do not matter ("NVLink 4", "IB NDR").

    Raises ValueError, listing the known names.
    """
    known = _BY_KEY.get(name_key(name))
    if known is None:
        raise ValueError(f"the link is {name!r}; one of {', '.join(LINKS)}")
    return known


_BY_KEY = {name_key(name): link for name, link in LINKS.items()}

_LINK_OF_DEVICE = {
    "cpu": "gloo",
    "t4": "pcie3",
    "v100-16gb": "nvlink2",
    "v100-32gb": "nvlink2",
    "a100-40gb": "nvlink3",
    "a100-80gb": "nvlink3",
    "h100": "nvlink4",
    "h100-pcie": "pcie5",
    "gh200": "nvlink4",
    "h200": "nvlink4",
    "b200": "nvlink5",
}


def link_between(hardware: Hardware) -> Link:
    """The link between several of these devices in one machine; PCI Express 4 if it is unknown."""
    return LINKS[_LINK_OF_DEVICE.get(hardware.name, "pcie4")]


def all_reduce_s(n_bytes: int, *, n_ranks: int, link: Link) -> float:
    """Seconds of an all-reduce: each of `n_ranks` gets the sum of tensors of `n_bytes`."""
    return _ring_s(n_bytes, n_rounds=2, n_ranks=n_ranks, link=link)


def all_gather_s(n_bytes: int, *, n_ranks: int, link: Link) -> float:
    """Seconds of an all-gather: each rank gets all parts of a tensor of `n_bytes` in total."""
    return _ring_s(n_bytes, n_rounds=1, n_ranks=n_ranks, link=link)


def reduce_scatter_s(n_bytes: int, *, n_ranks: int, link: Link) -> float:
    """Seconds of a reduce-scatter: each rank gets its part of the sum of tensors of `n_bytes`."""
    return _ring_s(n_bytes, n_rounds=1, n_ranks=n_ranks, link=link)


def _ring_s(n_bytes: int, *, n_rounds: int, n_ranks: int, link: Link) -> float:
    """Seconds of `n_rounds` rounds over a ring; in each, every rank passes on n - 1 of n equal
    parts of the tensor."""
    if n_ranks < 1:
        raise ValueError(f"n_ranks is {n_ranks}; expected at least 1")
    if n_ranks == 1:
        return 0.0
    n_messages = n_rounds * (n_ranks - 1)
    return link.call_s + n_messages * (link.step_s + n_bytes / n_ranks / link.bytes_per_s)
