"""Block tables: the way from the token positions of one sequence to slots of the pool.

Models: a table as the list of a sequence's blocks, all full but the last. Tables share blocks
after a fork or a prefix hit; the first to write into a shared block gets a copy of its own (copy on
write, Kwon et al. 2023, section 4.4), the last holder writes in place.

Assumes: copies are carried out in the order returned, before the step writes its new tokens; a
table is forked or published only once its tokens are computed.

Ignores: token ids, and what is stored in a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servelab.paging.events import EntryChanged, LengthChanged, Reason
from servelab.paging.index import Prefix, Root
from servelab.paging.pool import BlockPool, OutOfBlocks
from servelab.units import check_count

# A whole block to copy: (source, destination).
Copy = tuple[int, int]


@dataclass(frozen=True)
class Hit:
    """The cached blocks a sequence can begin with: the answer of ``PrefixCache.lookup``.

    Parameters: ``root`` of the sequence; ``blocks`` found; ``prefixes`` that they held then.
    """

    root: Root
    blocks: tuple[int, ...]
    prefixes: tuple[Prefix, ...]

    @property
    def num_tokens(self) -> int:
        """Return the tokens that need not be computed."""
        return sum(len(prefix.tokens) for prefix in self.prefixes)


class BlockTable:
    """The blocks of one sequence, in order.

    Parameters: ``pool`` that owns the blocks.

    >>> pool = BlockPool(num_blocks=6, block_size=4)
    >>> parent = BlockTable(pool)
    >>> parent.append(6), parent.blocks, parent.slots(4)
    ([], (1, 2), [8, 9])
    >>> child = parent.fork()
    >>> child.append(1), child.blocks  # the shared block is copied
    ([(2, 3)], (1, 3))
    >>> parent.append(1)  # the last holder writes in place
    []
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.id = next(pool.table_ids)
        self.num_tokens = 0
        self.root: Root | None = None  # set by the lookup it began with; none: never published
        self._blocks: list[int] = []
        # Tokens up to which nothing but the length changes: nobody else reads the last block.
        self._room = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the blocks, copied: the table may change, the answer does not."""
        return tuple(self._blocks)

    def blocks_needed(self, num_tokens: int, hit: Hit | None = None) -> int:
        """Return the free blocks that ``append`` with the same arguments takes.

        Besides new blocks it counts the copy of a shared last block, and the blocks of the hit that
        are free now. If the pool has as many free blocks, ``append`` succeeds.
        Raises: as ``append``, but for ``OutOfBlocks``.

        >>> table = BlockTable(BlockPool(num_blocks=6, block_size=4))
        >>> table.blocks_needed(9)
        3
        """
        length, pool = self.num_tokens + check_count("num_tokens", num_tokens), self.pool
        if hit is None:
            return pool.shape.blocks_for(length) - len(self._blocks) + self._must_copy()
        self._check_hit(hit)
        held = sum(pool.refs[block] > 0 for block in hit.blocks)
        return pool.shape.blocks_for(length + hit.num_tokens) - held

    def append(self, num_tokens: int, hit: Hit | None = None) -> list[Copy]:
        """Make room for ``num_tokens`` more, behind the blocks of ``hit`` if one is given.

        Returns: the blocks to copy before anything is written.
        Raises: ``OutOfBlocks``, ``TypeError``, ``ValueError`` (``num_tokens`` below 1; a hit on a
        table that is not empty, or that is no longer cached, or names a block twice). Then nothing
        has changed.
        """
        if hit is None and self.fill(check_count("num_tokens", num_tokens)):
            return []
        needed = self.blocks_needed(num_tokens, hit)
        if needed > self.pool.num_free:
            raise OutOfBlocks(needed, self.pool.num_free)
        length = self.num_tokens + num_tokens
        if hit is not None:
            # Before any allocation: it could evict the very blocks that were hit.
            self._share(hit.blocks, "hit")
            self.root = hit.root
            length += hit.num_tokens
        copies = [self._copy_last()] if self._must_copy() else []
        for _ in range(len(self._blocks), self.pool.shape.blocks_for(length)):
            self._add(self.pool.allocate())
        self._set_length(length)
        self._room = len(self._blocks) * self.pool.block_size
        return copies

    def fill(self, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more if the last block is known to have it; return whether.

        It is what ``append`` nearly always comes to while a sequence decodes, without its checks.
        After a fork or a cut it declines until ``append`` has seen to the last block.

        >>> table = BlockTable(BlockPool(num_blocks=6, block_size=4))
        >>> table.append(2), table.fill(2), table.fill(1), table.num_tokens
        ([], True, False, 4)
        """
        length = self.num_tokens + num_tokens
        if not self.num_tokens < length <= self._room:
            return False
        if self.pool.sink is None:
            self.num_tokens = length
        else:
            self._set_length(length)
        return True

    def fork(self) -> BlockTable:
        """Return a table of the same blocks; nothing is copied until one of the two writes."""
        child = BlockTable(self.pool)
        child.root = self.root
        child._share(self.blocks, "fork")
        child._set_length(self.num_tokens)
        self._room = 0
        return child

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens``; release the blocks behind them, the last one first.

        The order makes the end of a sequence the first to be evicted, so that what remains cached
        is always reachable from its start.
        Raises: ``TypeError``, ``ValueError`` for more tokens than there are.
        """
        if check_count("num_tokens", num_tokens, minimum=0) > self.num_tokens:
            raise ValueError(f"num_tokens must be at most {self.num_tokens}, got {num_tokens}")
        blocks, kept = self._blocks, self.pool.shape.blocks_for(num_tokens)
        while len(blocks) > kept:
            block = blocks.pop()
            self._report(len(blocks), block, None)
            self.pool.release(block)
        self._set_length(num_tokens)
        self._room = 0

    def free(self) -> None:
        """Release every block; the table is empty and can be used again."""
        self.truncate(0)

    def slot(self, position: int) -> int:
        """Return the slot of one token position.

        Raises: ``ValueError`` for a position that the table does not have.
        """
        if not 0 <= position < self.num_tokens:
            raise ValueError(f"position {position} is not in 0 to {self.num_tokens - 1}")
        size = self.pool.block_size
        return self._blocks[position // size] * size + position % size

    def slots(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the slot of each token position from ``start`` to before ``stop`` (the end).

        Raises: ``ValueError`` for positions that the table does not have.
        """
        stop = self.num_tokens if stop is None else stop
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"positions {start} to {stop} are not in 0 to {self.num_tokens}")
        blocks, size = self._blocks, self.pool.block_size
        return [blocks[place // size] * size + place % size for place in range(start, stop)]

    def _must_copy(self) -> bool:
        """Return whether the next token goes into a block that others read: copy on write."""
        return self.num_tokens % self.pool.block_size != 0 and self.pool.is_read_elsewhere(
            self._blocks[-1]
        )

    def _copy_last(self) -> Copy:
        source, destination = self._blocks[-1], self.pool.allocate()
        self._blocks[-1] = destination
        self._report(len(self._blocks) - 1, source, destination)
        self.pool.release(source)
        return source, destination

    def _share(self, blocks: Sequence[int], reason: Reason) -> None:
        for block in blocks:
            self.pool.acquire(block, reason)
            self._add(block)

    def _add(self, block: int) -> None:
        self._blocks.append(block)
        self._report(len(self._blocks) - 1, None, block)

    def _report(self, index: int, old: int | None, new: int | None) -> None:
        if self.pool.sink is not None:
            self.pool.sink(EntryChanged(table=self.id, index=index, old=old, new=new))

    def _set_length(self, num_tokens: int) -> None:
        old, self.num_tokens = self.num_tokens, num_tokens
        if self.pool.sink is not None and old != num_tokens:
            self.pool.sink(LengthChanged(table=self.id, old=old, new=num_tokens))

    def _check_hit(self, hit: Hit) -> None:
        if self._blocks:
            raise ValueError(f"a hit begins a table, this one has {self.num_tokens} tokens")
        if len(set(hit.blocks)) != len(hit.blocks):
            raise ValueError(f"a block stands at most once in a table, got {hit.blocks}")
        for block, prefix in zip(hit.blocks, hit.prefixes, strict=True):
            if self.pool.index.get(block) is not prefix:
                raise ValueError(f"block {block} no longer holds what was looked up")


def slots_at(tables: Sequence[BlockTable], positions: Sequence[int]) -> list[int]:
    """Return the slot of one token position of each table.

    As ``slot`` does, for the many tables of a step, all of one pool, at once.
    Raises: ``ValueError`` for a position that its table does not have.

    >>> table = BlockTable(BlockPool(num_blocks=6, block_size=4))
    >>> table.append(6)
    []
    >>> slots_at([table, table], [3, 5])
    [7, 9]
    """
    if not all(0 <= at < own.num_tokens for own, at in zip(tables, positions, strict=True)):
        return [table.slot(at) for table, at in zip(tables, positions, strict=True)]  # raises
    size = tables[0].pool.block_size if tables else 1
    pairs = zip(tables, positions, strict=True)
    return [own._blocks[at // size] * size + at % size for own, at in pairs]


def move(table: BlockTable, pool: BlockPool) -> tuple[BlockTable, list[Copy]]:
    """Move a table into another pool, as swapping out or in does.

    Parameters: ``table``, freed by this; ``pool`` of the same block size.
    Returns: the new table, and the blocks to copy (in the old pool, in the new one).
    Raises: ``OutOfBlocks``, ``ValueError``; then nothing has changed.

    >>> device, host = BlockPool(4, block_size=2), BlockPool(9, block_size=2)
    >>> table = BlockTable(device)
    >>> table.append(3)
    []
    >>> swapped, copies = move(table, host)
    >>> swapped.num_tokens, copies, device.num_free
    (3, [(1, 1), (2, 2)], 3)
    """
    if table.pool.block_size != pool.block_size:
        raise ValueError(
            f"blocks of {table.pool.block_size} slots do not fit blocks of {pool.block_size}"
        )
    moved = BlockTable(pool)
    moved.append(table.num_tokens)
    moved.root = table.root
    copies = list(zip(table.blocks, moved.blocks, strict=True))
    table.free()
    return moved, copies
