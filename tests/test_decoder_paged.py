"""The paged decoder against the dense one in float64, on pools full of NaN.

A slot that was never written, or whose block belongs to somebody else, must not reach a logit.
"""

from __future__ import annotations

import functools
import random
import re
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from servelab import models
from servelab.decoder import DenseDecoder, KvStore, PagedDecoder, TorchRunner, greedy, packing
from servelab.decoder.kv_store import transfer
from servelab.decoder.staging import DeviceTables, upload
from servelab.paging import BlockPool, BlockTable, PoolShape, move
from servelab.serving import (
    Engine,
    EngineClosed,
    Plan,
    RunnerLost,
    SamplingParams,
    beam_search,
)
from tests.plans import SpyRunner, World, check_rows, dense_logits, paged_twin, twins
from tests.serving_world import check_pools
from tests.tiny import CONFIGS


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[DenseDecoder, SpyRunner]]:
    return {name: twins(name) for name in CONFIGS}


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), block_size=st.integers(1, 17))
def test_any_mixture_of_rows_equals_the_dense_decoder(
    pairs: dict[str, tuple[DenseDecoder, SpyRunner]], name: str, seed: int, block_size: int
) -> None:
    dense, runner = pairs[name]
    chance = random.Random(seed)
    world = World(runner, 120 // block_size + 12, block_size, seed)
    for _ in range(chance.randint(1, 5)):
        world.add([chance.randrange(97) for _ in range(chance.randint(1, 12))])
    for _ in range(6):
        rows = []
        for sequence in world.sequences:
            left = len(sequence.token_ids) - sequence.num_computed_tokens
            if left and chance.random() < 0.8:
                new = chance.randint(1, left)
                rows.append(world.row(sequence, new, sampled=chance.random() < 0.9))
        chance.shuffle(rows)
        if rows:
            world.step(rows)
            if any(row.samples for row in rows):
                check_rows(world, dense, rows)


needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no g++")
Pairs = dict[str, tuple[DenseDecoder, SpyRunner]]


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "mistral-window"])
def test_b30_neighbours_order_and_padding_do_not_change_a_row(pairs: Pairs, name: str) -> None:
    runner = pairs[name][1]
    chance = random.Random(5)
    prompts = [[chance.randrange(97) for _ in range(n)] for n in (3, 17, 1, 8)]

    def generated(order: list[int]) -> dict[int, list[int]]:
        world = World(runner, 40, 4, seed=sum(order))
        sequences = {index: world.add(prompts[index]) for index in order}
        for _ in range(8):
            world.step([world.row(sequences[index]) for index in order])
        return {index: sequence.token_ids for index, sequence in sequences.items()}

    alone = {index: generated([index])[index] for index in range(4)}
    assert len({token for tokens in alone.values() for token in tokens[-8:]}) > 4
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3]):
        assert generated(order) == {index: alone[index] for index in order}


@pytest.mark.parametrize("cached", [1, 4, 7, 8])
def test_b41_a_prefix_hit_starts_at_its_position_and_reads_the_cached_keys(
    pairs: Pairs, cached: int
) -> None:
    dense, runner = pairs["llama-gqa"]
    world = World(runner, 20, 4)
    tokens = list(range(40, 52))
    first = world.add(tokens)
    world.step([world.row(first, cached, sampled=False)])
    second = world.add(tokens)  # a table of its own that begins with the same blocks
    assert first.table is not None
    second.table, second.num_computed_tokens = first.table.fork(), cached
    rows = [world.row(second)]
    assert len(world.copies) == (cached % 4 != 0)  # a block that is not full is copied
    world.step(rows)
    check_rows(world, dense, rows)
    rows = [world.row(first)]  # whose keys the other must not have touched
    world.step(rows)
    check_rows(world, dense, rows)


def test_swapped_sequences_go_on_where_they_were(pairs: Pairs) -> None:
    dense, runner = pairs["qwen3"]
    world = World(runner, 12, 4, num_swap_blocks=9)
    host = BlockPool(9, 4)
    sequence, other = world.add(range(10)), world.add(range(50, 57))
    world.step([world.row(sequence), world.row(other)])
    sequence.table, out = move(sequence.table, host)
    assert len(out) == 3
    runner.execute(Plan(swap_out=out))
    for old, _ in out:
        runner.store.data[:, :, old] = torch.nan
    filler = BlockTable(world.pool)  # so that it comes back to other blocks
    filler.append(5)
    sequence.table, back = move(sequence.table, world.pool)
    assert [new for _, new in back] != [old for old, _ in out]
    rows = [world.row(sequence), world.row(other)]
    world.result = runner.execute(Plan([*rows], swap_in=back))
    check_rows(world, dense, rows)


