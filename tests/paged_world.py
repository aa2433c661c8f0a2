"""A pool driven as an engine drives it, with a store of hashes in place of keys and values.

The value of a position depends on what a real one depends on: weights, namespace, token, and all
that is read through the block table before it. So the values that a sequence must have are known
without a model, and any block that is shared, evicted or copied wrongly shows as a wrong value.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from servelab.paging import (
    NULL_BLOCK,
    BlockPool,
    BlockTable,
    Event,
    OutOfBlocks,
    PoolState,
    PrefixCache,
    csr,
    move,
    padded,
    replay,
    rewind,
)
from servelab.paging import index as keys
from servelab.paging.index import Prefix, PrefixIndex, Root

Namespace = dict[str, str]


def value_of(weights: int, namespace: Namespace, token: int, before: str) -> str:
    text = repr((weights, sorted(namespace.items()), token, before))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(eq=False)
class Request:
    """A sequence and the values that its computed positions must have."""

    table: BlockTable
    tokens: list[int]
    namespace: Namespace
    expected: list[str] = field(default_factory=list)
    cached_tokens: int = 0  # at admission

    def expect(self, weights: int, stop: int) -> None:
        """Compute the values up to ``stop`` densely, with today's weights."""
        for token in self.tokens[len(self.expected) : stop]:
            before = self.expected[-1] if self.expected else ""
            self.expected.append(value_of(weights, self.namespace, token, before))


