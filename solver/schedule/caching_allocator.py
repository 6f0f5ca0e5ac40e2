"""A model of PyTorch's caching allocator for CUDA: how many bytes it reserves on the device.

It needs no card. It models `c10/cuda/CUDACachingAllocator.cpp` for one device.
`python -m benchmarks.allocator` runs the same traces through PyTorch's own binary: every byte
agrees.

- Sizes are rounded up to 512 bytes. Up to 1 MiB comes from the small pool, more from the large one.
- A request takes the smallest free block of its pool that is large enough. The remainder of the
  block is split off if it has 512 bytes or more (small pool) or more than 1 MiB (large pool).
- If there is no such block, a segment is taken from the device: 2 MiB for small requests, 20 MiB
  for those below 10 MiB, else the size rounded up to 2 MiB.
- A freed block is merged with free neighbours in its segment. Segments stay with the allocator.
- Each stream has its own pools: a block freed on one stream is not reused on another.
- If the device is full, all segments that are entirely free are returned to it first.
- **Expandable segments**: each pool has ranges of addresses, each as large as 9/8 of the device's
  memory, to which pages (2 MiB, 20 MiB) are mapped as requests need them; a new range is begun when
  no range has room. Any remainder from 512 bytes on is split off, and a block that can still grow
  is taken last. If the device is full, the free pages are returned to it.

Not modelled: blocks used by several streams (`record_stream`), `max_split_size_mb`, garbage
collection, the pools of CUDA graphs, and the addresses that CUDA chooses: here segments are placed
in the order in which they are made, which decides between free blocks of the same size.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 2**20
ALLOCATION_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc
SEGMENT_STEP_BYTES = 2 * MIB  # kRoundLarge
UNLIMITED_ADDRESSES_BYTES = 2**62
"""Size of an expandable segment's address range if the device's capacity is unlimited."""


class DeviceFullError(MemoryError):
    """The device has no room for a request, even after all free memory was returned to it."""


@dataclass(eq=False, slots=True)
class Block:
    """A contiguous part of a segment.

    mapped: whether device memory backs its addresses.
    before, after: its neighbours in the segment.
    """

    pool: Pool
    address: int
    size_bytes: int
    is_free: bool = True
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def stop(self) -> int:
        return self.address + self.size_bytes

    def split(self, size_bytes: int) -> Block:
        """Shorten this block to `size_bytes`; return the remainder as a free block."""
        rest = Block(
            self.pool,
            self.address + size_bytes,
            self.size_bytes - size_bytes,
            mapped=self.mapped,
            before=self,
            after=self.after,
        )
        if self.after is not None:
            self.after.before = rest
        self.after, self.size_bytes = rest, size_bytes
        return rest

    def join_neighbours(self) -> None:
        """Merge this free block with its free neighbours, which leave the pool."""
        pool = self.pool
        for other in (self.before, self.after):
            if other is None or not other.is_free or other.mapped != self.mapped:
                continue
            pool.remove(other)
            if other is self.before:
                self.before, self.address = other.before, other.address
                if self.before is not None:
                    self.before.after = self
            else:
                self.after = other.after
                if self.after is not None:
                    self.after.before = self
            self.size_bytes += other.size_bytes


@dataclass(eq=False, slots=True)
class Pool:
    """The free blocks of one stream, small or large, sorted by size and address.

    Blocks without device memory (unmapped) are kept apart, sorted by address.

    page_bytes: the size of a new segment, or of a page of an expandable one.
    least_rest_bytes: a remainder of at least this size is split off.
    """

    page_bytes: int
    least_rest_bytes: int
    _free: list[tuple[int, int]] = field(default_factory=list)
    _unmapped: list[int] = field(default_factory=list)
    _block_at: dict[int, Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        """Add a free block."""
        self._block_at[block.address] = block
        if block.mapped:
            insort(self._free, (block.size_bytes, block.address))
        else:
            insort(self._unmapped, block.address)

    def remove(self, block: Block) -> None:
        """Remove a free block, before it is used or changes its size."""
        del self._block_at[block.address]
        if block.mapped:
            self._free.pop(bisect_left(self._free, (block.size_bytes, block.address)))
        else:
            self._unmapped.pop(bisect_left(self._unmapped, block.address))

    def blocks_of_at_least(self, size_bytes: int) -> Iterator[Block]:
        """The mapped free blocks that are large enough, the smallest first."""
        for index in range(bisect_left(self._free, (size_bytes, 0)), len(self._free)):
            yield self._block_at[self._free[index][1]]

    @property
    def free(self) -> list[Block]:
        return [self._block_at[address] for _, address in self._free]

    @property
    def unmapped_blocks(self) -> list[Block]:
        return [self._block_at[address] for address in self._unmapped]


class CachingAllocator:
    """The allocator with its default settings.

    capacity_bytes: memory of the device (inf: unlimited).
    allocated_bytes: held by blocks in use, as `torch.cuda.memory_allocated()`.
    reserved_bytes: taken from the device, as `torch.cuda.memory_reserved()`.
    max_allocated_bytes, max_reserved_bytes: the maximum of each so far.
    n_returns: how often free memory was returned to a full device, which synchronizes the device.
    """

    least_large_rest_bytes = SMALL_BYTES + ALLOCATION_BYTES
    """`Pool.least_rest_bytes` of the large pool."""

    def __init__(self, *, capacity_bytes: float = math.inf) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.max_allocated_bytes = 0
        self.reserved_bytes = self.max_reserved_bytes = 0
        self.n_returns = 0
        self._end = 0
        self.pools: dict[tuple[int, bool], Pool] = {}

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """Return a block of at least `size_bytes` > 0 for a stream. Raises DeviceFullError."""
        size_bytes = _round_up(size_bytes, ALLOCATION_BYTES)
        is_small = size_bytes <= SMALL_BYTES
        page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        least_rest_bytes = ALLOCATION_BYTES if is_small else self.least_large_rest_bytes
        pool = self.pools.setdefault((stream, is_small), Pool(page_bytes, least_rest_bytes))
        block = self._cached_block(pool, size_bytes) or self._block_from_device(pool, size_bytes)
        if block is None:  # the device is full: return all free memory to it, and try again
            self.n_returns += 1
            self._return_free_memory()
            block = self._block_from_device(pool, size_bytes)
        if block is None:
            raise DeviceFullError(
                f"{size_bytes} bytes asked for; {self.reserved_bytes} of {self.capacity_bytes:.0f} "
                f"are reserved, {self.allocated_bytes} in use"
            )
        pool.remove(block)
        if block.size_bytes - size_bytes >= pool.least_rest_bytes:
            pool.add(block.split(size_bytes))
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        self.max_allocated_bytes = max(self.max_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool."""
        self.allocated_bytes -= block.size_bytes
        block.is_free = True
        block.join_neighbours()
        block.pool.add(block)

    def _cached_block(self, pool: Pool, size_bytes: int) -> Block | None:
        return next(pool.blocks_of_at_least(size_bytes), None)

    def _block_from_device(self, pool: Pool, size_bytes: int) -> Block | None:
        """Take a new segment and return it as a free block (None: the device is full)."""
        segment_bytes = pool.page_bytes
        if size_bytes >= OWN_SEGMENT_BYTES:
            segment_bytes = _round_up(size_bytes, SEGMENT_STEP_BYTES)
        if not self._reserve(segment_bytes):
            return None
        block = Block(pool, self._end, segment_bytes)
        self._end += segment_bytes
        pool.add(block)
        return block

    def _return_free_memory(self) -> None:
        """Return all segments that are entirely free to the device."""
        for pool in self.pools.values():
            for block in pool.free:
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size_bytes

    def _reserve(self, size_bytes: int) -> bool:
        """Take bytes from the device; False if it has no room for them."""
        if self.reserved_bytes + size_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes += size_bytes
        self.max_reserved_bytes = max(self.max_reserved_bytes, self.reserved_bytes)
        return True


