"""The copies of one step to the host and the disk: where each storage is, and what waits for what.

The generated program calls a method of `Copies` for each copy in its schedule. Copies wait for each
other by the rules of `solver.schedule.streams`, which models these events as times.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from scheduler_runtime.execute.copy_streams import (
    CopyEvent,
    CopyStreams,
    host_memory,
    storage_bytes,
    streams_for,
)
from scheduler_runtime.execute.spill_file import CopyError, Job, SpillFile
from solver.schedule import CopyLayout
from solver.sizes_deadlines_progress import format_both


class Pools:
    """Host memory and files for the copies of all programs of a module.

    One block of memory and one file are reused by step after step, for all programs. While a step
    waits for its backward pass, another forward pass gets its own block and file.

    directory: where files are made (None: plans that need one are refused).
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._free: list[Pool] = []

    def open(self, layout: CopyLayout, device: torch.device) -> Copies:
        """Begin the copies of one step, before its forward pass. Raises CopyError without room."""
        pool = self._take_pool(layout, device)
        pool.streams.begin()
        return Copies(pool, self._free)

    def _take_pool(self, layout: CopyLayout, device: torch.device) -> Pool:
        """A free pool that is large enough; if there is none, a new one replaces one too small."""
        for index in reversed(range(len(self._free))):
            if self._free[index].serves(layout, device):
                return self._free.pop(index)
        host_bytes, disk_bytes = layout.host_bytes, layout.disk_bytes
        if self._free:
            small = self._free.pop()
            if small.device == device:
                host_bytes = max(host_bytes, small.host.numel())
                disk_bytes = max(disk_bytes, 0 if small.file is None else small.file.size_bytes)
            del small  # free its memory before allocating more
            if device.type == "cuda":
                torch.accelerator.empty_host_cache()
        return Pool.of(host_bytes, disk_bytes, device, self.directory)


@dataclass(frozen=True)
class Pool:
    """Host memory and a file for the copies of one step at a time.

    host: a block of bytes, pinned for a CUDA device.
    file: for copies to the disk (None: there are none).
    """

    device: torch.device
    host: torch.Tensor
    file: SpillFile | None
    streams: CopyStreams

    @classmethod
    def of(
        cls, host_bytes: int, disk_bytes: int, device: torch.device, directory: Path | None
    ) -> Pool:
        pinned = device.type == "cuda"
        try:
            host = torch.empty(host_bytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise CopyError(
                f"the step needs {format_both(host_bytes)} of {'pinned ' * pinned}host "
                f"memory for copies of tensors, and the system refuses them: {error}"
            ) from error
        file = None
        if disk_bytes:
            assert directory is not None
            file = SpillFile(directory, disk_bytes)
        return cls(device, host, file, streams_for(device))

    def serves(self, layout: CopyLayout, device: torch.device) -> bool:
        file_bytes = 0 if self.file is None else self.file.size_bytes
        is_enough = layout.host_bytes <= self.host.numel() and layout.disk_bytes <= file_bytes
        return is_enough and self.device == device


@dataclass
class StoredCopy:
    """The copy of a storage on the host or the disk.

    start, stop: its bytes in the block or the file.
    ready: the end of the copy to there; then the copy is complete.
    transfers: all copies from and to these bytes.
    outside_pool: host memory outside of the pool, for a storage that is larger than planned and has
        no room in the pool (a kernel may return more memory than its meta function says).
    """

    start: int
    stop: int
    ready: CopyEvent
    transfers: list[CopyEvent]
    outside_pool: torch.Tensor | None = None


@dataclass(frozen=True)
class TensorSpec:
    """The dtype, device and layout of a tensor, without its memory."""

    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        offset, strides = int(tensor.storage_offset()), tensor.stride()
        return cls(tensor.dtype, tensor.device, offset, tensor.shape, strides)

    def tensor_on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this form on a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)