class Store:
    """Values by slot, and the rule that nobody writes what somebody else can read (I6)."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.values: dict[int, str] = {}

    def block(self, block: int) -> list[str]:
        size = self.pool.block_size
        return [self.values.get(block * size + i, "never written") for i in range(size)]

    def put_block(self, block: int, values: Sequence[str]) -> None:
        for i, value in enumerate(values):
            self.values[block * self.pool.block_size + i] = value

    def compute(self, sequence: Request, weights: int, start: int) -> None:
        table = sequence.table
        for place in range(start, table.num_tokens):
            (slot,) = table.slots(place, place + 1)
            block = slot // self.pool.block_size
            assert self.pool.refs[block] == 1, f"block {block} is written while others hold it"
            assert block not in self.pool.index, f"block {block} is written while it is cached"
            before = self.values[table.slots(place - 1, place)[0]] if place else ""
            token = sequence.tokens[place]
            self.values[slot] = value_of(weights, sequence.namespace, token, before)


class World:
    """Pool, prefix cache, store and sequences; a second pool to swap to."""

    def __init__(self, num_blocks: int = 8, block_size: int = 2, host_blocks: int = 2) -> None:
        self.log: list[Event] = []
        self.pool = BlockPool(num_blocks, block_size, sink=self.log.append)
        self.cache = PrefixCache(self.pool)
        self.store = Store(self.pool)
        self.host = BlockPool(host_blocks, block_size)
        self.host_store = Store(self.host)
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.past: list[list[int]] = []  # token lists to draw prompts from
        self._folded, self._folded_state = 0, PoolState.empty(num_blocks)
        self._last = PoolState.empty(num_blocks)

    @property
    def weights(self) -> int:
        return self.pool.index.epoch

    # --- what an engine does --------------------------------------------------------------------

    def start(
        self, tokens: Sequence[int], namespace: Namespace | None = None, chunk: int | None = None
    ) -> Request:
        """Admit a sequence: look up, compute ``chunk`` tokens behind the hit (all), publish."""
        namespace = namespace or {}
        table = BlockTable(self.pool)
        hit = self.cache.lookup(tokens, namespace)
        assert hit.blocks == tuple(self.longest_hit(tokens, namespace))
        left = len(tokens) - hit.num_tokens
        assert left >= 1, "nothing is left to compute (I8)"
        sequence = Request(table, list(tokens), namespace, cached_tokens=hit.num_tokens)
        sequence.expect(self.weights, hit.num_tokens)
        self._append(sequence, min(left, chunk or left), hit)
        self.running.append(sequence)
        self.past.append(sequence.tokens)
        return sequence

    def extend(self, sequence: Request, tokens: Sequence[int] = (), chunk: int = 0) -> None:
        """Compute ``chunk`` tokens (all) of those the sequence has and of ``tokens``."""
        old, sequence.tokens = sequence.tokens, [*sequence.tokens, *tokens]
        left = len(sequence.tokens) - sequence.table.num_tokens
        try:
            self._append(sequence, min(left, chunk or left))
        except OutOfBlocks:
            sequence.tokens = old
            raise
        self.past.append(sequence.tokens)

    def _append(self, sequence: Request, num_tokens: int, hit=None) -> None:
        table, free = sequence.table, self.pool.num_free
        needed, before, root = table.blocks_needed(num_tokens, hit), self.state(), table.root
        if needed > free:  # I12: refused exactly then
            with pytest.raises(OutOfBlocks) as refusal:
                table.append(num_tokens, hit)
            assert (refusal.value.needed, refusal.value.free) == (needed, free)
            assert (self.state(), table.root) == (before, root), "a refusal changed something (I11)"
            raise refusal.value
        begun = table.blocks[table.num_tokens // self.pool.block_size :]  # the last, if partial
        shared = [b for b in begun if self.pool.refs[b] > 1 or b in self.pool.index]
        try:
            copies = table.append(num_tokens, hit)
        except OutOfBlocks as error:
            raise AssertionError("refused although the capacity check said yes (I12)") from error
        assert [source for source, _ in copies] == shared
        given_back = sum(self.pool.refs[source] == 0 for source, _ in copies)
        assert self.pool.num_free == free - needed + given_back, "the capacity check was not exact"
        for source, destination in copies:
            self.store.put_block(destination, self.store.block(source))
        start = table.num_tokens - num_tokens
        assert start == len(sequence.expected)
        sequence.expect(self.weights, table.num_tokens)
        self.store.compute(sequence, self.weights, start)
        self.cache.publish(table, sequence.tokens, table.num_tokens)

    def fork(self, parent: Request) -> Request:
        child = Request(
            parent.table.fork(), list(parent.tokens), parent.namespace, list(parent.expected)
        )
        self.running.append(child)
        return child

    def truncate(self, sequence: Request, num_tokens: int) -> None:
        sequence.table.truncate(num_tokens)
        sequence.tokens = sequence.tokens[:num_tokens]
        sequence.expected = sequence.expected[:num_tokens]

    def free(self, sequence: Request) -> None:
        sequence.table.free()
        self.running.remove(sequence)

    def swap_out(self, sequence: Request) -> None:
        self._move(sequence, self.store, self.host_store)
        self.running.remove(sequence)
        self.swapped.append(sequence)

    def swap_in(self, sequence: Request) -> None:
        self._move(sequence, self.host_store, self.store)
        self.swapped.remove(sequence)
        self.running.append(sequence)

    def _move(self, sequence: Request, source: Store, target: Store) -> None:
        before = self.state(), source.pool.free_order(), target.pool.free_order()
        blocks = sequence.table.blocks
        try:
            table, copies = move(sequence.table, target.pool)
        except OutOfBlocks:
            assert len(blocks) > target.pool.num_free
            assert (self.state(), source.pool.free_order(), target.pool.free_order()) == before
            raise
        assert [old for old, _ in copies] == list(blocks)
        for old, new in copies:
            target.put_block(new, source.block(old))
        assert not sequence.table.blocks
        sequence.table = table

    # --- what must hold -------------------------------------------------------------------------

    def state(self) -> PoolState:
        return PoolState.of(self.pool, [sequence.table for sequence in self.running])

    def longest_hit(self, tokens: Sequence[int], namespace: Namespace) -> list[int]:
        """The blocks a lookup must find, by comparing whole token lists, oldest block first."""
        size, hit = self.pool.block_size, []
        whole = {
            block: self.cached_tokens(block)
            for blocks in self.pool.index.blocks_by_key().values()
            for block in blocks
        }
        for stop in range(size, len(tokens), size):
            wanted = (self.weights, namespace, list(tokens[:stop]))
            found = [block for block, content in whole.items() if content == wanted]
            if not found:
                break
            hit.append(found[0])
        return hit

    def cached_tokens(self, block: int) -> tuple[int, Namespace, list[int]]:
        """Epoch, namespace and all tokens up to the end of a cached block."""
        at, tokens = self.pool.index.get(block), []
        while isinstance(at, Prefix):
            tokens[:0] = at.tokens
            at = at.parent
        assert at is not None
        return at.epoch, dict(at.namespace), tokens

    def verify(self) -> None:
        """All invariants, by the test's own count."""
        self._verify_pool(self.pool, self.running)
        self._verify_pool(self.host, self.swapped)
        self._verify_values(self.store, self.running)
        self._verify_values(self.host_store, self.swapped)
        self._verify_index()
        self._verify_events()

    def _verify_events(self) -> None:
        """I17: forwards from the last comparison to the live state, back again, and forwards."""
        new, live = self.log[self._folded :], self.state()
        assert replay(new, self._folded_state) == live
        assert rewind(new, self._folded_state) == self._last
        replay(new, self._folded_state)
        self._folded, self._last = len(self.log), live

    def _verify_pool(self, pool: BlockPool, sequences: list[Request]) -> None:
        tables = [sequence.table for sequence in sequences]
        verify_pool(pool, tables)
        verify_forms(tables)

    def _verify_values(self, store: Store, sequences: list[Request]) -> None:
        for sequence in sequences:
            assert [
                store.values[slot] for slot in sequence.table.slots()
            ] == sequence.expected  # I5
            assert len(sequence.expected) == sequence.table.num_tokens <= len(sequence.tokens)

    def _verify_index(self) -> None:
        index, size = self.pool.index, self.pool.block_size
        verify_index(index)
        listed = [block for blocks in index.blocks_by_key().values() for block in blocks]
        assert sorted(listed) == sorted(index)  # I7, both directions
        assert len(set(listed)) == len(listed) == len(index) < self.pool.shape.num_blocks
        contents = {block: self.cached_tokens(block) for block in listed}
        reachable = [(epoch, space, tokens) for epoch, space, tokens in contents.values()]
        for block, (epoch, namespace, tokens) in contents.items():
            assert epoch == self.weights  # B22
            chain = Request(BlockTable(self.pool), tokens, namespace)
            chain.expect(epoch, len(tokens))
            assert self.store.block(block) == chain.expected[-size:]  # I7: full and written
            if len(tokens) > size:
                assert (epoch, namespace, tokens[:-size]) in reachable  # I9

    def drain(self) -> None:
        """End everything: nothing is held, and the events lead back to an empty pool (I14, I17)."""
        for sequence in [*self.running, *self.swapped]:
            sequence.table.free()
        self.running, self.swapped = [], []
        self.verify()
        assert self.pool.num_free == self.pool.shape.num_blocks - 1
        assert self.host.num_free == self.host.shape.num_blocks - 1
        assert rewind(self.log, self.state()) == PoolState.empty(self.pool.shape.num_blocks)