def test_copies_are_carried_out_one_after_the_other() -> None:
    store = KvStore(models.get("smollm2-135m"), PoolShape(6, 2))
    for block in range(6):
        store.data[:, :, block] = block
    transfer(store.data, store.data, [(1, 2), (2, 3), (4, 5), (1, 4), (5, 1)])
    kept = store.data[:, :, :, 0, 0, 0]
    assert torch.equal(kept, torch.tensor([0.0, 4, 1, 1, 1, 4]).expand_as(kept))


def test_b15_a_reused_or_shortened_row_has_no_stale_entry() -> None:
    pool, device = BlockPool(40, 2), torch.device("cpu")
    tables = DeviceTables(2, device)

    def entries(table: BlockTable, first_new: int) -> list[int]:
        tables.begin([table.id], 4)
        row = tables.place(table, first_new, table.num_tokens, table.slots()[-1])
        tables.write(*upload(device, [tables.places, tables.blocks]))
        return tables.entries[row].tolist()

    long = BlockTable(pool)
    long.append(8)
    assert entries(long, 0) == [1, 2, 3, 4, 0, 0, 0, 0]
    long.truncate(3)
    assert entries(long, 2) == [1, 2, 0, 0, 0, 0, 0, 0]
    long.append(5)
    assert entries(long, 3) == [1, 2, *long.blocks[2:], 0, 0, 0, 0]
    for _ in range(5):  # more tables than rows: they are used again
        short = BlockTable(pool)
        short.append(1)
        assert entries(short, 0) == [short.blocks[0], 0, 0, 0, 0, 0, 0, 0]
    assert len(tables.entries) == 2
    assert entries(long, 7) == [*long.blocks, 0, 0, 0, 0]  # all of it, since its row was lost


def test_only_a_block_that_begins_is_sent(pairs: Pairs) -> None:
    world = World(pairs["llama-gqa"][1], 60, 2)
    for length in (9, 14, 3):
        world.add(range(length))
    world.step([world.row(sequence) for sequence in world.sequences])
    tables = world.runner._tables
    for begin in (1, 2, 1):
        assert sum(len(sequence.token_ids) % 2 for sequence in world.sequences) == begin
        world.step([world.row(sequence) for sequence in world.sequences])
        assert len(tables.places) == begin


def test_a_failed_step_leaves_the_runner_usable(pairs: Pairs) -> None:
    dense, runner = pairs["llama-gqa"]
    world = World(runner, 20, 4)
    first, good, bad = world.add(range(6)), world.add(range(12)), world.add([4, 5])
    world.step([world.row(first, 4, sampled=False)])
    assert first.table is not None
    # Behind a hit, in a table that the device first meets in the step that fails.
    good.table, good.num_computed_tokens = first.table.fork(), 4
    row = world.row(good)
    with pytest.raises(ValueError, match="positions 0 to 2 are not in 0 to 0"):
        runner.execute(Plan([row, (bad, 2, 0, ())]))
    bad.table = None
    with pytest.raises(ValueError, match="r2/0 has no block table"):
        runner.execute(Plan([row, (bad, 1, 0, ())]))
    world.step([row])
    check_rows(world, dense, [row])
    assert runner.execute(Plan()).tokens == []


def test_samples_of_one_row_and_reports_come_back_in_the_plans_order(pairs: Pairs) -> None:
    dense, runner = pairs["llama-gqa"]
    world = World(runner, 20, 4)
    several = world.add([5, 6, 7], SamplingParams(n=3, seed=1, logprobs=2))
    several.seats = 3
    chunk, single = world.add(range(9)), world.add([8], SamplingParams(temperature=0, logprobs=0))
    rows = [world.row(several), world.row(chunk, 4, sampled=False), world.row(single)]
    result = runner.execute(Plan([*rows]))
    assert [len(tokens) for tokens in result.tokens] == [3, 0, 1]
    assert result.logprobs is not None
    assert result.logprobs[1] is None
    for row, tokens, reports in zip(rows, result.tokens, result.logprobs, strict=True):
        expected = dense_logits(dense, row.sequence.token_ids).log_softmax(-1)
        for token, report in zip(tokens, reports or [], strict=True):
            assert next(iter(report)) == token
            for shown, logprob in report.items():
                assert logprob == pytest.approx(float(expected[shown]), abs=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_generates_what_the_dense_decoder_does(pairs: Pairs, name: str) -> None:
    """A pool so small that sequences are pre-empted, chunks of 5 tokens, prefixes shared."""
    dense, runner = pairs[name]
    engine = Engine(runner, num_blocks=14, block_size=3, max_num_batched_tokens=5, max_num_seqs=4)
    runner.store.poison()
    chance = random.Random(2)
    common = [chance.randrange(97) for _ in range(7)]
    prompts = [common + [chance.randrange(97) for _ in range(n)] for n in (1, 4, 2, 9, 1)]
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9))
    assert sum(answer.num_preemptions for answer in answers) > 0
    assert sum(answer.num_cached_tokens for answer in answers) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = greedy(dense, torch.tensor([prompt]), 9)[0].tolist()
        assert answer.outputs[0].token_ids == expected


