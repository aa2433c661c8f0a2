"""The buddy allocator and the layouts over it and over the block pool: where the slots are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servelab.allocation.buddy import BuddyAllocator, CorruptMemory
from servelab.allocation.layouts import (
    RESERVATIONS,
    ContiguousCache,
    Occupancy,
    PagedCache,
    mean_shares,
)


def test_a_memory_that_is_no_power_of_two_begins_as_the_largest_regions():
    memory = BuddyAllocator(num_units=983, max_units=128)
    assert list(memory.free_regions()) == [
        *((start, 128) for start in range(0, 896, 128)),
        (896, 64),
        (960, 16),
        (976, 4),
        (980, 2),
        (982, 1),
    ]


def test_a_region_is_split_in_halves_and_its_buddies_stay_free():
    memory = BuddyAllocator(num_units=16, max_units=16)
    assert memory.allocate(3) == 0
    assert list(memory.free_regions()) == [(4, 4), (8, 8)]
    assert memory.allocate(5) == 8
    assert memory.allocate(5) is None
    assert (memory.num_free, list(memory.used_regions())) == (4, [(0, 4), (8, 8)])


def test_buddies_merge_but_neighbours_that_are_none_do_not():
    memory = BuddyAllocator(num_units=16, max_units=16)
    starts = [memory.allocate(4) for _ in range(4)]
    assert starts == [0, 4, 8, 12]
    memory.free(4)
    memory.free(8)  # neighbours, but halves of different parents
    assert list(memory.free_regions()) == [(4, 4), (8, 4)]
    assert memory.allocate(8) is None  # external fragmentation: 8 units are free
    memory.free(0)
    memory.free(12)
    assert list(memory.free_regions()) == [(0, 16)]


def test_what_the_buddy_allocator_refuses():
    with pytest.raises(ValueError, match="power of two, got 12"):
        BuddyAllocator(num_units=16, max_units=12)
    memory = BuddyAllocator(num_units=16, max_units=8)
    with pytest.raises(ValueError, match="at most 8, got 9"):
        memory.allocate(9)
    with pytest.raises(ValueError, match="no used region begins at unit 3"):
        memory.free(3)


@given(
    num_units=st.integers(1, 100),
    exponent=st.integers(0, 6),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=60),
)
@settings(max_examples=120, deadline=None)
def test_regions_tile_the_memory_and_merging_restores_the_start(num_units, exponent, moves):
    memory = BuddyAllocator(num_units, max_units=2**exponent)
    begin, held = list(memory.free_regions()), {}
    for take, number in moves:
        if take:
            units = number % memory.max_units + 1
            fits = max((size for _, size in memory.free_regions()), default=0) >= units
            start = memory.allocate(units)
            assert (start is not None) == fits  # a larger region can always be split
            if start is not None:
                held[start] = units
        elif held:
            start = sorted(held)[number % len(held)]
            memory.free(start)
            del held[start]
        memory.check()
        sizes = dict(memory.used_regions())
        assert {start: memory.size_for(units) for start, units in held.items()} == sizes
        assert memory.num_free + sum(sizes.values()) == num_units
    for start in held:
        memory.free(start)
    assert list(memory.free_regions()) == begin


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda memory: memory._used.clear(), "begins at unit 4, the one before ends at 0"),
        (lambda memory: memory._used.update({2: 2}), "begins at unit 2, the one before ends at 4"),
        (lambda memory: memory._free[4].update({8: None}), "end at unit 12, the memory at 8"),
    ],
)
def test_the_check_finds_what_is_wrong(spoil, message):
    memory = BuddyAllocator(num_units=8, max_units=8)
    memory.allocate(4)
    memory.check()
    spoil(memory)
    with pytest.raises(CorruptMemory, match=message):
        memory.check()


def test_the_check_finds_buddies_that_were_not_merged():
    memory = BuddyAllocator(num_units=8, max_units=8)
    memory._free = {8: {}, 4: {0: None, 4: None}, 2: {}, 1: {}}
    with pytest.raises(CorruptMemory, match="at 0 and 4 are buddies"):
        memory.check()


@pytest.mark.parametrize(
    ("policy", "prompt", "output", "reserved"),
    [
        ("max", 100, 25, 2048),
        ("power-of-two", 100, 25, 132),  # the paper's example: 25 outputs, 32 positions
        ("power-of-two", 100, 32, 132),
        ("power-of-two", 100, 33, 164),
        ("power-of-two", 100, 1, 101),
        ("power-of-two", 1500, 540, 2048),  # 1500 + 1024 is beyond the context
        ("oracle", 100, 25, 125),
    ],
)
def test_what_each_policy_reserves(policy, prompt, output, reserved):
    assert RESERVATIONS[policy](prompt, output, 2048) == reserved
    cache = ContiguousCache(num_units=128, unit_tokens=16, policy=policy)
    cache.admit(prompt, output)
    units = -(-reserved // 16)
    assert cache.occupancy() == Occupancy(
        held=prompt,
        reserved=output,
        internal=reserved - prompt - output,
        rounding=16 * (1 << (units - 1).bit_length()) - reserved,
        free=2048 - 16 * (1 << (units - 1).bit_length()),
    )


def test_a_context_that_is_no_power_of_two_takes_the_next_one():
    cache = ContiguousCache(num_units=20, unit_tokens=16, policy="max", max_tokens=100)
    assert [cache.admit(50, 50) is not None for _ in range(3)] == [True, True, False]
    assert cache.occupancy() == Occupancy(held=100, reserved=100, internal=0, rounding=56, free=64)


def test_a_slot_that_was_reserved_is_held_once_its_token_comes():
    cache = ContiguousCache(num_units=8, unit_tokens=16, policy="power-of-two", max_tokens=128)
    number = cache.admit(prompt_tokens=10, output_tokens=5)
    assert cache.room(number) == 5
    assert cache.grow(number, 3)
    assert cache.occupancy() == Occupancy(held=13, reserved=2, internal=3, rounding=14, free=96)
    with pytest.raises(ValueError, match="ends at 15 tokens"):
        cache.grow(number, 3)
    cache.release(number)
    cache.check()
    assert cache.occupancy() == Occupancy(0, 0, 0, 0, 128)


def test_a_paged_sequence_takes_a_block_when_its_last_is_full():
    cache = PagedCache(num_blocks=3, block_size=4)
    number = cache.admit(prompt_tokens=7, output_tokens=5)
    assert (cache.room(number), cache.pool.num_free) == (1, 1)
    assert cache.grow(number)
    assert cache.occupancy() == Occupancy(held=8, reserved=0, internal=0, rounding=0, free=4)
    other = cache.admit(1, 1)
    assert other is not None
    assert not cache.grow(number)  # and nothing has changed
    assert cache.occupancy() == Occupancy(held=9, reserved=0, internal=3, rounding=0, free=0)
    cache.release(other)
    assert cache.grow(number)
    cache.check()


def test_the_watermark_stays_free_for_those_that_run():
    cache = PagedCache(num_blocks=200, block_size=1, watermark=0.01)
    first = cache.admit(190, 8)
    assert cache.admit(9, 1) is None  # it would leave 1 of 200 blocks
    assert cache.admit(8, 1) is not None
    assert cache.pool.num_free == 2
    assert cache.grow(first)
    assert cache.pool.num_free == 1


@pytest.mark.parametrize("cache", [PagedCache(8, 16), ContiguousCache(8, 16, "oracle", 128)])
def test_a_sequence_that_could_never_end_is_refused(cache):
    with pytest.raises(ValueError, match="at most 128 tokens here, 129 are asked for"):
        cache.admit(100, 29)
    with pytest.raises(ValueError, match="output_tokens must be at least 1"):
        cache.admit(100, 0)


def test_what_the_layouts_refuse():
    with pytest.raises(ValueError, match="policy must be one of max, power-of-two, oracle"):
        ContiguousCache(8, 16, "min")
    with pytest.raises(ValueError, match="watermark must be at least 0 and below 1, got 1"):
        PagedCache(8, 16, watermark=1)
    with pytest.raises(ValueError, match="held must be at least 0, got -1"):
        Occupancy(-1, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="at least one sample"):
        mean_shares([])


@given(
    policy=st.sampled_from([*RESERVATIONS, "paged"]),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6)), max_size=80),
)
@settings(max_examples=100, deadline=None)
def test_parts_add_up_whatever_happens(policy, moves):
    """A model of the sequences beside the layout: held and reserved are theirs."""
    cache = PagedCache(20, 4) if policy == "paged" else ContiguousCache(20, 4, policy, 64)
    lengths: dict[int, list[int]] = {}
    for kind, number in moves:
        chosen = sorted(lengths)[number % len(lengths)] if lengths else None
        if kind < 2:
            prompt, output = number % 30 + 1, number // 30 % 30 + 1
            sequence = cache.admit(prompt, output)
            if sequence is not None:
                lengths[sequence] = [prompt, prompt + output]
        elif chosen is not None and kind == 2 and lengths[chosen][0] < lengths[chosen][1]:
            room, before = cache.room(chosen), cache.occupancy()
            grown = cache.grow(chosen)
            assert grown or not room
            lengths[chosen][0] += grown
            assert grown or cache.occupancy() == before
        elif chosen is not None:
            cache.release(chosen)
            del lengths[chosen]
        cache.check()
        parts = cache.occupancy()
        units = cache.unit_parts()
        assert len(units) == 20
        for part in ("held", "reserved", "internal", "rounding", "free"):
            shared = 0 if part == "free" else 3 * len(lengths)  # slots in a unit of two parts
            assert abs(4 * units.count(part) - getattr(parts, part)) <= shared, part
        assert parts.total == cache.num_slots == 80
        assert parts.held == sum(now for now, _ in lengths.values())
        to_come = sum(end - now for now, end in lengths.values())
        assert parts.reserved == (0 if policy == "paged" else to_come)
        if policy == "paged":
            assert parts.internal <= 3 * len(lengths)
        if policy == "oracle":
            assert parts.internal == 0
