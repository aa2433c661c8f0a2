"""The room `paging`: bug reports of other engines as tests, a published example, and the events.

The bNN in a name is a row of the bug reports that tests/test_bugs.py lists; each such test was
seen to fail on the bug it names (`make mutants`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest

from servelab.paging import (
    NULL_BLOCK,
    BlockPool,
    BlockTable,
    Event,
    OutOfBlocks,
    PoolShape,
    PoolState,
    PrefixCache,
    csr,
    events,
    index,
    move,
    padded,
    replay,
    rewind,
    slots_at,
)
from tests.paged_world import World, verify_forms, verify_pool


def tables_of(world: World) -> list[BlockTable]:
    return [request.table for request in world.running]


def cached_blocks(pool: BlockPool) -> list[int]:
    return sorted(pool.index)


# --- a published example ------------------------------------------------------------------------


def test_the_example_of_the_vllm_design_document() -> None:
    """docs/design/prefix_caching.md: 10 blocks of 4; ours are numbered from 1, its from 0."""
    pool = BlockPool(num_blocks=11, block_size=4)
    cache = PrefixCache(pool)
    first, second, third = (BlockTable(pool) for _ in range(3))
    tokens = list(range(17))
    first.append(15, cache.lookup(tokens[:15]))  # time 1: the fourth block is not full
    cache.publish(first, tokens[:15])
    assert [first.blocks, cached_blocks(pool)] == [(1, 2, 3, 4), [1, 2, 3]]
    first.append(2)  # time 3: it is, and a fifth begins
    cache.publish(first, tokens)
    assert [first.blocks, cached_blocks(pool)] == [(1, 2, 3, 4, 5), [1, 2, 3, 4]]

    prompt = [*tokens[:10], 90, 91, 92, 93]  # time 4: 10 of 14 tokens are the first request's
    hit = cache.lookup(prompt)
    second.append(len(prompt) - hit.num_tokens, hit)
    cache.publish(second, prompt)
    assert (hit.num_tokens, second.blocks) == (8, (1, 2, 6, 7))
    first.free()  # time 5
    assert pool.free_order() == [8, 9, 10, 5, 4, 3]
    second.free()  # time 6
    assert pool.free_order() == [8, 9, 10, 5, 4, 3, 7, 6, 2, 1]

    prompt = [*tokens[:12], *range(100, 117)]  # time 7: 29 tokens, 12 of them the first request's
    hit = cache.lookup(prompt)
    assert hit.blocks == (1, 2, 3)
    third.append(len(prompt) - hit.num_tokens, hit)
    assert third.blocks == (1, 2, 3, 8, 9, 10, 5, 4)
    assert pool.free_order() == [7, 6]
    assert cached_blocks(pool) == [1, 2, 3, 6]  # block 4 was evicted


# --- bug reports: sharing -----------------------------------------------------------------------


def test_b01_a_block_stands_once_in_a_table_and_is_released_once_per_table() -> None:
    world = World(num_blocks=9, block_size=2)
    world.start([1, 2, 3])
    hit = world.cache.lookup([1, 2, 9])
    twice = dataclasses.replace(hit, blocks=hit.blocks * 2, prefixes=hit.prefixes * 2)
    with pytest.raises(ValueError, match=r"at most once in a table, got \(1, 1\)"):
        BlockTable(world.pool).append(1, twice)
    family = [world.running[0]]
    family += [world.fork(family[0]) for _ in range(3)]
    assert [world.pool.refs[block] for block in family[0].table.blocks] == [4, 4]
    for freed, request in enumerate(family, start=1):
        world.free(request)
        world.verify()
        assert world.pool.num_free == (8 if freed == 4 else 6)


def test_b02_children_forked_in_one_step_have_contents_of_their_own() -> None:
    world = World(num_blocks=9, block_size=4)
    parent = world.start([1, 2, 0, 1, 2, 0])
    children = [world.fork(parent) for _ in range(2)]
    for token, request in enumerate([*children, parent]):
        world.extend(request, [token])
        world.verify()
    assert len({request.table.blocks[-1] for request in world.running}) == 3
    assert len({request.table.blocks[0] for request in world.running}) == 1


@pytest.mark.parametrize("siblings", [1, 2, 3, 5])
@pytest.mark.parametrize("prompt_tokens", [7, 8])
def test_copies_are_made_by_all_who_write_into_a_partial_block_but_the_last(
    siblings: int, prompt_tokens: int
) -> None:
    pool = BlockPool(num_blocks=20, block_size=4)
    parent = BlockTable(pool)
    parent.append(prompt_tokens)
    last = parent.blocks[-1]
    family = [parent, *(parent.fork() for _ in range(siblings - 1))]
    copies = [table.append(1) for table in family]
    expected = siblings - 1 if prompt_tokens % 4 else 0
    assert sum(map(len, copies)) == expected
    assert copies[-1] == []  # whoever else had the block has left it by then
    assert all(source == last for pairs in copies for source, _ in pairs)
    assert len({destination for pairs in copies for _, destination in pairs}) == expected
    assert not any(table.append(1) for table in family)  # each has its own by now


def test_a_cached_block_is_copied_before_it_is_written_even_by_its_only_holder() -> None:
    world = World(num_blocks=9, block_size=2)
    request = world.start([1, 2, 0, 1, 2])
    world.truncate(request, 3)  # into the second block, which is cached
    assert request.table.blocks_needed(1) == 1
    world.extend(request, [2])
    world.verify()
    assert request.table.blocks == (1, 4)
    assert world.cache.lookup([1, 2, 0, 1, 9]).blocks == (1, 2)  # still there for others


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_b46_a_beam_holds_its_parents_past_and_the_losers_leave_nothing(
    width: int, block_size: int
) -> None:
    rng = random.Random(width * 10 + block_size)
    world = World(num_blocks=60, block_size=block_size)
    beams = [world.start([1, 2, 0, 1, 2])]
    for _ in range(12):
        parents = [rng.choice(beams) for _ in range(width)]
        children = [world.fork(parent) for parent in parents]
        for child, parent in zip(children, parents, strict=True):
            assert child.tokens == parent.tokens
        for beam in beams:
            world.free(beam)
        for token, child in enumerate(children):
            world.extend(child, [token])
        beams = children
        world.verify()  # values equal the dense ones of each beam's own tokens
    world.drain()


# --- bug reports: the prefix cache --------------------------------------------------------------


def fill(world: World, tokens: list[int]) -> None:
    """A sequence that comes and goes; what it computed stays cached."""
    world.free(world.start(tokens))


def test_b05_an_evicted_block_is_found_no_more() -> None:
    world = World(num_blocks=4, block_size=2)
    fill(world, [1, 2, 0, 1, 2])
    assert world.cache.lookup([1, 2, 0, 1, 2]).num_tokens == 4
    world.start([2, 2, 2, 2, 2])  # takes the whole pool
    assert world.cache.lookup([1, 2, 0, 1, 2]).blocks == ()
    world.verify()


def test_b06_a_block_used_again_is_found_by_its_new_content_only() -> None:
    world = World(num_blocks=4, block_size=2)
    fill(world, [1, 2, 0, 1, 2])
    fill(world, [2, 2, 2, 2, 2])
    world.verify()
    assert world.cache.lookup([1, 2, 0, 1, 2]).blocks == ()
    assert world.cache.lookup([2, 2, 2, 2, 2]).num_tokens == 4
    assert len(world.pool.index.blocks_by_key()) == 2


@pytest.mark.parametrize("block_size", [1, 2, 4, 5])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_b07_a_prompt_cached_to_its_end_leaves_a_token_to_compute(
    block_size: int, blocks: int
) -> None:
    world = World(num_blocks=20, block_size=block_size)
    prompt = [i % 3 for i in range(block_size * blocks)]
    world.start(prompt)
    again = world.start(prompt)  # asserts that a token is left, and compares the values
    assert again.cached_tokens == block_size * (blocks - 1)
    world.verify()


def test_b08_behind_a_full_hit_the_chain_goes_on() -> None:
    world = World(num_blocks=20, block_size=2)
    prompt = [1, 2, 0, 1]
    world.start(prompt)
    again = world.start(prompt)  # computes its second block anew: a duplicate
    world.extend(again, [2, 0])
    assert world.cache.lookup([*prompt, 2, 0, 9]).num_tokens == 6
    world.verify()
    world.free(world.running[0])  # one duplicate goes, and is evicted; the other is found
    rest = BlockTable(world.pool)
    rest.append(2 * world.pool.num_free)
    assert world.cache.lookup([*prompt, 2, 0, 9]).blocks == again.table.blocks


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_b09_blocks_are_taken_exactly_at_their_boundary(block_size: int) -> None:
    for length in (block_size - 1, block_size, block_size + 1, 2 * block_size):
        prompt, decode = (BlockTable(BlockPool(9, block_size)) for _ in range(2))
        if length:
            prompt.append(length)
        for place in range(length):
            needed = decode.blocks_needed(1)
            assert needed == (1 if place % block_size == 0 else 0)
            decode.append(1)
        for table in (prompt, decode):
            assert len(table.blocks) == (length + block_size - 1) // block_size
            assert len(table.slots()) == table.num_tokens == length
            assert table.pool.num_free == 8 - len(table.blocks)


def test_b10_a_hit_on_a_free_block_keeps_it_and_counts_as_taking_a_free_block() -> None:
    world = World(num_blocks=5, block_size=2)
    fill(world, [1, 2, 0, 1, 2])
    other = world.start([0, 0])  # takes the block that was never used
    hit = world.cache.lookup([1, 2, 0, 1, 2, 2, 2])
    assert (hit.num_tokens, world.pool.num_free) == (4, 3)
    assert BlockTable(world.pool).blocks_needed(3, hit) == 4  # two revived, two new
    with pytest.raises(OutOfBlocks, match="4 free blocks are needed, the pool has 3"):
        world.start([1, 2, 0, 1, 2, 2, 2])
    world.free(other)
    revived = BlockTable(world.pool)
    revived.append(3, hit)
    assert (revived.blocks[:2], world.pool.num_free) == (hit.blocks, 0)
    assert world.cache.lookup([1, 2, 0, 1, 2, 2, 2]) == hit  # before anything is published again


def test_b11_the_allocation_that_uses_a_hit_does_not_evict_it() -> None:
    world = World(num_blocks=4, block_size=2)
    fill(world, [1, 2, 0, 1, 2, 0])  # the pool is full of what is hit; its end is the oldest
    world.pool.release(world.pool.allocate())  # now its beginning is
    assert world.pool.free_order() == [2, 1, 3]
    again = world.start([1, 2, 0, 1, 2, 0])
    assert again.table.blocks == (1, 2, 3)
    world.verify()


def test_b19_colliding_keys_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "chain_key", lambda parent_key, tokens: bytes(32))
    world = World(num_blocks=20, block_size=2)
    world.start([1, 2, 0, 0, 5])
    assert world.cache.lookup([2, 1, 0, 0, 5]).blocks == ()  # other tokens
    other = world.start([2, 1, 7, 7, 5])
    # Equal tokens behind another beginning, which is cached too, under the same key.
    assert world.cache.lookup([2, 1, 0, 0, 5]).blocks == other.table.blocks[:1]
    assert world.cache.lookup([0, 0, 5]).blocks == ()
    assert world.cache.lookup([1, 2, 0, 0, 5]).num_tokens == 4
    assert world.cache.lookup([1, 2, 9], {"salt": "s"}).blocks == ()
    world.verify()


def test_b20_neighbours_that_cancel_in_a_polynomial_hash_have_other_keys() -> None:
    world = World(num_blocks=9, block_size=4)
    tokens = [40, 50, 60, 70]
    world.start([*tokens, 1])
    for place in range(3):
        twin = list(tokens)
        twin[place] -= 1
        twin[place + 1] += 31
        assert world.cache.lookup([*twin, 1]).blocks == ()
        keys = {index.chain_key(bytes(32), tuple(block)) for block in (tokens, twin)}
        assert len(keys) == 2


def test_a_key_depends_on_all_that_is_before() -> None:
    root = index.Root(epoch=0).key
    first = [index.chain_key(root, (token, 5)) for token in range(3)]
    assert len({index.chain_key(key, (7, 8)) for key in first}) == 3


NAMESPACES = [
    {},
    {"adapter": "a"},
    {"salt": "a"},
    {"adapter": "a", "salt": "b"},
    {"adapter": "b", "salt": "a"},
    {"adaptera": ""},
    {"adapter": "asaltb"},
    {"": ""},
    {"": "", "a": ""},
]


def test_b21_two_namespaces_never_share() -> None:
    assert len({index.Root.of(0, namespace).key for namespace in NAMESPACES}) == len(NAMESPACES)
    world = World(num_blocks=30, block_size=2)
    for namespace in NAMESPACES:
        assert world.start([1, 2, 0], namespace).cached_tokens == 0
    for namespace in NAMESPACES:
        reordered = dict(reversed(namespace.items()))
        assert world.start([1, 2, 0], reordered).cached_tokens == 2
    world.verify()


def test_b22_after_a_change_of_weights_nothing_old_is_found() -> None:
    world = World(num_blocks=12, block_size=2)
    fill(world, [1, 2, 0])
    running, stale = world.start([2, 2, 2]), world.cache.lookup([1, 2, 0])
    world.cache.new_epoch()
    assert cached_blocks(world.pool) == []
    world.extend(running, [1, 1, 1])  # half of its values are the old weights'
    assert cached_blocks(world.pool) == []
    assert world.start([2, 2, 2, 1]).cached_tokens == 0
    with pytest.raises(ValueError, match="block 1 no longer holds what was looked up"):
        BlockTable(world.pool).append(1, stale)
    assert world.start([2, 2, 2, 1]).cached_tokens == 2  # the new weights' own
    world.verify()


def test_b36_a_step_that_fits_into_the_last_block_evicts_nothing() -> None:
    world = World(num_blocks=5, block_size=4)
    request = world.start([1])
    fill(world, [1, 2, 0, 1, 2, 0, 1, 2, 0])
    cached = cached_blocks(world.pool)
    assert request.table.blocks_needed(3) == 0
    world.extend(request, [2, 2, 2])
    assert set(cached) < set(cached_blocks(world.pool))
    assert world.pool.num_free == 3


def test_b37_blocks_that_were_hit_survive_when_the_pool_fills_up() -> None:
    world = World(num_blocks=8, block_size=2)
    fill(world, [1, 2, 0, 1, 2])
    request = world.start([1, 2, 0, 1, 0])
    rest = BlockTable(world.pool)
    rest.append(world.pool.num_free * 2)
    assert not set(rest.blocks) & set(request.table.blocks)
    assert world.cache.lookup([1, 2, 0, 1, 0]).num_tokens == 4


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_b38_blocks_are_handed_out_once_each(block_size: int) -> None:
    world = World(num_blocks=8, block_size=block_size)
    fill(world, [i % 3 for i in range(7 * block_size)])
    table = BlockTable(world.pool)
    table.append(7 * block_size)
    assert sorted(table.blocks) == list(range(1, 8))
    assert sorted(table.slots()) == list(range(block_size, 8 * block_size))


def test_b39_what_was_read_or_published_does_not_change_afterwards() -> None:
    world = World(num_blocks=12, block_size=2)
    tokens = [1, 2, 0]
    table = BlockTable(world.pool)
    table.append(3, world.cache.lookup(tokens))
    world.cache.publish(table, tokens)
    hit, blocks, rows = world.cache.lookup(tokens), table.blocks, padded([table])
    tokens[0] = 7
    table.append(4)
    rows[0][0] = 9
    assert world.cache.lookup([1, 2, 0]) == hit
    assert (blocks, hit.blocks, table.blocks) == ((1, 2), (1,), (1, 2, 3, 4))


def test_b48_cached_and_computed_tokens_add_up_after_every_retraction() -> None:
    world = World(num_blocks=9, block_size=2)
    prompt = [1, 2, 0, 1, 2, 0, 1]
    table = BlockTable(world.pool)
    for retraction in range(4):
        hit = world.cache.lookup(prompt)
        assert hit.num_tokens == (6 if retraction else 0) <= len(prompt) - 1
        table.append(len(prompt) - hit.num_tokens, hit)
        assert table.num_tokens == len(prompt)
        world.cache.publish(table, prompt)
        table.free()
        assert table.num_tokens == 0


def test_b50_the_index_is_never_larger_than_the_pool() -> None:
    world = World(num_blocks=6, block_size=1)
    for i in range(60):
        fill(world, [i, i + 1, i + 2])
        assert len(world.pool.index) <= 5
        assert len(world.pool.index.blocks_by_key()) <= 5
    world.verify()


# --- bug reports: what a kernel reads -----------------------------------------------------------


def test_b12_slots_are_exact_beyond_31_bits() -> None:
    pool = BlockPool(num_blocks=4, block_size=2**30)
    table = BlockTable(pool)
    table.append(3 * 2**30)
    assert table.slots(2**30 - 1, 2**30 + 1) == [2**31 - 1, 2**31]
    last = 2**32 - 1
    assert table.slots(3 * 2**30 - 1) == [last] == [pool.shape.num_slots - 1]
    assert table.slot(3 * 2**30 - 1) == last


def test_b13_a_pool_that_indices_cannot_address_is_refused() -> None:
    shape = PoolShape(num_blocks=2**16, block_size=16)  # 2^20 slots
    shape.check_addressable(index_bits=32, elements_per_slot=2**11 - 1)
    shape.check_addressable(index_bits=64, elements_per_slot=2**20)
    PoolShape(2**27, 16).check_addressable(index_bits=32)  # the last slot is 2^31 - 1
    with pytest.raises(ValueError, match="number 2147483648, beyond 2147483647"):
        PoolShape(2**31 + 1, 1).check_addressable(index_bits=32)
    with pytest.raises(ValueError, match="the largest index of 32 bits"):
        shape.check_addressable(index_bits=32, elements_per_slot=2**11 + 1)


def test_b14_padding_names_a_block_that_nobody_holds() -> None:
    pool = BlockPool(num_blocks=6, block_size=2)
    tables = [BlockTable(pool) for _ in range(4)]
    for table, length in zip(tables, [3, 0, 1, 4], strict=True):
        if length:
            table.append(length)
    assert pool.num_free == 0
    rows = padded(tables)
    for row, table in zip(rows, tables, strict=True):
        assert row[len(table.blocks) :] == [NULL_BLOCK] * (2 - len(table.blocks))
    assert all(NULL_BLOCK not in table.blocks for table in tables)
    assert 0 <= NULL_BLOCK < pool.shape.num_blocks  # a kernel may load it


def test_b15_a_row_that_shrank_and_grew_names_no_former_block() -> None:
    pool = BlockPool(num_blocks=12, block_size=2)
    table, other = BlockTable(pool), BlockTable(pool)
    table.append(8)
    former = table.blocks
    assert padded([table]) == [list(former)]
    table.truncate(3)
    other.append(4)  # the pool is large: it takes fresh blocks
    assert padded([table]) == [list(former[:2])]
    table.append(5)
    assert not set(table.blocks) & set(other.blocks)
    verify_forms([table, other])


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_b18_no_surplus_block_is_named_when_the_last_one_is_full(block_size: int) -> None:
    table = BlockTable(BlockPool(num_blocks=20, block_size=block_size))
    for length in range(1, 12):
        table.append(1)
        flat = csr([table])
        assert flat.indptr == (0, -(-length // block_size))
        assert flat.last_page_len == ((length - 1) % block_size + 1,)
        verify_forms([table])


def tables_of_a_random_past(seed: int) -> Iterator[list[BlockTable]]:
    """Twelve tables that grew and were cut, for several block sizes; some may be empty."""
    rng = random.Random(seed)
    for block_size in (1, 2, 3, 7):
        pool = BlockPool(num_blocks=200, block_size=block_size)
        tables = [BlockTable(pool) for _ in range(12)]
        for _ in range(60):
            rng.choice(tables).append(rng.randint(1, 3))
            (victim := rng.choice(tables)).truncate(rng.randint(0, victim.num_tokens))
        yield tables


def test_both_forms_name_the_same_slots() -> None:
    for tables in tables_of_a_random_past(seed=1):
        verify_forms(tables)
        verify_forms([])


def test_slots_of_many_tables_are_those_of_each() -> None:
    for tables in tables_of_a_random_past(seed=2):
        held = [table for table in tables if table.num_tokens]
        for positions in ([table.num_tokens - 1 for table in held], [0 for _ in held]):
            expected = [table.slot(at) for table, at in zip(held, positions, strict=True)]
            assert slots_at(held, positions) == expected
            for wrong in (-1, held[1].num_tokens):  # though the last block may have room for it
                positions[1] = wrong
                with pytest.raises(ValueError, match=f"position {wrong} is not in 0 to"):
                    slots_at(held, positions)
    assert slots_at([], []) == []


# --- refusals, and the pool's own check ---------------------------------------------------------


def test_b33_every_block_is_either_free_or_held() -> None:
    world = World(num_blocks=9, block_size=2)
    first = world.start([1, 2, 0, 1, 2])
    second = world.start([1, 2, 0, 2])
    third = world.fork(first)
    for request in (first, second, third):
        held = {block for table in tables_of(world) for block in table.blocks}
        assert world.pool.num_free + len(held) == 8
        assert sorted([*world.pool.free_order(), *held]) == list(range(1, 9))
        world.free(request)
    assert sorted(world.pool.free_order()) == list(range(1, 9))


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (4, 0), (-3, 4), (4, -1)])
def test_a_pool_needs_a_null_block_another_one_and_a_slot(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        BlockPool(num_blocks, block_size)


def test_operations_on_blocks_that_nobody_holds_are_refused() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    block = pool.allocate()
    pool.release(block)
    for operation, rule in [
        (lambda: pool.release(block), "block 1 is released, but no table holds it"),
        (lambda: pool.release(NULL_BLOCK), "block 0 is released, but no table holds it"),
        (lambda: pool.acquire(block, "hit"), "block 1 is neither held nor cached"),
        (lambda: pool.acquire(NULL_BLOCK, "fork"), "block 0 is neither held nor cached"),
        (lambda: pool.uncache(block), "block 1 is not cached"),
        (lambda: pool.cache(block, None), "block 1 must be held"),
    ]:
        with pytest.raises(ValueError, match=rule):
            operation()
        verify_pool(pool, [])
    pool.allocate(), pool.allocate()
    with pytest.raises(OutOfBlocks, match="1 free blocks are needed, the pool has 0"):
        pool.allocate()


@pytest.mark.parametrize(
    ("operation", "error", "rule"),
    [
        (lambda table: table.append(0), ValueError, "num_tokens must be at least 1, got 0"),
        (lambda table: table.append(-1), ValueError, "num_tokens must be at least 1, got -1"),
        (lambda table: table.append(1.5), TypeError, "num_tokens must be an int"),
        (lambda table: table.truncate(6), ValueError, "num_tokens must be at most 5, got 6"),
        (lambda table: table.truncate(-1), ValueError, "num_tokens must be at least 0"),
        (lambda table: table.slots(0, 6), ValueError, "positions 0 to 6 are not in 0 to 5"),
        (lambda table: table.slots(3, 2), ValueError, "positions 3 to 2 are not in 0 to 5"),
        (lambda table: table.slots(-1), ValueError, "positions -1 to 5 are not in 0 to 5"),
        (lambda table: table.append(3), OutOfBlocks, "1 free blocks are needed, the pool has 0"),
    ],
)
def test_a_table_names_the_rule_and_stays_as_it_was(operation, error, rule) -> None:
    log: list[Event] = []
    pool = BlockPool(num_blocks=4, block_size=2, sink=log.append)
    table = BlockTable(pool)
    table.append(5)
    before, seen = PoolState.of(pool, [table]), len(log)
    with pytest.raises(error, match=rule):
        operation(table)
    assert PoolState.of(pool, [table]) == before
    assert len(log) == seen


@pytest.mark.parametrize("free", [0, 1])
def test_a_copy_that_does_not_fit_is_refused_and_nothing_has_changed(free: int) -> None:
    pool = BlockPool(num_blocks=3 + free, block_size=2)
    table = BlockTable(pool)
    table.append(3)
    child = table.fork()
    before = PoolState.of(pool, [table, child])
    with pytest.raises(OutOfBlocks, match=f"{1 + free} free .* needed, the pool has {free}"):
        child.append(1 + free)  # the copy and, where it would fit, a block that does not
    assert PoolState.of(pool, [table, child]) == before
    table.free()
    assert child.append(1) == []  # the last holder needs no copy


def test_a_hit_must_begin_a_table_and_still_be_cached() -> None:
    world = World(num_blocks=4, block_size=2)
    fill(world, [1, 2, 0])
    hit = world.cache.lookup([1, 2, 0])
    used = BlockTable(world.pool)
    used.append(1)
    with pytest.raises(ValueError, match="a hit begins a table, this one has 1 tokens"):
        used.append(1, hit)
    used.append(5)  # evicts it
    for operation in (BlockTable.append, BlockTable.blocks_needed):
        with pytest.raises(ValueError, match="block 1 no longer holds what was looked up"):
            operation(BlockTable(world.pool), 1, hit)
    verify_pool(world.pool, [used])


def test_publishing_what_is_not_there_is_refused() -> None:
    world = World(num_blocks=9, block_size=2)
    cache, table, tokens = world.cache, BlockTable(world.pool), [1, 2, 0, 1]
    table.append(3)
    with pytest.raises(ValueError, match="table 0 did not begin with a lookup in this pool"):
        cache.publish(table, tokens[:3])
    table.free()
    table.append(3, cache.lookup(tokens))
    with pytest.raises(ValueError, match="4 are given, table 0 has 3"):
        cache.publish(table, tokens)
    with pytest.raises(ValueError, match="3 tokens cannot be computed: 2 are given"):
        cache.publish(table, tokens[:2], num_computed=3)
    cache.publish(table, tokens, num_computed=1)
    assert cached_blocks(world.pool) == []
    with pytest.raises(ValueError, match="did not begin with a lookup in this pool"):
        PrefixCache(BlockPool(4, 2)).publish(table, tokens[:3])
    cache.publish(table, tokens[:3])
    assert cached_blocks(world.pool) == [table.blocks[0]]  # full blocks only
    table.append(2)
    with pytest.raises(ValueError, match=r"block \d is cached with other tokens than given"):
        cache.publish(table, [2, 2, 0, 1])
    cache.publish(table, tokens)
    cache.publish(table, tokens)
    assert len(world.pool.index) == 2


@pytest.mark.parametrize(("bad", "error"), [(0.5, TypeError), (2**63, ValueError)])
def test_publishing_is_all_or_nothing(bad: float, error: type[Exception]) -> None:
    pool = BlockPool(num_blocks=9, block_size=2)
    cache, table = PrefixCache(pool), BlockTable(pool)
    table.append(5, cache.lookup([1, 2, 0, 1, 2]))
    with pytest.raises(error):
        cache.publish(table, [1, 2, bad, 1, 2])
    assert cached_blocks(pool) == []


@pytest.mark.parametrize(
    ("tokens", "namespace", "error", "rule"),
    [
        ([1.5, 2, 3], {}, TypeError, "integer"),
        ([2**63, 2, 3], {}, ValueError, r"integers of 64 bits, got \(9223372036854775808, 2\)"),
        ([1, 2, 3], {"salt": 7}, TypeError, "maps text to text, got {'salt': 7}"),
    ],
)
def test_what_cannot_be_a_key_is_refused(tokens, namespace, error, rule) -> None:
    with pytest.raises(error, match=rule):
        PrefixCache(BlockPool(4, 2)).lookup(tokens, namespace)


def test_a_table_moves_with_its_tokens_and_leaves_what_it_shared() -> None:
    world = World(num_blocks=9, block_size=2, host_blocks=6)
    parent = world.start([1, 2, 0])
    child = world.fork(parent)
    world.swap_out(child)
    world.verify()
    assert (world.pool.num_free, world.host.num_free) == (6, 3)
    world.swap_in(child)
    world.extend(child, [1, 1])
    world.verify()
    with pytest.raises(ValueError, match="blocks of 2 slots do not fit blocks of 4"):
        move(child.table, BlockPool(9, 4))
    world.drain()


def test_a_move_that_does_not_fit_is_refused_and_nothing_has_changed() -> None:
    world = World(num_blocks=9, block_size=2, host_blocks=3)
    request = world.start([1, 2, 0, 1, 2])
    with pytest.raises(OutOfBlocks, match="3 free blocks are needed, the pool has 2"):
        world.swap_out(request)  # compares both pools with what they were
    assert (world.host.free_order(), request.table.blocks) == ([1, 2], (1, 2, 3))
    world.verify()


def corruptions():
    def lost(pool: BlockPool, table: BlockTable) -> None:
        del pool._free[pool.free_order()[0]]

    def twice(pool: BlockPool, table: BlockTable) -> None:
        pool._free[table.blocks[0]] = None

    def leaked(pool: BlockPool, table: BlockTable) -> None:
        pool.refs[table.blocks[0]] += 1

    def negative(pool: BlockPool, table: BlockTable) -> None:
        pool.refs[NULL_BLOCK] = -1

    def null_held(pool: BlockPool, table: BlockTable) -> None:
        pool.refs[NULL_BLOCK] = 1

    def null_free(pool: BlockPool, table: BlockTable) -> None:
        pool._free[NULL_BLOCK] = None

    def null_cached(pool: BlockPool, table: BlockTable) -> None:
        pool.index.add(NULL_BLOCK, pool.index[table.blocks[0]])

    def one_way(pool: BlockPool, table: BlockTable) -> None:
        del pool.index[table.blocks[0]]

    def empty_key(pool: BlockPool, table: BlockTable) -> None:
        pool.index._blocks[b"old"] = {}

    def wrong_key(pool: BlockPool, table: BlockTable) -> None:
        prefix = pool.index.remove(table.blocks[1])
        pool.index.add(table.blocks[1], dataclasses.replace(prefix, tokens=(9, 9)))

    def orphan(pool: BlockPool, table: BlockTable) -> None:
        pool.index.remove(table.blocks[0])

    def repeated(pool: BlockPool, table: BlockTable) -> None:
        table._blocks.append(table._blocks[0])

    def short(pool: BlockPool, table: BlockTable) -> None:
        table.num_tokens -= 2

    return [
        lost, twice, leaked, negative, null_held, null_free, null_cached, one_way, empty_key,
        wrong_key, orphan, repeated, short,
    ]  # fmt: skip


@pytest.mark.parametrize("corrupt", corruptions())
def test_the_checks_of_these_tests_see_every_kind_of_damage(corrupt) -> None:
    world = World(num_blocks=9, block_size=2)
    table = world.start([1, 2, 0, 1, 2]).table
    world.verify()
    corrupt(world.pool, table)
    with pytest.raises(AssertionError):
        world.verify()


# --- events -------------------------------------------------------------------------------------


def test_events_lead_to_every_state_and_back() -> None:
    world = World(num_blocks=8, block_size=2)
    states = [(0, world.state())]

    def mark() -> None:
        states.append((len(world.log), world.state()))

    first = world.start([1, 2, 0, 1, 2])
    mark()
    world.free(first)
    mark()
    first = world.start([1, 2, 0, 1, 2])  # hits that wait in the middle of the free order
    assert first.cached_tokens == 4
    mark()
    second = world.fork(first)
    mark()
    world.extend(second, [0])  # copy on write
    mark()
    world.extend(first, [1, 1])
    mark()
    world.free(first)
    mark()
    world.start([1, 2, 0, 2])  # a hit, and an eviction
    mark()
    world.truncate(second, 1)
    mark()
    world.cache.new_epoch()
    mark()
    kinds = {type(event) for event in world.log}
    assert kinds == set(events.Event.__args__)  # every kind has been seen
    for (start, before), (stop, after) in itertools.pairwise(states):
        between = world.log[start:stop]
        assert between
        assert replay(between, copy.deepcopy(before)) == after
        assert rewind(between, copy.deepcopy(after)) == before


def test_duplicates_keep_their_order_when_an_eviction_is_undone() -> None:
    world = World(num_blocks=5, block_size=2)
    requests = [world.start([1, 2]) for _ in range(3)]  # a last block is always computed anew
    before, seen = world.state(), len(world.log)
    assert list(before.cached.values()) == [[1, 2, 3]]
    for request in (requests[1], requests[0]):
        world.free(request)
    rest = BlockTable(world.pool)
    rest.append(4)  # block 4, which was never used, and block 2
    after = PoolState.of(world.pool, [requests[2].table, rest])
    assert list(after.cached.values()) == [[1, 3]]
    assert rewind(world.log[seen:], after) == before


def test_a_revived_block_goes_back_to_its_place_when_that_is_undone() -> None:
    world = World(num_blocks=7, block_size=2)
    fill(world, [1, 2, 0, 1, 2])
    before, seen = world.state(), len(world.log)
    assert before.free == [4, 5, 6, 3, 2, 1]
    world.start([1, 2, 0, 1, 0])
    assert rewind(world.log[seen:], world.state()) == before


def test_events_say_what_happened_and_why() -> None:
    world = World(num_blocks=4, block_size=2)
    request = world.start([1, 2, 0])
    child = world.fork(request)
    del world.log[:]
    world.extend(child, [5])
    world.free(request)
    ref, entry, cached = events.RefChanged, events.EntryChanged, events.CachedChanged
    key = {block: world.pool.index.get(block).key.hex() for block in (1, 3)}
    assert world.log == [
        ref(block=3, old=0, new=1, place=0, reason="allocate"),
        entry(table=child.table.id, index=1, old=2, new=3),
        ref(block=2, old=2, new=1, place=0, reason="release"),
        events.LengthChanged(table=child.table.id, old=3, new=4),
        cached(block=3, old=None, new=key[3], parent=key[1], tokens=(0, 5), position=0),
        entry(table=request.table.id, index=1, old=2, new=None),
        ref(block=2, old=1, new=0, place=0, reason="release"),
        entry(table=request.table.id, index=0, old=1, new=None),
        ref(block=1, old=2, new=1, place=0, reason="release"),
        events.LengthChanged(table=request.table.id, old=3, new=0),
    ]


def test_without_a_sink_no_event_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("an event was built")

    for module in ("pool", "table", "prefix"):
        for name in ("RefChanged", "EntryChanged", "LengthChanged", "CachedChanged"):
            monkeypatch.setattr(f"servelab.paging.{module}.{name}", fail, raising=False)
    monkeypatch.setattr("servelab.paging.prefix.EpochChanged", fail)
    world = World(num_blocks=7, block_size=2)
    world.pool.sink = None
    first = world.start([1, 2, 0, 1, 2])
    world.extend(world.fork(first), [0])
    world.free(first)
    world.cache.new_epoch()
