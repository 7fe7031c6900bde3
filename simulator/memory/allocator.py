"""PyTorch's CUDA caching allocator as a pure function: bytes in use and reserved after a list of events.

The rules are those of pytorch/pytorch `c10/cuda/CUDACachingAllocator.cpp` (docs/model.md, eq. M40). The
device never runs out of memory here, so nothing is returned to the driver."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

SMALL_BYTES = 1 << 20
"""Largest allocation that the pool of small blocks serves."""
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
"""Segment of allocations above 1 MiB and below `PACKED_BYTES`."""
PACKED_BYTES = 10 << 20
ROUNDED_SEGMENT_BYTES = 2 << 20
"""Larger segments are multiples of this."""
BLOCK_BYTES = 512
"""Sizes are multiples of this."""
ADDRESS_SPACE_BYTES = 1 << 50
"""Room of an expandable segment: more than any device has."""

Kind: TypeAlias = Literal["allocate", "free", "use", "busy", "idle"]


class Event(NamedTuple):
    """One event of a process.

    `allocate` and `free` name a tensor; `use` says that another stream uses a tensor (`record_stream`);
    `busy` starts work on a stream that lasts until `idle`, which ends the work of all streams.
    """

    kind: Kind
    tensor: int = 0
    size_bytes: int = 0
    stream: int = 0


class AllocatorBytes(NamedTuple):
    """Bytes of an allocator at one moment, or at their peaks."""

    active: int
    """Blocks in use, as torch's `active_bytes`: with those that wait for another stream."""
    reserved: int
    """Segments taken from the device, as torch's `reserved_bytes`."""


class _Block:
    """A piece of a segment, in use or free."""

    __slots__ = ("address", "before", "behind", "free", "mapped", "pool", "size", "uses", "waits")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before: _Block | None = None
        self.behind: _Block | None = None
        self.free, self.mapped = False, True
        self.uses: set[int] = set()
        self.waits = 0


class _Pool:
    """Free blocks of one stream, small or large, ordered by size and address."""

    __slots__ = ("blocks", "page", "small", "tail")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.blocks: list[tuple[int, int, _Block]] = []
        self.tail: _Block | None = None
        """The part of an expandable segment that has no memory behind it yet."""

    def add(self, block: _Block) -> None:
        block.free = True
        insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        block.free = False
        del self.blocks[bisect_left(self.blocks, (block.size, block.address))]


class _Allocator:
    """The state of an allocator."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.active = self.reserved = 0
        self.pools: dict[tuple[int, bool], _Pool] = {}
        self.live: dict[int, _Block] = {}
        self.busy: set[int] = set()
        self.unfinished: dict[int, list[_Block]] = {}
        """Freed blocks that a busy stream still uses, by the stream."""
        self.finished: list[_Block] = []
        self.next_address = 0

    def apply(self, event: Event) -> None:
        kind = event.kind
        if kind == "allocate":
            self._release_finished()
            self.live[event.tensor] = self._allocate(event.size_bytes, event.stream)
        elif kind == "free":
            block = self.live.pop(event.tensor)
            for stream in block.uses:
                busy = stream in self.busy
                (self.unfinished.setdefault(stream, []) if busy else self.finished).append(block)
                block.waits += 1
            block.uses = set()
            if not block.waits:
                self._free(block)
        elif kind == "use":
            block = self.live[event.tensor]
            if self.pools.get((event.stream, block.pool.small)) is not block.pool:
                block.uses.add(event.stream)
        elif kind == "busy":
            self.busy.add(event.stream)
        else:
            self.busy.clear()
            for blocks in self.unfinished.values():
                self.finished += blocks
            self.unfinished.clear()

    def _release_finished(self) -> None:
        for block in self.finished:
            block.waits -= 1
            if not block.waits:
                self._free(block)
        self.finished.clear()

    def _allocate(self, requested: int, stream: int) -> _Block:
        size = max(BLOCK_BYTES, -(-requested // BLOCK_BYTES) * BLOCK_BYTES)
        small = size <= SMALL_BYTES
        pool = self.pools.get((stream, small))
        if pool is None:
            pool = self.pools[stream, small] = _Pool(small)
        block = self._best_fit(pool, size)
        if block is None:
            block = self._expand(pool, size) if self.expandable else self._new_segment(pool, size)
        rest = block.size - size
        if rest >= BLOCK_BYTES if small or self.expandable else rest > SMALL_BYTES:
            remainder = _Block(block.address + size, rest, pool)
            block.size = size
            _link(remainder, block.behind)
            _link(block, remainder)
            pool.add(remainder)
        self.active += block.size
        return block

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        blocks = pool.blocks
        place = bisect_left(blocks, (size, -1))
        if place == len(blocks):
            return None
        block = blocks[place][2]
        # A free block that can grow counts as all that it can grow to, so any larger block is preferred.
        if block.behind is not None and not block.behind.mapped and place + 1 < len(blocks):
            block = blocks[place + 1][2]
        pool.remove(block)
        return block

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        if pool.small:
            segment = SMALL_SEGMENT_BYTES
        elif size < PACKED_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // ROUNDED_SEGMENT_BYTES) * ROUNDED_SEGMENT_BYTES
        block = _Block(self.next_address, segment, pool)
        self.next_address += segment
        self.reserved += segment
        return block

    def _expand(self, pool: _Pool, size: int) -> _Block:
        tail = pool.tail
        if tail is None:
            tail = pool.tail = _Block(self.next_address, ADDRESS_SPACE_BYTES, pool)
            tail.mapped = False
            self.next_address += ADDRESS_SPACE_BYTES
        last = tail.before if tail.before is not None and tail.before.free else None
        pages = -(-(size - (last.size if last else 0)) // pool.page)
        grown = _Block(tail.address, pages * pool.page, pool)
        tail.address += grown.size
        self.reserved += grown.size
        if last is None:
            if tail.before is not None:
                _link(tail.before, grown)
        else:
            pool.remove(last)
            grown.address, grown.size = last.address, last.size + grown.size
            if last.before is not None:
                _link(last.before, grown)
        _link(grown, tail)
        return grown

    def _free(self, block: _Block) -> None:
        self.active -= block.size
        pool = block.pool
        before, behind = block.before, block.behind
        if before is not None and before.free:
            pool.remove(before)
            block.address, block.size = before.address, block.size + before.size
            block.before = before.before
            if before.before is not None:
                before.before.behind = block
        if behind is not None and behind.free:
            pool.remove(behind)
            block.size += behind.size
            _link(block, behind.behind)
        pool.add(block)


def _link(block: _Block, behind: _Block | None) -> None:
    """Put `behind` after a block, or nothing."""
    block.behind = behind
    if behind is not None:
        behind.before = block


def bytes_after_events(events: Iterable[Event], expandable: bool = False) -> Iterator[AllocatorBytes]:
    """Yield the bytes active and reserved after every event.

    With `expandable`, segments grow page by page (`expandable_segments:True`). Raises KeyError for a tensor
    that is not allocated.
    """
    allocator = _Allocator(expandable)
    for event in events:
        allocator.apply(event)
        yield AllocatorBytes(allocator.active, allocator.reserved)


def peak_bytes(events: Iterable[Event], expandable: bool = False) -> AllocatorBytes:
    """Return the most bytes active and reserved while the events happen (docs/model.md, eq. M40)."""
    allocator = _Allocator(expandable)
    active = reserved = 0
    for event in events:
        allocator.apply(event)
        active, reserved = max(active, allocator.active), max(reserved, allocator.reserved)
    return AllocatorBytes(active, reserved)