class Copies:
    """The copies of one step. Each storage is named by its root tensor in the graph.

    pool: holds the copies.
    free: the list of free pools, to which the pool is returned by `close`.
    """

    def __init__(self, pool: Pool, free: list[Pool]) -> None:
        self._pool: Pool | None = pool
        self._free = free
        self._specs: dict[str, tuple[TensorSpec, ...]] = {}
        self._on_host: dict[str, StoredCopy] = {}
        self._on_disk: dict[str, StoredCopy] = {}
        self._dropped_copies: dict[str, list[StoredCopy]] = {"host": [], "disk": []}
        self._arriving: dict[str, CopyEvent] = {}
        self._on_device: dict[str, list[CopyEvent]] = {}  # copies from and to the storage there
        self._first_writes: list[CopyEvent] | None = []  # to the disk (None: they have ended)

    def store(self, storage: str, start: int, stop: int, *tensors: torch.Tensor) -> None:
        """Copy a storage to the host. start, stop: bytes of the pool's block.

        tensors: the tensors on the storage that `fetch` will bring back.
        """
        source, outside_pool = storage_bytes(tensors[0]), None
        if source.numel() <= stop - start:
            stop = start + source.numel()
        else:
            start, stop, outside_pool = 0, 0, host_memory(source)
        target = self._host_block(start, stop, outside_pool)
        after = self._transfers_using("host", start, stop)
        if storage in self._arriving:
            after.append(self._arriving[storage])
        done = self._streams.to_host(target, source, after)
        self._specs[storage] = tuple(map(TensorSpec.of, tensors))
        self._on_host[storage] = StoredCopy(start, stop, done, [done], outside_pool)
        self._on_device.setdefault(storage, []).append(done)

    def fetch(self, storage: str) -> list[torch.Tensor]:
        """Copy a storage back. Returns the tensors of `store` in new device memory, which may be
        read after `arrive`."""
        copy, specs = self._on_host[storage], self._specs[storage]
        source = self._host_block(copy.start, copy.stop, copy.outside_pool)
        target = torch.empty_like(source, device=specs[0].device, pin_memory=False)
        done = self._streams.to_device(target, source, [copy.ready])
        copy.transfers.append(done)
        self._arriving[storage] = done
        self._on_device.setdefault(storage, []).append(done)
        return [spec.tensor_on(target.untyped_storage()) for spec in specs]

    def arrive(self, storage: str) -> None:
        """Make computation from now on wait until the storage is back on the device."""
        self._arriving[storage].hold_compute()

    def leave(self, storage: str, *tensors: torch.Tensor) -> None:
        """Make computation from now on wait until the storage's device memory can be used again.

        tensors: on the storage; as arguments they keep its memory until this call.
        """
        del tensors
        self._arriving.pop(storage, None)
        for done in self._on_device.pop(storage, ()):
            done.hold_compute()

    def drop(self, storage: str) -> None:
        """Give up the copy on the host."""
        self._dropped_copies["host"].append(self._on_host.pop(storage))

    def spill(self, storage: str, start: int) -> None:
        """Copy a storage from the host to the disk, to the file's bytes from `start`."""
        copy = self._on_host[storage]
        if copy.outside_pool is not None:
            self._on_disk[storage] = copy
            return
        stop = start + copy.stop - copy.start
        after = [copy.ready, *self._transfers_using("disk", start, stop)]
        done = self._file.write(self._host_block(copy.start, copy.stop), start, after)
        copy.transfers.append(done)
        if self._first_writes is not None:
            self._first_writes.append(done)
        self._on_disk[storage] = StoredCopy(start, stop, done, [done])

    def load(self, storage: str, start: int) -> None:
        """Copy a storage from the disk to the host, to the block's bytes from `start`."""
        copy = self._on_disk[storage]
        if copy.outside_pool is not None:
            self._on_host[storage] = copy
            return
        stop = start + copy.stop - copy.start
        after = [copy.ready, *self._transfers_using("host", start, stop)]
        done = self._file.read(self._host_block(start, stop), copy.start, after)
        copy.transfers.append(done)
        self._on_host[storage] = StoredCopy(start, stop, done, [done])

    def delete(self, storage: str) -> None:
        """Give up the copy on the disk."""
        self._dropped_copies["disk"].append(self._on_disk.pop(storage))

    def finish_first_writes(self) -> None:
        """At the first call, wait for all writes to the disk so far. Raises DiskError.

        Called before gradients change, so that a step whose disk fails can still be undone."""
        for done in self._first_writes or ():
            done.hold_host()
        self._first_writes = None

    def close(self) -> None:
        """End the step's copies, also of an abandoned step, and return its pool for the next step.

        If the disk has failed, the pool is not used again.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            return
        pool.streams.settle()
        copies = [*self._on_host.values(), *self._on_disk.values()]
        for dropped in self._dropped_copies.values():
            copies += dropped
        jobs = [done for copy in copies for done in copy.transfers if isinstance(done, Job)]
        failed = [job for job in jobs if not job.succeeded()]  # waits for each
        if not failed:
            self._free.append(pool)
        # dropped, since jobs that have failed would keep the pool alive
        self._on_host, self._on_disk, self._first_writes = {}, {}, None
        self._dropped_copies = {"host": [], "disk": []}

    def _transfers_using(self, place: str, start: int, stop: int) -> list[CopyEvent]:
        """The copies from and to given-up storages in these bytes, which may still run."""
        return [
            done
            for copy in self._dropped_copies[place]
            if copy.start < stop and start < copy.stop
            for done in copy.transfers
        ]

    def _host_block(
        self, start: int, stop: int, outside_pool: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._open_pool.host[start:stop] if outside_pool is None else outside_pool

    @property
    def _open_pool(self) -> Pool:
        assert self._pool is not None
        return self._pool

    @property
    def _streams(self) -> CopyStreams:
        return self._open_pool.streams

    @property
    def _file(self) -> SpillFile:
        assert self._open_pool.file is not None
        return self._open_pool.file