class ExpandableAllocator(CachingAllocator):
    """The allocator with `expandable_segments:True`."""

    least_large_rest_bytes = ALLOCATION_BYTES

    def _cached_block(self, pool: Pool, size_bytes: int) -> Block | None:
        """The free block that could grow to the fewest bytes; a block without room to grow counts
        with its size."""
        chosen: Block | None = None
        for block in pool.blocks_of_at_least(size_bytes):
            if chosen is not None and _grown_bytes(block) >= _grown_bytes(chosen):
                break
            chosen = block
        return chosen

    def _block_from_device(self, pool: Pool, size_bytes: int) -> Block | None:
        """Map pages at the lowest addresses with enough room, and return the block there.

        A free block in front of the unmapped addresses is used as the start of the new one. Returns
        None if the device is full.
        """
        starts = (b.before if b.before and b.before.is_free else b for b in pool.unmapped_blocks)
        found = (start for start in starts if _free_stretch_bytes(start) >= size_bytes)
        block = next(found, None) or self._new_range(pool)
        if not block.mapped and not self._map(block, min(block.size_bytes, size_bytes)):
            return None
        while block.size_bytes < size_bytes:
            more = block.after
            assert more is not None
            if not self._map(more, min(size_bytes - block.size_bytes, more.size_bytes)):
                return None
            block = more
        return block

    def _new_range(self, pool: Pool) -> Block:
        """Add a range of unmapped addresses. A request is smaller than the device, so it fits into
        one range."""
        range_bytes = UNLIMITED_ADDRESSES_BYTES
        if self.capacity_bytes < math.inf:
            range_bytes = _round_up(int(self.capacity_bytes) * 9 // 8, pool.page_bytes)
        start = _round_up(self._end, pool.page_bytes)
        block = Block(pool, start, range_bytes, mapped=False)
        self._end = start + range_bytes
        pool.add(block)
        return block

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Map device memory to the first pages of a block, and merge it with its free neighbours.

        Returns False if the device is full.
        """
        pool = block.pool
        size_bytes = _round_up(size_bytes, pool.page_bytes)
        if not self._reserve(size_bytes):
            return False
        pool.remove(block)
        if size_bytes < block.size_bytes:
            pool.add(block.split(size_bytes))
        block.mapped = True
        block.join_neighbours()
        pool.add(block)
        return True

    def _return_free_memory(self) -> None:
        """Return the whole pages inside free blocks to the device."""
        for pool in self.pools.values():
            for block in pool.free:
                start = _round_up(block.address, pool.page_bytes)
                stop = block.stop // pool.page_bytes * pool.page_bytes
                if stop > start:
                    self._unmap(block, start, stop)

    def _unmap(self, block: Block, start: int, stop: int) -> None:
        """Unmap the pages at addresses start .. stop of a free block."""
        pool = block.pool
        pool.remove(block)
        if stop < block.stop:
            pool.add(block.split(stop - block.address))
        if start > block.address:
            pages = block.split(start - block.address)
            pool.add(block)
            block = pages
        block.mapped = False
        block.join_neighbours()
        if block.before is not None or block.after is not None:
            pool.add(block)  # else the whole range is given back
        self.reserved_bytes -= stop - start


def _round_up(size_bytes: int, step_bytes: int) -> int:
    return -(-size_bytes // step_bytes) * step_bytes


def _grown_bytes(block: Block) -> int:
    """The size that the block could grow to, with the unmapped addresses behind it."""
    after = block.after
    grows = after is not None and not after.mapped
    return block.size_bytes + (after.size_bytes if grows and after is not None else 0)


def _free_stretch_bytes(block: Block | None) -> int:
    """Total bytes of the adjacent free blocks that begin with this one, mapped or not."""
    found_bytes = 0
    while block is not None and block.is_free:
        found_bytes += block.size_bytes
        block = block.after
    return found_bytes