def test_a_runner_that_another_engine_has_taken_answers_the_first_no_more(pairs: Pairs) -> None:
    """Its keys and values are gone: whatever it said would be wrong."""
    runner = pairs["llama-gqa"][1]
    params = SamplingParams(temperature=0, max_tokens=4)
    first = Engine(runner, num_blocks=14, block_size=3)
    request = first.add([1, 2, 3], params)
    first.step()
    second = Engine(runner, num_blocks=14, block_size=3)
    for ask in (
        first.step,
        lambda: first.generate([4, 5], params),
        lambda: first.add([4, 5]),
        lambda: list(first.stream([4, 5], params)),
    ):
        with pytest.raises(EngineClosed, match="another engine has bound it since"):
            ask()
    assert first.unfinished == [request]
    (answer,) = second.generate([1, 2, 3], params)
    expected = greedy(pairs["llama-gqa"][0], torch.tensor([[1, 2, 3]]), 4)[0].tolist()
    assert answer.outputs[0].token_ids == expected


@pytest.mark.parametrize("ask", ["generate", "stream", "beam_search"])
def test_the_first_call_of_an_engine_whose_runner_was_taken_raises(pairs: Pairs, ask: str) -> None:
    """It must be no empty answer: nobody looks for the error of an engine that was never asked."""
    runner = pairs["llama-gqa"][1]
    first = Engine(runner, num_blocks=14, block_size=3)
    Engine(runner, num_blocks=14, block_size=3)
    calls = {
        "generate": lambda: first.generate([1, 2, 3]),
        "stream": lambda: list(first.stream([1, 2, 3])),
        "beam_search": lambda: beam_search(first, [1, 2, 3], 2, 2),
    }
    with pytest.raises(EngineClosed, match="another engine has bound it since"):
        calls[ask]()
    assert first.unfinished == []
    check_pools(first.scheduler)


def test_copies_of_an_engine_whose_runner_was_taken_touch_no_block(pairs: Pairs) -> None:
    runner = pairs["llama-gqa"][1]
    first = Engine(runner, num_blocks=14, block_size=3)
    first.add([1, 2, 3, 4], SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True))
    first.step()
    Engine(runner, num_blocks=14, block_size=3)
    runner.store.data.normal_()
    kept = runner.store.data.clone()
    with pytest.raises(EngineClosed):
        first.step()
    assert first.scheduler.schedule().copies, "the step was to copy a block"
    assert torch.equal(runner.store.data, kept)


def test_what_cannot_be_run_is_refused(pairs: Pairs) -> None:
    runner = TorchRunner(PagedDecoder(pairs["llama-gqa"][0].spec).initialise())
    with pytest.raises(RuntimeError, match="no pool yet"):
        runner.execute(Plan())
    with pytest.raises(MemoryError, match=r"a pool of 1000000000000 blocks needs .* GiB on cpu"):
        Engine(runner, num_blocks=10**12, block_size=1024)
    runner.attention.index_bits = 32
    with pytest.raises(ValueError, match="largest index of 32 bits"):
        runner.bind(PoolShape(2**22 + 1, 16))  # at 2**22 the last element is number 2**31 - 1
    with pytest.raises(ValueError, match="'reference', 'cpu' or 'triton', got 'flash'"):
        TorchRunner(runner.model, attention="flash")
    for wrong in (torch.float8_e5m2, "float64"):
        with pytest.raises(ValueError, match=rf"dtype must be one of fp64, .*, got {wrong}"):
            PagedDecoder(runner.spec, dtype=wrong)
    assert 0 < runner.available_kv_bytes(0.5) <= 2**30
    spec = runner.spec
    wide = replace(spec.layers[0], mlp=replace(spec.layers[0].mlp, width=81))
    with pytest.raises(ValueError, match="all layers must have one shape"):
        PagedDecoder(replace(spec, layers=(wide, *spec.layers[1:])))
    heads = replace(spec.layers[0].attention, num_kv_heads=1)
    mixed = replace(spec, layers=(replace(spec.layers[0], attention=heads), *spec.layers[1:]))
    with pytest.raises(ValueError, match="all layers must have one shape"):
        PagedDecoder(mixed)
    with pytest.raises(ValueError, match="learned positions"):
        PagedDecoder(models.get("opt-13b"), device="meta")


