"""The copies of one step: which storage is where, and what has to wait for what.

The generated program calls these methods where its schedule has the ops. The rules of the waits
are those of `solver.schedule.streams`: there they are times, here events.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from scheduler_runtime.execute.copy_streams import (
    CopyStreams,
    Done,
    host_memory,
    storage_bytes,
    streams_for,
)
from scheduler_runtime.execute.spill_file import CopyError, Job, SpillFile
from solver.schedule import CopyLayout
from solver.sizes_deadlines_progress import format_both


class Pools:
    """The host memory and the files for the steps of all programs of a module.

    One block and one file serve step after step, whatever their programs. While a step's backward
    pass is still to come, another forward pass gets a block and a file of its own.

    directory: for files (None: plans that need one are refused).
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._free: list[Pool] = []

    def open(self, layout: CopyLayout, device: torch.device) -> Copies:
        """For one step, whose forward pass begins. Raises CopyError where there is no room."""
        pool = self._taken(layout, device)
        pool.streams.begin()
        return Copies(pool, self._free)

    def _taken(self, layout: CopyLayout, device: torch.device) -> Pool:
        """One that is large enough; a new one takes the place of one that is not."""
        for index in reversed(range(len(self._free))):
            if self._free[index].serves(layout, device):
                return self._free.pop(index)
        host_bytes, disk_bytes = layout.host_bytes, layout.disk_bytes
        if self._free:
            small = self._free.pop()
            if small.device == device:
                host_bytes = max(host_bytes, small.host.numel())
                disk_bytes = max(disk_bytes, 0 if small.file is None else small.file.size_bytes)
            del small  # its memory is free before more is asked for
            if device.type == "cuda":
                torch.accelerator.empty_host_cache()
        return Pool.of(host_bytes, disk_bytes, device, self.directory)


@dataclass(frozen=True)
class Pool:
    """host: a block of bytes, pinned where the device is CUDA. file: None where none is needed."""

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
class Held:
    """A copy at bytes start to stop of its place. ready: it is whole. busy: copies from and to it.

    aside: on the host, outside of the pool: the storage is larger than planned, where a kernel
        returns more than its meta function says, and has no room there or in the file.
    """

    start: int
    stop: int
    ready: Done
    busy: list[Done]
    aside: torch.Tensor | None = None


@dataclass(frozen=True)
class Form:
    """A tensor without its memory."""

    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        offset, strides = int(tensor.storage_offset()), tensor.stride()
        return cls(tensor.dtype, tensor.device, offset, tensor.shape, strides)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)


class Copies:
    """What one step has copied where. storage: the name of a root tensor.

    Its pool goes back to `free` when it is closed.
    """

    def __init__(self, pool: Pool, free: list[Pool]) -> None:
        self._pool: Pool | None = pool
        self._free = free
        self._forms: dict[str, tuple[Form, ...]] = {}
        self._on_host: dict[str, Held] = {}
        self._on_disk: dict[str, Held] = {}
        self._given_up: dict[str, list[Held]] = {"host": [], "disk": []}
        self._arriving: dict[str, Done] = {}
        self._on_device: dict[str, list[Done]] = {}  # copies from and to the storage there
        self._first_writes: list[Done] | None = []  # to the disk (None: they have ended)

    def store(self, storage: str, start: int, stop: int, *tensors: torch.Tensor) -> None:
        """Copy to these bytes of the host. tensors: on the storage, to be brought back."""
        source, aside = storage_bytes(tensors[0]), None
        if source.numel() > stop - start:
            aside = host_memory(source)
            start = 0
        stop = start if aside is not None else start + source.numel()
        target = self._host(start, stop) if aside is None else aside
        after = self._using("host", start, stop)
        if storage in self._arriving:
            after.append(self._arriving[storage])
        done = self._streams.out(target, source, after)
        self._forms[storage] = tuple(map(Form.of, tensors))
        self._on_host[storage] = Held(start, stop, done, [done], aside)
        self._on_device.setdefault(storage, []).append(done)

    def fetch(self, storage: str) -> list[torch.Tensor]:
        """The tensors of `store`, in new memory; they may be read after `arrive`."""
        held, forms = self._on_host[storage], self._forms[storage]
        source = self._host(held.start, held.stop) if held.aside is None else held.aside
        target = torch.empty_like(source, device=forms[0].device, pin_memory=False)
        done = self._streams.back(target, source, [held.ready])
        held.busy.append(done)
        self._arriving[storage] = done
        self._on_device.setdefault(storage, []).append(done)
        return [form.on(target.untyped_storage()) for form in forms]

    def arrive(self, storage: str) -> None:
        """What is computed from now on may read it."""
        self._arriving[storage].hold_compute()

    def leave(self, storage: str, *tensors: torch.Tensor) -> None:
        """The device's memory of the storage may be used again. tensors: hold it until here."""
        del tensors
        self._arriving.pop(storage, None)
        for done in self._on_device.pop(storage, ()):
            done.hold_compute()

    def drop(self, storage: str) -> None:
        self._given_up["host"].append(self._on_host.pop(storage))

    def spill(self, storage: str, start: int) -> None:
        """Copy to the file's bytes from `start`."""
        held = self._on_host[storage]
        if held.aside is not None:
            self._on_disk[storage] = held
            return
        stop = start + held.stop - held.start
        after = [held.ready, *self._using("disk", start, stop)]
        done = self._file.write(self._host(held.start, held.stop), start, after)
        held.busy.append(done)
        if self._first_writes is not None:
            self._first_writes.append(done)
        self._on_disk[storage] = Held(start, stop, done, [done])

    def load(self, storage: str, start: int) -> None:
        """Copy back to the host's bytes from `start`."""
        held = self._on_disk[storage]
        if held.aside is not None:
            self._on_host[storage] = held
            return
        stop = start + held.stop - held.start
        after = [held.ready, *self._using("host", start, stop)]
        done = self._file.read(self._host(start, stop), held.start, after)
        held.busy.append(done)
        self._on_host[storage] = Held(start, stop, done, [done])

    def delete(self, storage: str) -> None:
        self._given_up["disk"].append(self._on_disk.pop(storage))

    def finish_first_writes(self) -> None:
        """Wait for all that was written to the disk until the first call of this, so that an error
        is known when gradients begin to change. Raises DiskError."""
        for done in self._first_writes or ():
            done.hold_host()
        self._first_writes = None

    def close(self) -> None:
        """The step has ended, or will not; its pool may serve the next.

        Where the disk has failed, the pool is left to this step.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            return
        pool.streams.settle()
        there = [*self._on_host.values(), *self._on_disk.values()]
        for given_up in self._given_up.values():
            there += given_up
        jobs = [done for held in there for done in held.busy if isinstance(done, Job)]
        failed = [job for job in jobs if not job.succeeded()]  # waits for each
        if not failed:
            self._free.append(pool)
        # what has failed holds on to the pool
        self._on_host, self._on_disk, self._first_writes = {}, {}, None
        self._given_up = {"host": [], "disk": []}

    def _using(self, place: str, start: int, stop: int) -> list[Done]:
        """The copies from and to what was given up in these bytes."""
        return [
            done
            for held in self._given_up[place]
            if held.start < stop and start < held.stop
            for done in held.busy
        ]

    def _host(self, start: int, stop: int) -> torch.Tensor:
        return self._open.host[start:stop]

    @property
    def _open(self) -> Pool:
        assert self._pool is not None
        return self._pool

    @property
    def _streams(self) -> CopyStreams:
        return self._open.streams

    @property
    def _file(self) -> SpillFile:
        assert self._open.file is not None
        return self._open.file
