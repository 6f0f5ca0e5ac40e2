"""Copies between device and host: on CUDA beside the computation, on the CPU at once.

On CUDA each direction has a stream of its own. Everything is ordered by events: a copy waits for
the compute stream to have come to its place in the program, and whoever reads what was copied, or
uses the memory again, waits for the copy. Memory is allocated on the compute stream only and given
back there after such a wait, so the allocator need not know the other streams (`record_stream`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class Done(Protocol):
    """The end of a copy."""

    def hold_compute(self) -> None:
        """What is computed from now on waits for it."""

    def hold_host(self) -> None:
        """The calling thread waits for it. Raises what went wrong."""


class CopyStreams(Protocol):
    """Copies, each in the order of its direction and after all that was computed so far."""

    def out(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Done]) -> Done: ...

    def back(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Done]) -> Done: ...

    def begin(self) -> None:
        """A step begins, on the stream that is current now."""

    def settle(self) -> None:
        """What is computed from now on waits for all copies: of the step's stream, where its
        memory goes back, and of the stream that is current now, as an abandoned step may be
        settled under another one.
        """


class Ended:
    """A copy that has been made."""

    def hold_compute(self) -> None:
        pass

    def hold_host(self) -> None:
        pass


class AtOnce:
    """On the CPU, whose memory and the host's are the same: copies in the order of the program."""

    def out(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Done]) -> Done:
        for done in after:
            done.hold_host()
        target.copy_(source)
        return Ended()

    back = out

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass


class CudaEnded:
    """An event after a copy on a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)
        self._device = stream.device

    def hold_compute(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def hold_host(self) -> None:
        self.event.synchronize()


class OnCuda:
    """A stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)
        self.begin()

    def out(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Done]) -> Done:
        return self._copy(self._out, target, source, after)

    def back(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Done]) -> Done:
        return self._copy(self._back, target, source, after)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Iterable[Done],
    ) -> Done:
        for done in after:
            if isinstance(done, CudaEnded):
                stream.wait_event(done.event)
            else:  # from or to the disk
                done.hold_host()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return CudaEnded(stream)

    def begin(self) -> None:
        self._compute = torch.cuda.current_stream(self._device)

    def settle(self) -> None:
        for compute in (self._compute, torch.cuda.current_stream(self._device)):
            compute.wait_stream(self._out)
            compute.wait_stream(self._back)
        # the next step may compute on yet another stream
        self._out.wait_stream(self._back)
        self._back.wait_stream(self._out)


def streams_for(device: torch.device) -> CopyStreams:
    return OnCuda(device) if device.type == "cuda" else AtOnce()


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """For a copy of this tensor; pinned where it is on CUDA."""
    return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of its storage, as a tensor on it."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
