"""Bug reports of other engines (tests/test_bugs.py), held against the decoder on the CPU.

What is expected is written out here, or computed by the dense decoder or by transformers.
"""

from __future__ import annotations

import cmath
import random
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from servelab.decoder import DenseCache, DenseDecoder, ReferenceAttention, Rope
from servelab.decoder.rope import rotate
from servelab.paging import PoolShape
from servelab.serving import Engine, Plan, SamplingParams, uniform
from tests.kernel_steps import Step, random_step
from tests.plans import GREEDY, TOLERANCE, SpyRunner, World, check_rows, dense_logits, twins
from tests.tiny import CONFIGS, pair, widen

Pair = tuple[DenseDecoder, SpyRunner]


@pytest.fixture(scope="module")
def llama() -> Pair:
    """Three query heads to a KV head."""
    return twins("llama-gqa")


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def attended(step: Step, window: int | None = None) -> torch.Tensor:
    """What the reference backend makes of a step; its tables end in null blocks, as a runner's."""
    tables = step.batch.block_tables
    step.batch.block_tables = tables.where(tables < step.layer_cache.shape[1], 0)
    backend = ReferenceAttention()
    backend.write(step.layer_cache, step.keys, step.values, step.batch)
    return backend.attend(step.layer_cache, step.q, step.batch, 0.25, window)


# --- slots --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [[(1, 4), (1, 17), (1, 0)], [(1, 5), (4, 0), (2, 17)]])
def test_b16_attention_reads_no_slot_that_nobody_wrote(
    rows: list[tuple[int, int]], window: int | None
) -> None:
    step = random_step(rows, block_size=8, dtype=torch.float64)
    out = attended(step, window)
    behind = step.layer_cache[:, step.batch.block_tables.long()]
    assert behind.isnan().any(), "every slot of the rows' blocks was written: nothing to see"
    close(out, step.expected(0.25, window))


def test_b16_the_decoder_does_not_read_the_end_of_a_block(llama: Pair) -> None:
    dense, runner = llama
    world = World(runner, 20, 8)
    for length in (1, 13, 6):
        world.add(range(length))
    for _ in range(4):  # a prompt each, then steps in which the longest has a block more
        rows = [world.row(sequence) for sequence in world.sequences]
        world.step(rows)
        assert runner.store.data[:, :, runner.seen_batch.block_tables.long()].isnan().any()
        check_rows(world, dense, rows)


def test_b17_attention_stores_by_assignment() -> None:
    step = random_step([(1, 4), (3, 17)])
    step.layer_cache.nan_to_num_()
    backend = ReferenceAttention()
    for factor in (1.0, 2.0):
        backend.write(step.layer_cache, step.keys * factor, step.values * factor, step.batch)
    stored = step.layer_cache.flatten(1, 2)[:, step.batch.slots]
    torch.testing.assert_close(stored, 2 * torch.stack((step.keys, step.values)), rtol=0, atol=0)


def test_b17_a_block_used_again_holds_nothing_of_its_last_user(llama: Pair) -> None:
    dense, runner = llama
    world = World(runner, 5, 4)
    runner.store.data.zero_()  # so that a sum over what was there is right the first time
    used = []
    for prompt in (range(40, 54), range(13), range(90, 76, -1)):
        sequence = world.add(prompt)
        rows = [world.row(sequence)]
        world.step(rows)
        check_rows(world, dense, rows)
        assert sequence.table is not None
        used.append(set(sequence.table.blocks))
        sequence.table.free()
    assert used[0] == used[1] == used[2]


# --- positions and tables -----------------------------------------------------------------------


