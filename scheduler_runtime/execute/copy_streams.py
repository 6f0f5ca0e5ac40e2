"""Copies between device and host: asynchronous on CUDA, immediate on the CPU.

On CUDA each direction has its own stream. Events order everything: a copy waits until the compute
stream has reached the copy's place in the program, and an operator that reads the result, or uses
the memory again, waits for the copy. Memory is allocated on the compute stream only, and freed
there after such a wait, so the allocator need not know about the other streams (`record_stream`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class CopyEvent(Protocol):
    """The end of a copy."""

    def hold_compute(self) -> None:
        """Make the computation that is launched from now on wait for the copy."""

    def hold_host(self) -> None:
        """Make the calling thread wait for the copy. Raises the copy's error, if it has failed."""


class CopyStreams(Protocol):
    """Starts copies. Those of one direction run in order, each after all computation so far."""

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[CopyEvent]
    ) -> CopyEvent:
        """Copy to the host, once the copies in `after` have ended."""
        ...

    def to_device(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[CopyEvent]
    ) -> CopyEvent:
        """Copy to the device, once the copies in `after` have ended."""
        ...

    def begin(self) -> None:
        """Begin a step, which computes on the current stream."""

    def settle(self) -> None:
        """Make the computation from now on wait for all copies.

        That holds for the stream of the step, where its memory is freed, and for the current
        stream: an abandoned step may be settled while another stream is current.
        """


class CompletedEvent:
    """The end of a copy that is complete already."""

    def hold_compute(self) -> None:
        pass

    def hold_host(self) -> None:
        pass


class ImmediateCopies:
    """Copies on the CPU, where device and host memory are the same: each is made at once."""

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[CopyEvent]
    ) -> CopyEvent:
        for done in after:
            done.hold_host()
        target.copy_(source)
        return CompletedEvent()

    to_device = to_host

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass


class CudaCopyEvent:
    """The end of a copy on a CUDA stream, as an event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)
        self._device = stream.device

    def hold_compute(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def hold_host(self) -> None:
        self.event.synchronize()


class CudaCopyStreams:
    """Copies on a CUDA device, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)
        self.begin()

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[CopyEvent]
    ) -> CopyEvent:
        return self._copy(self._to_host, target, source, after)

    def to_device(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[CopyEvent]
    ) -> CopyEvent:
        return self._copy(self._to_device, target, source, after)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Iterable[CopyEvent],
    ) -> CopyEvent:
        for done in after:
            if isinstance(done, CudaCopyEvent):
                stream.wait_event(done.event)
            else:  # a read or write of the disk
                done.hold_host()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return CudaCopyEvent(stream)

    def begin(self) -> None:
        self._compute = torch.cuda.current_stream(self._device)

    def settle(self) -> None:
        for compute in (self._compute, torch.cuda.current_stream(self._device)):
            compute.wait_stream(self._to_host)
            compute.wait_stream(self._to_device)
        # the next step may compute on yet another stream
        self._to_host.wait_stream(self._to_device)
        self._to_device.wait_stream(self._to_host)


def streams_for(device: torch.device) -> CopyStreams:
    return CudaCopyStreams(device) if device.type == "cuda" else ImmediateCopies()


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """Uninitialised host memory for a copy of this tensor; pinned if the tensor is on CUDA."""
    return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, as a tensor that shares it."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
