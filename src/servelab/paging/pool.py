"""The block pool: which blocks are free, in which order they are used next, and who holds them.

Models: the cache of a device as ``num_blocks`` blocks of ``block_size`` slots; a block is held by
as many tables as its reference count says. Free blocks wait in least-recently-used order and keep
what they cached until they are used again (Kwon et al. 2023, section 4.2; vLLM,
vllm/v1/core/block_pool.py).

Assumes: block 0 is the null block: never handed out, so padding may name it; its contents are
nobody's. One thread.

Ignores: the keys and values themselves, and their bytes: a runner stores them, by slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

from servelab.paging.events import CachedChanged, Event, Reason, RefChanged
from servelab.paging.index import Prefix, PrefixIndex
from servelab.units import check_fields

if TYPE_CHECKING:
    from servelab.paging.table import BlockTable

#: The block that is never handed out: what the unused entries of a padded block table name.
NULL_BLOCK = 0


class OutOfBlocks(RuntimeError):
    """An operation needs more free blocks than there are; it has changed nothing.

    Parameters: ``needed`` and ``free`` blocks.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} free blocks are needed, the pool has {free}")
        self.needed, self.free = needed, free


class CorruptPool(RuntimeError):
    """A pool, its index and its tables contradict each other: a bug in what drives them."""


@dataclass(frozen=True)
class PoolShape:
    """The size of a pool, as a runner needs it: ``num_blocks`` (null block included) of
    ``block_size`` slots.

    Raises: ``TypeError``, ``ValueError`` for fewer than 2 blocks or less than 1 slot.

    >>> shape = PoolShape(num_blocks=8, block_size=16)
    >>> shape.num_slots, shape.blocks_for(33), shape.slot(block=2, offset=3)
    (128, 3, 35)
    """

    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        check_fields(self, "num_blocks", minimum=2)
        check_fields(self, "block_size")

    @property
    def num_slots(self) -> int:
        """Return all slots, those of the null block included."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that ``num_tokens`` fill or begin."""
        return -(-num_tokens // self.block_size)

    def slot(self, block: int, offset: int) -> int:
        """Return the number of a slot: the token position in a pool read as one long row."""
        return block * self.block_size + offset

    def check_addressable(self, index_bits: int, elements_per_slot: int = 1) -> None:
        """Refuse a pool that signed indices of ``index_bits`` cannot address to its last element.

        Parameters: ``elements_per_slot`` of the tensor that is indexed, from slot to slot
        (``num_kv_heads * head_dim`` for one layer's keys).
        Raises: ``ValueError``. Source: vllm-project/vllm issues 1486 and 50427.

        >>> PoolShape(2**18, 16).check_addressable(index_bits=32, elements_per_slot=8 * 128)
        Traceback (most recent call last):
        ...
        ValueError: the last element of the pool is number 4294967295, beyond 2147483647, ...
        """
        last = self.num_slots * elements_per_slot - 1
        largest = 2 ** (index_bits - 1) - 1
        if last > largest:
            raise ValueError(
                f"the last element of the pool is number {last}, "
                f"beyond {largest}, the largest index of {index_bits} bits"
            )


class FreeList:
    """Blocks 1 to ``num_blocks`` - 1 in order of next use; any of them can be taken out in O(1).

    A ring linked through two lists. Entry 0, the null block's, is where the ring begins and ends.

    >>> free = FreeList(num_blocks=5)
    >>> free.remove(2), free.append(2), list(free)
    (1, 4, [1, 3, 4, 2])
    """

    def __init__(self, num_blocks: int) -> None:
        self._next: list[int] = [*range(1, num_blocks), NULL_BLOCK]
        self._previous: list[int] = [num_blocks - 1, *range(num_blocks - 1)]

    def __iter__(self) -> Iterator[int]:
        block = self.first
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]

    @property
    def first(self) -> int:
        """Return the block to use next; the null block if none is free."""
        return self._next[NULL_BLOCK]

    def append(self, block: int) -> int:
        """Put a block at the end; return the one before it (the null block: none)."""
        last = self._previous[NULL_BLOCK]
        self._next[last] = self._previous[NULL_BLOCK] = block
        self._previous[block], self._next[block] = last, NULL_BLOCK
        return last

    def remove(self, block: int) -> int:
        """Take a block out; return the one before it (the null block: none)."""
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        return before


