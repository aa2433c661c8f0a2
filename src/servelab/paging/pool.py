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

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from servelab.paging.events import CachedChanged, Event, Reason, RefChanged
from servelab.paging.index import Prefix, PrefixIndex
from servelab.units import check_fields

#: The block that is never handed out: what the unused entries of a padded block table name.
NULL_BLOCK = 0


class OutOfBlocks(RuntimeError):
    """An operation needs more free blocks than there are; it has changed nothing.

    Parameters: ``needed`` and ``free`` blocks.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} free blocks are needed, the pool has {free}")
        self.needed, self.free = needed, free


@dataclass(frozen=True)
class PoolShape:
    """The size of a pool, as a runner needs it: ``num_blocks`` (null block included) of
    ``block_size`` slots.

    Raises: ``TypeError``, ``ValueError`` for fewer than 2 blocks or less than 1 slot.

    >>> shape = PoolShape(num_blocks=8, block_size=16)
    >>> shape.num_slots, shape.blocks_for(33)
    (128, 3)
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
        self.index = PrefixIndex()
        self.sink = sink
        self.table_ids = count()  # each is given to one table
        # Least recently used first; any of them can be taken out, since a cached one may be hit.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.shape.num_blocks))

    @property
    def num_free(self) -> int:
        """Return the blocks that no table holds, cached or not."""
        return len(self._free)

    def free_order(self) -> list[int]:
        """Return the free blocks, the one to be used next first."""
        return list(self._free)

    def allocate(self) -> int:
        """Return the least recently used free block, now held once; what it cached is evicted.

        Raises: ``OutOfBlocks``.
        """
        if not self._free:
            raise OutOfBlocks(1, 0)
        block = next(iter(self._free))
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
        old, place = self.refs[block], 0
        self.refs[block] = new = old + change
        if old == 0:
            if self.sink is not None and reason != "allocate":  # else it is the first
                place = list(self._free).index(block)
            del self._free[block]
        elif new == 0:
            place = len(self._free)
            self._free[block] = None
        if self.sink is not None:
            self.sink(RefChanged(block=block, old=old, new=new, place=place, reason=reason))

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