def test_b42_behind_an_adopted_prefix_only_the_rest_is_written_each_at_its_position(
    llama: Pair,
) -> None:
    dense, runner = llama
    engine = Engine(runner, num_blocks=20, block_size=4)
    runner.store.poison()
    prompt, once = list(range(60, 73)), replace(GREEDY, max_tokens=1)
    engine.generate([prompt[:10]], once)
    before = runner.store.data.clone()
    (answer,) = engine.generate([prompt], once)
    assert answer.num_cached_tokens == 8
    batch = runner.seen_batch
    assert batch.tokens.tolist() == prompt[8:]
    assert batch.positions.tolist() == list(range(8, 13))
    table = batch.block_tables[0].tolist()
    slots = [table[position // 4] * 4 + position % 4 for position in range(13)]
    assert batch.slots.tolist() == slots[8:]
    after = runner.store.data
    same = (after == before) | (after.isnan() & before.isnan())
    touched = (~same).flatten(2, 3).sum((0, 1, 3, 4)).nonzero()[:, 0]
    assert touched.tolist() == sorted(slots[8:])
    cache = DenseCache(dense.spec, 1, 13, dtype=torch.float64)
    expected = dense(torch.tensor([prompt]), cache, last_only=True)[0, -1]
    close(runner.seen_logits[0], expected)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        stored = after[layer].flatten(1, 2)[:, slots]  # (2, 13, K, d)
        close(stored, torch.stack((keys[0], values[0])).transpose(1, 2))


def test_b43_every_row_reads_its_own_table_after_rows_were_given_up_and_reused(
    llama: Pair,
) -> None:
    dense, runner = llama
    world = World(runner, 60, 4)
    chance = random.Random(4)
    live = [world.add([chance.randrange(97) for _ in range(n)]) for n in (9, 2, 6, 13, 5)]
    for step in range(16):
        if step % 3 == 2:  # one leaves, and another takes its blocks
            gone = live.pop(chance.randrange(len(live)))
            assert gone.table is not None
            gone.table.free()
            live.append(world.add([chance.randrange(97) for _ in range(1 + step)]))
        # Some wait, and come back when their row on the device has gone to another.
        rows = [world.row(sequence) for sequence in chance.sample(live, 2)]
        world.step(rows)
        check_rows(world, dense, rows)
    assert len(runner._tables.entries) == 4, "more rows than fit were never given up"


def test_b43_steps_of_one_shape_read_each_their_own_tables(llama: Pair) -> None:
    dense, runner = llama
    world = World(runner, 20, 4)
    for prompt in (range(10, 16), range(50, 56), range(90, 84, -1)):
        world.add(prompt)
    for _ in range(2):  # a chunk of 6 tokens each, then one token behind 6
        for sequence in world.sequences:
            rows = [world.row(sequence)]
            world.step(rows)
            check_rows(world, dense, rows)


def test_a_block_copied_under_a_running_sequence_is_read_where_it_went(llama: Pair) -> None:
    """The device knows the sequence's table already, and only its last block has changed."""
    dense, runner = llama
    world = World(runner, 20, 4)
    first, second = world.add(range(20, 26)), world.add(range(20, 26))
    world.step([world.row(first)])
    assert first.table is not None
    second.table, second.num_computed_tokens = first.table.fork(), 6
    second.token_ids.append(96)
    for _ in range(3):
        rows = [world.row(first), world.row(second)]  # the first copies, the second need not
        world.step(rows)
        check_rows(world, dense, rows)


def test_a_plan_swaps_out_then_copies_then_swaps_in(llama: Pair) -> None:
    _, runner = llama
    runner.bind(PoolShape(4, 2), num_swap_blocks=4)
    for block in range(4):
        runner.store.data[:, :, block] = block
        runner.store.swap[:, :, block] = 10 + block
    runner.execute(Plan(swap_out=[(1, 3)], copies=[(2, 1)], swap_in=[(1, 2)]))

    def held(pool: torch.Tensor) -> list[float]:
        assert all(len(block.unique()) == 1 for block in pool.unbind(2)), "a block in two minds"
        return pool[0, 0, :, 0, 0, 0].tolist()

    assert held(runner.store.data) == [0, 2, 11, 3]
    assert held(runner.store.swap) == [10, 11, 12, 1]


# --- rotation, groups, masks --------------------------------------------------------------------


def test_b45_a_pair_is_a_coordinate_and_the_one_half_a_head_behind() -> None:
    positions, head_dim, theta = [0, 1, 7, 1000], 6, 500.0
    x = torch.randn(4, 2, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rotation = Rope(theta).rotation(torch.tensor(positions), head_dim, torch.float64)
    expected = torch.empty_like(x)
    for place, position in enumerate(positions):
        for head in range(2):
            for i in range(head_dim // 2):
                point = complex(x[place, head, i], x[place, head, i + head_dim // 2])
                point *= cmath.rect(1, position * theta ** (-2 * i / head_dim))
                expected[place, head, i] = point.real
                expected[place, head, i + head_dim // 2] = point.imag
    close(rotate(x, rotation), expected)


@pytest.mark.parametrize("window", [None, 4])
def test_b45_heads_of_a_group_read_one_kv_head_and_an_unmapped_position_weighs_nothing(
    window: int | None,
) -> None:
    # Zeros where nobody wrote: a key of zeros scores 0, not minus infinity, and shows as such.
    step = random_step(
        [(1, 9), (1, 2), (3, 5), (4, 0)], group=3, kv_heads=2, block_size=4, dtype=torch.float64
    )
    step.layer_cache.nan_to_num_()
    close(attended(step, window), step.expected(0.25, window))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "mistral-window"])
def test_b45_logits_of_chunks_and_steps_are_those_of_transformers(name: str) -> None:
    reference = widen(pair(name)[0], CONFIGS[name]["rope_theta"])
    world = World(twins(name)[1], 20, 4)
    world.runner.store.data.zero_()  # as above
    chance = random.Random(9)
    prompts = [[chance.randrange(97) for _ in range(length)] for length in (14, 5, 9)]
    logits = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    sequences = [world.add(prompt) for prompt in prompts]
    for step in ((6, 3, 0), (1, 1, 8), (7, 1, 1)):
        counts = [(index, new) for index, new in enumerate(step) if new]
        world.step([world.row(sequences[index], new) for index, new in counts])
        counts.sort(key=lambda count: count[1] > 1)
        for (index, _), found in zip(counts, world.runner.seen_logits, strict=True):
            close(found, logits[index][sequences[index].num_computed_tokens - 1])


# --- draws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [0, 3])
def test_b40_draws_depend_on_the_requests_seed_and_no_other_state(
    llama: Pair, earlier: int
) -> None:
    dense, runner = llama
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(temperature=1.5, n=2, seed=5, max_tokens=8)

    def drawn(child: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(8):
            shares = (dense_logits(dense, tokens) / 1.5).softmax(-1).tolist()
            point = uniform(5, child, len(tokens))
            tokens.append(next(i for i, total in enumerate(accumulate(shares)) if total > point))
        return tokens[5:]

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(earlier)
    engine = Engine(runner, num_blocks=40, block_size=4)
    engine.generate([[9, 8]] * earlier, SamplingParams(temperature=2.0, max_tokens=4))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    (answer,) = engine.generate([prompt], params)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert [output.token_ids for output in answer.outputs] == [drawn(0), drawn(1)]
    assert drawn(0) != drawn(1)