class BlockPool:
    """Reference counts and free order of all blocks, and the index of what they cache.

    Parameters: ``num_blocks``, the null block included; ``block_size`` slots each; ``sink``
    receives every event (see ``servelab.paging.events``), None for none.
    Raises: ``TypeError``, ``ValueError`` as ``PoolShape``.

    >>> pool = BlockPool(num_blocks=5, block_size=16)
    >>> pool.allocate(), pool.allocate(), pool.num_free
    (1, 2, 2)
    >>> pool.release(1)
    >>> pool.free_order()
    [3, 4, 1]
    """

    def __init__(
        self, num_blocks: int, block_size: int, sink: Callable[[Event], None] | None = None
    ) -> None:
        self.shape = PoolShape(num_blocks, block_size)
        self.block_size = self.shape.block_size
        self.refs = [0] * self.shape.num_blocks  # tables that hold each block
        self.num_free = self.shape.num_blocks - 1  # blocks that no table holds, cached or not
        self.index = PrefixIndex()
        self.sink = sink
        self._free = FreeList(self.shape.num_blocks)
        self._table_ids = count()

    def free_order(self) -> list[int]:
        """Return the free blocks, the one to be used next first."""
        return list(self._free)

    def new_table_id(self) -> int:
        """Return a number that no table of this pool has had."""
        return next(self._table_ids)

    def allocate(self) -> int:
        """Return the least recently used free block, now held once; what it cached is evicted.

        Raises: ``OutOfBlocks``.
        """
        block = self._free.first
        if block == NULL_BLOCK:
            raise OutOfBlocks(1, 0)
        if block in self.index:
            self.uncache(block)
        self._change_ref(block, +1, "allocate")
        return block

    def acquire(self, block: int, reason: Reason) -> None:
        """Hold a block once more; a free one must be cached, or its contents would be nobody's.

        Raises: ``ValueError``.
        """
        if not self.refs[block] and block not in self.index:
            raise ValueError(f"block {block} is neither held nor cached")
        self._change_ref(block, +1, reason)

    def release(self, block: int) -> None:
        """Hold a block once less; the last release puts it at the end of the free order.

        Raises: ``ValueError`` for a block that is not held.
        """
        if not self.refs[block]:
            raise ValueError(f"block {block} is released, but no table holds it")
        self._change_ref(block, -1, "release")

    def _change_ref(self, block: int, change: int, reason: Reason) -> None:
        old, after = self.refs[block], NULL_BLOCK
        self.refs[block] = new = old + change
        if old == 0:
            after = self._free.remove(block)
            self.num_free -= 1
        elif new == 0:
            after = self._free.append(block)
            self.num_free += 1
        if self.sink is not None:
            self.sink(RefChanged(block=block, old=old, new=new, after=after, reason=reason))

    def is_read_elsewhere(self, block: int) -> bool:
        """Return whether a holder must copy the block before it writes: others hold or find it."""
        return self.refs[block] > 1 or block in self.index

    def cache(self, block: int, prefix: Prefix) -> None:
        """Let a held block be found as ``prefix``: from now on nobody may write to it.

        Raises: ``ValueError`` for a block that is free or already cached.
        """
        if not self.refs[block] or block in self.index:
            raise ValueError(f"block {block} must be held, and not cached yet, to be cached")
        self.index.add(block, prefix)
        self._report_cached(block, prefix, old=None, new=prefix.key.hex())

    def uncache(self, block: int) -> None:
        """Let a cached block be found no more.

        Raises: ``ValueError`` for a block that is not cached.
        """
        prefix = self.index.get(block)
        if prefix is None:
            raise ValueError(f"block {block} is not cached")
        self._report_cached(block, prefix, old=prefix.key.hex(), new=None)
        self.index.remove(block)

    def _report_cached(self, block: int, prefix: Prefix, old: str | None, new: str | None) -> None:
        if self.sink is not None:
            self.sink(
                CachedChanged(
                    block=block,
                    old=old,
                    new=new,
                    parent=prefix.parent.key.hex(),
                    tokens=prefix.tokens,
                    position=self.index.position(block),
                )
            )

    def check(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Compare everything the pool knows with everything else it knows.

        Parameters: ``tables``: all live ones, to compare the reference counts with; None: do not.
        Raises: ``CorruptPool`` with all that is wrong.
        """
        problems = [*self._problems(), *self.index.problems()]
        if tables is not None:
            problems += self._table_problems(list(tables))
        if problems:
            raise CorruptPool("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        order = list(islice(self._free, self.shape.num_blocks))
        unheld = [block for block, refs in enumerate(self.refs) if refs == 0 and block]
        if sorted(order) != unheld or len(order) != self.num_free:
            yield f"free order {order} ({self.num_free} free), blocks without holder {unheld}"
        if min(self.refs) < 0:
            yield f"a reference count is negative: {self.refs}"
        if self.refs[NULL_BLOCK] or NULL_BLOCK in self.index:
            yield "the null block is held or cached"

    def _table_problems(self, tables: list[BlockTable]) -> Iterator[str]:
        holders = Counter(block for table in tables for block in table.blocks)
        for block, refs in enumerate(self.refs):
            if refs != holders[block]:
                yield f"block {block} has {refs} references, {holders[block]} tables hold it"
        for table in tables:
            if len(set(table.blocks)) != len(table.blocks):
                yield f"table {table.id} names a block twice: {table.blocks}"
            if len(table.blocks) != self.shape.blocks_for(table.num_tokens):
                yield f"table {table.id}: {len(table.blocks)} blocks, {table.num_tokens} tokens"