def test_a_device_that_does_not_answer_is_lost(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(pairs["llama-gqa"][1], 20, 4)
    row = world.row(world.add([1, 2]))

    def fault(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    monkeypatch.setattr(world.runner, "logits", fault)
    with pytest.raises(RuntimeError, match="CUDA error"):
        world.runner.execute(Plan([row]))
    monkeypatch.setattr(world.runner, "device", torch.device("cuda"))
    with pytest.raises(RunnerLost, match="the CUDA device is lost: CUDA error: an illegal"):
        world.runner.execute(Plan([row]))


@pytest.mark.parametrize("attention", ["reference", pytest.param("cpu", marks=needs_gcc)])
def test_a_compiled_step_equals_the_dense_decoder(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """The graph, its padding and the call out of it; the next test has the generated code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    dense = pairs["qwen3"][0]
    world = World(SpyRunner(paged_twin(dense), attention, compile=True), 20, 4)
    for length in (5, 9, 3):
        world.add(range(length))
    for _ in range(4):  # a prompt, and steps of three rows in a bucket of four
        rows = [world.row(sequence) for sequence in world.sequences]
        world.step(rows)
        check_rows(world, dense, rows)


@pytest.mark.skipif(not packing.available(), reason="torch has no bf16 kernels for this CPU")
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="this machine has no C++ compiler"
)
def test_generated_code_holds_every_matrix_packed(pairs: Pairs) -> None:
    """In torch 2.13 a freezing that does not take place says nothing."""
    dense = pairs["llama-gqa"][0]
    plain, compiled = (
        World(SpyRunner(paged_twin(dense, dtype=torch.bfloat16), compile=flag), 20, 4)
        for flag in (False, True)
    )
    for world in (plain, compiled):
        sequence = world.add(range(8))
        world.step([world.row(sequence, 7)])
    _, (code,) = run_and_get_code(compiled.step, [compiled.row(compiled.sequences[0])])
    plain.step([plain.row(plain.sequences[0])])
    assert "_frozen_param" in code  # weights are constants of the graph,
    assert not re.findall(r"extern_kernels\.\w+", code)  # and none is read in plain order
    found, expected = compiled.runner.seen_logits, plain.runner.seen_logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.std()) / 20)


@pytest.mark.skipif(not packing.available(), reason="torch has no bf16 kernels for this CPU")
@pytest.mark.parametrize("name", ["llama-mqa-biases", "llama-gqa"])  # with biases, and without
def test_packed_weights_give_the_same_logits(pairs: Pairs, name: str) -> None:
    dense = pairs[name][0]
    plain, packed = (paged_twin(dense, dtype=torch.bfloat16) for _ in range(2))
    worlds = [World(SpyRunner(model), 20, 4) for model in (plain, packed.pack())]
    for new in (7, 1):  # a prompt, and a step of decoding
        found = []
        for world in worlds:
            sequence = world.sequences[0] if world.sequences else world.add(range(8))
            world.step([world.row(sequence, new)])
            found.append(world.runner.seen_logits)
        assert found[0].std() > 0.1
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=float(found[0].std()) / 20)
    with pytest.raises(RuntimeError, match="the weights are packed"):
        packed.weights()
    with pytest.raises(ValueError, match="compile packs the weights itself"):
        TorchRunner(packed, compile=True)


def test_what_torch_cannot_pack_is_refused(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = pairs["llama-gqa"][0].spec
    with pytest.raises(ValueError, match=r"only bf16 on a CPU is packed, not torch\.float32"):
        PagedDecoder(spec).pack()
    monkeypatch.setattr(packing, "available", lambda: False)
    with pytest.raises(ValueError, match="torch has no bf16 kernels for this CPU"):
        PagedDecoder(spec, dtype=torch.bfloat16).pack()
