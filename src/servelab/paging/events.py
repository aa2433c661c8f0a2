"""What changes in a pool and its tables, as values that can be replayed in either direction.

Models: one kind of event for each piece of state (reference count and free order, table entry,
table length, cached prefix, epoch), each with the value before and after. A new pool is the empty
state; applying the events in order gives the live state, undoing them in reverse leads back.

Assumes: the sink of a pool takes every event and raises nothing. Without a sink no event is built.

Ignores: which request a table belongs to, and time. Whoever drives the pool knows both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from servelab.paging.pool import BlockPool
    from servelab.paging.table import BlockTable

Reason = Literal["allocate", "hit", "fork", "release"]

Value = TypeVar("Value")


@dataclass
class PoolState:
    """All that the events of one pool determine, in plain containers.

    Parameters: ``refs`` tables holding each block; ``free`` blocks in the order of their next use;
    ``cached`` the blocks of each prefix key (hexadecimal), oldest first; ``tables`` the blocks of
    each table, by its id; ``lengths`` its tokens; ``epoch`` of the prefix cache. Empty tables are
    not listed.

    >>> PoolState.empty(num_blocks=4).free
    [1, 2, 3]
    """

    refs: list[int]
    free: list[int]
    cached: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    epoch: int = 0

    @classmethod
    def empty(cls, num_blocks: int) -> PoolState:
        """Return the state of a new pool of ``num_blocks``, the null block included."""
        return cls(refs=[0] * num_blocks, free=list(range(1, num_blocks)))

    @classmethod
    def of(cls, pool: BlockPool, tables: Iterable[BlockTable]) -> PoolState:
        """Return the live state of a pool and its tables, copied."""
        held = [table for table in tables if table.blocks]
        return cls(
            refs=list(pool.refs),
            free=pool.free_order(),
            cached=pool.index.blocks_by_key(),
            tables={table.id: list(table.blocks) for table in held},
            lengths={table.id: table.num_tokens for table in held},
            epoch=pool.index.epoch,
        )


@dataclass(frozen=True, kw_only=True)
class Change(Generic[Value]):
    """One piece of state that went from ``old`` to ``new``."""

    old: Value
    new: Value

    def apply(self, state: PoolState) -> None:
        """Take ``state`` over this change, forwards."""
        raise NotImplementedError

    def undo(self, state: PoolState) -> None:
        """Take ``state`` back over this change: it is the change from ``new`` to ``old``."""
        replace(self, old=self.new, new=self.old).apply(state)


@dataclass(frozen=True, kw_only=True)
class RefChanged(Change[int]):
    """The tables that hold ``block``; ``place`` is where it stands in the free order, if free."""

    block: int
    place: int
    reason: Reason

    def apply(self, state: PoolState) -> None:
        state.refs[self.block] = self.new
        if self.old == 0:
            state.free.remove(self.block)
        if self.new == 0:
            state.free.insert(self.place, self.block)


@dataclass(frozen=True, kw_only=True)
class EntryChanged(Change[int | None]):
    """The block behind entry ``index`` of a table: None before it is added, after it is dropped.

    From one block to another it is a copy on write.
    """

    table: int
    index: int

    def apply(self, state: PoolState) -> None:
        blocks = state.tables.setdefault(self.table, [])
        blocks[self.index : self.index + 1] = [] if self.new is None else [self.new]
        if not blocks:
            del state.tables[self.table]


@dataclass(frozen=True, kw_only=True)
class LengthChanged(Change[int]):
    """The tokens of a table."""

    table: int

    def apply(self, state: PoolState) -> None:
        state.lengths[self.table] = self.new
        if not self.new:
            del state.lengths[self.table]


@dataclass(frozen=True, kw_only=True)
class CachedChanged(Change[str | None]):
    """The key under which ``block`` can be found, None if it cannot.

    ``parent`` is the key of the prefix before it, ``tokens`` what the block holds, ``position`` its
    place among the blocks of that key.
    """

    block: int
    parent: str
    tokens: tuple[int, ...]
    position: int

    def apply(self, state: PoolState) -> None:
        if self.old is not None:
            state.cached[self.old].remove(self.block)
            if not state.cached[self.old]:
                del state.cached[self.old]
        if self.new is not None:
            state.cached.setdefault(self.new, []).insert(self.position, self.block)


@dataclass(frozen=True, kw_only=True)
class EpochChanged(Change[int]):
    """The epoch of the prefix cache: a new one for each set of weights."""

    def apply(self, state: PoolState) -> None:
        state.epoch = self.new


Event = RefChanged | EntryChanged | LengthChanged | CachedChanged | EpochChanged


def replay(events: Iterable[Event], state: PoolState) -> PoolState:
    """Apply ``events`` to ``state``, in order; return it.

    >>> from servelab.paging import BlockPool, BlockTable
    >>> log: list[Event] = []
    >>> pool = BlockPool(num_blocks=4, block_size=2, sink=log.append)
    >>> table = BlockTable(pool)
    >>> table.append(3)
    []
    >>> replay(log, PoolState.empty(4)) == PoolState.of(pool, [table])
    True
    """
    for event in events:
        event.apply(state)
    return state


def rewind(events: Sequence[Event], state: PoolState) -> PoolState:
    """Undo ``events`` on ``state``, last first; return it.

    >>> state = PoolState(refs=[0, 1], free=[])
    >>> taken = RefChanged(block=1, old=0, new=1, place=0, reason="allocate")
    >>> rewind([taken], state) == PoolState.empty(num_blocks=2)
    True
    """
    for event in reversed(events):
        event.undo(state)
    return state