def verify_pool(pool: BlockPool, tables: Sequence[BlockTable]) -> None:
    """I1 to I4: references, the free order and the live tables agree on who holds what."""
    holders = Counter(block for table in tables for block in table.blocks)
    assert pool.refs == [holders[block] for block in range(pool.shape.num_blocks)]  # I1
    free = pool.free_order()
    assert sorted([*free, *holders]) == list(range(1, pool.shape.num_blocks))  # I2, B33
    assert pool.num_free == len(free)
    assert NULL_BLOCK not in pool.index
    for table in tables:
        assert table.pool is pool
        assert len(set(table.blocks)) == len(table.blocks)  # I3
        assert len(table.blocks) == -(-table.num_tokens // pool.block_size)  # I4


def verify_index(index: PrefixIndex) -> None:
    """I7, I9: both directions agree, each key is that of its tokens, each has its parent."""
    by_key = index.blocks_by_key()
    listed = {block: key for key, blocks in by_key.items() for block in blocks}
    assert listed == {block: prefix.key.hex() for block, prefix in index.items()}
    assert all(by_key.values())
    for prefix in index.values():
        assert prefix.key == keys.chain_key(prefix.parent.key, prefix.tokens)
        assert isinstance(prefix.parent, Root) or prefix.parent in index.values()


def verify_forms(tables: Sequence[BlockTable]) -> None:
    """The padded and the compressed form name the slots that the tables name (I4)."""
    rows, flat = padded(tables), csr(tables)
    size = tables[0].pool.block_size if tables else 1
    for i, table in enumerate(tables):
        limits = slice(flat.indptr[i], flat.indptr[i + 1])
        assert 1 <= flat.last_page_len[i] <= size
        length = size * (limits.stop - limits.start - 1) + flat.last_page_len[i]
        assert length == table.num_tokens
        for blocks in (rows[i], flat.indices[limits]):
            slots = [blocks[p // size] * size + p % size for p in range(length)]
            assert slots == table.slots()
        assert not any(rows[i][len(table.blocks) :])
        assert len(rows[i]) == len(rows[0])
