"""The saturated queue, the vLLM paper's Figure 2 on it, and block sizes, against exact answers."""

from collections import deque
from itertools import cycle, islice, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servelab.allocation.fragmentation import (
    ALLOCATORS,
    PAPER_SHARES,
    block_sizes,
    cache_layout,
    figure_2,
    paper_tokens,
)
from servelab.allocation.layouts import RESERVATIONS, ContiguousCache, PagedCache
from servelab.allocation.lengths import (
    Quantiles,
    Workload,
    fill,
    live_lengths,
    sharegpt,
    short_instructions,
)
from servelab.allocation.saturation import saturate

WEIGHTS = live_lengths(sharegpt())
MEAN_LENGTH = sum(length * weight for length, weight in enumerate(WEIGHTS))


def token_by_token(layout, requests, steps, max_batched_tokens):
    """The same queue, written plainly: every sequence grows in every step."""
    running, waiting, seen, counts = [], deque(), [], [0, 0]
    requests = enumerate(requests)
    for now in range(steps):
        for one in [one for one in running if one["end"] == now]:
            layout.release(one["sequence"])
            running.remove(one)
            counts[0] += 1
        preempted = False
        for one in list(running):
            while one in running and not layout.grow(one["sequence"]):
                last = running.pop()
                layout.release(last["sequence"])
                waiting.appendleft((last["number"], last["tokens"] + 1, last["end"] - now))
                counts[1] += 1
                preempted = True
            one["tokens"] += 1
        batched = len(running)
        while not preempted:
            if not waiting:
                number, (prompt, output) = next(requests)
                waiting.append((number, prompt, output))
            number, tokens, output = waiting[0]
            if batched + tokens > max_batched_tokens:
                break
            sequence = layout.admit(tokens, output)
            if sequence is None:
                break
            waiting.popleft()
            batched += tokens
            running.append(
                {"number": number, "sequence": sequence, "tokens": tokens, "end": now + output}
            )
        if now >= steps // 4:
            seen.append((layout.occupancy(), len(running)))
    return seen, counts


@given(
    kind=st.sampled_from(ALLOCATORS),
    size=st.integers(1, 5),
    pairs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
)
@settings(max_examples=80, deadline=None)
def test_the_calendar_does_what_every_step_would(kind, size, pairs):
    def layout():
        return PagedCache(40 // size, size) if kind == "paged" else ContiguousCache(40, 1, kind, 32)

    run = saturate(layout(), cycle(pairs), 80, max_batched_tokens=40, sample_every=1)
    seen, (finished, preempted) = token_by_token(layout(), cycle(pairs), 80, 40)
    assert list(zip(run.occupancies, run.batches, strict=True)) == seen
    assert (run.finished, run.preempted) == (finished, preempted)


def test_preemption_really_happens_and_loses_no_step():
    cache = PagedCache(num_blocks=20, block_size=2, watermark=0)
    run = saturate(cache, repeat((4, 20)), steps=2000, sample_every=1)
    assert run.preempted > 100
    # 20 lengths from 4 to 23 per request, each visited once: as many steps as tokens put out.
    assert sum(run.batches) / 1500 == pytest.approx(run.finished * 20 / 2000, rel=0.02)
    cache.check()


def test_equal_requests_through_one_region():
    cache = ContiguousCache(num_units=2, unit_tokens=16, policy="oracle", max_tokens=32)
    run = saturate(cache, repeat((10, 10)), steps=40, sample_every=1)
    assert [one.held for one in run.occupancies] == [*range(10, 20)] * 3
    assert (run.finished, run.mean_batch) == (3, 1.0)


@pytest.mark.parametrize(("budget", "running"), [(200, 2), (201, 3)])
def test_the_budget_of_a_step_limits_prompts(budget, running):
    """Of prompts of 100 that run two steps: two join beside one that runs, only if 201 may."""
    run = saturate(PagedCache(64, 16), repeat((100, 2)), 40, max_batched_tokens=budget)
    assert set(run.batches) == {running}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"requests": repeat((3000, 1))}, ValueError, "3000 \\+ 1 tokens might have to be"),
        ({"requests": [(1, 1)]}, RuntimeError, "requests without end"),
        ({"steps": 8, "sample_every": 9}, ValueError, "8 steps have no sample at every 9"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"requests": repeat((2000, 100))}, ValueError, "at most 1600 tokens here"),
    ],
)
def test_what_a_run_refuses(changes, error, message):
    arguments = {"layout": PagedCache(100, 16, 0), "requests": repeat((8, 8)), "steps": 40}
    with pytest.raises(error, match=message):
        saturate(**arguments | changes)


def test_the_papers_cache_follows_from_the_budget():
    assert paper_tokens() == 983 * 16  # the paper: 15.7K slots
    leaves = {blocks: round(100 * (1 - 7 * 2048 / (16 * blocks)), 1) for blocks in range(975, 995)}
    assert [blocks for blocks, left in leaves.items() if left == 8.9] == [983, 984]


@pytest.fixture(scope="module")
def contiguous():
    return figure_2(sharegpt(), steps=8_000, allocators=RESERVATIONS)


@pytest.fixture(scope="module")
def paged():
    return figure_2(sharegpt(), seeds=[0, 1], steps=6_000, allocators=["paged"])["paged"]


@pytest.mark.parametrize("allocator", RESERVATIONS)
def test_reservation_holds_as_few_tokens_as_in_the_paper(contiguous, allocator):
    measured, paper = contiguous[allocator], PAPER_SHARES[allocator]
    assert measured.percent("held") == pytest.approx(paper["held"], abs=2)
    for part in ("reserved", "internal", "external"):
        assert measured.percent(part) == pytest.approx(paper[part], abs=3), part


def test_paging_holds_as_many_tokens_as_in_the_paper(paged):
    assert paged.percent("held") == pytest.approx(PAPER_SHARES["paged"]["held"], abs=0.5)
    assert paged.percent("reserved") == 0


def test_the_batches_are_those_of_the_paper(contiguous, paged):
    """Figure 13a: 7.00, 9.81, 13.62 and 30.42, there at 2 requests per second."""
    batches = [contiguous[name].mean_batch for name in RESERVATIONS] + [paged.mean_batch]
    assert batches == pytest.approx([7.00, 9.81, 13.62, 30.42], rel=0.2)
    assert batches[:3] == pytest.approx([7.00, 9.81, 13.62], rel=0.05)


def test_seven_regions_of_the_maximum_and_a_rest(contiguous):
    assert {batch for run in contiguous["max"].runs for batch in run.batches} == {7}
    assert contiguous["max"].percent("external") == pytest.approx(100 - 100 * 7 * 2048 / 15728)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_lengths_of_what_runs_follow_from_the_requests(allocator):
    """Whatever the allocator admits when, every (request, step) pair comes up once."""
    workload = Workload("quick", Quantiles((0, 1), (1, 40)), Quantiles((0, 1), (1, 40)), 64)
    exact = sum(length * weight for length, weight in enumerate(live_lengths(workload)))
    layout = PagedCache(80, 8) if allocator == "paged" else ContiguousCache(80, 8, allocator, 64)
    run = saturate(layout, workload.requests(seed=0), 12_000)
    assert run.mean_length == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("size", [4, 16, 64, 128, 256])
def test_half_a_block_per_sequence_is_unused(size):
    run = block_sizes(sharegpt(), [size], steps=5_000)[size]
    exact = sum(-length % size * weight for length, weight in enumerate(WEIGHTS))
    half = (size - 1) / 2
    assert run.unused_per_sequence == pytest.approx(exact, rel=0.02)
    # From here exact, without noise: what all requests of the distribution would give.
    by_formula = 100 * MEAN_LENGTH / (MEAN_LENGTH + half)
    assert 100 * fill(WEIGHTS, size) == pytest.approx(100 * MEAN_LENGTH / (MEAN_LENGTH + exact))
    if size <= 128:
        assert 100 * fill(WEIGHTS, size) == pytest.approx(by_formula, abs=0.2)
        assert 100 * run.fill == pytest.approx(
            100 * run.mean_length / (run.mean_length + half), abs=0.2
        )
    else:  # fewer run at each greater length: the last block has more often just been begun
        assert exact > half + 5
        assert 100 * fill(WEIGHTS, size) < by_formula - 0.6


def test_short_sequences_waste_more_than_four_percent():
    workload = short_instructions()
    run = saturate(cache_layout("paged", paper_tokens()), workload.requests(0), 800)
    internal = run.shares["internal"]
    assert internal > 0.06
    assert run.fill == pytest.approx(fill(live_lengths(workload), 16), abs=0.01)


def test_the_same_seed_gives_the_same_run():
    first, second = (
        saturate(cache_layout("paged", paper_tokens()), sharegpt().requests(3), 400)
        for _ in range(2)
    )
    assert first == second
    assert list(islice(sharegpt().requests(3), 9)) != list(islice(sharegpt().requests(4), 9))


def test_an_unknown_allocator_is_refused():
    with pytest.raises(ValueError, match="allocator must be one of max, power-of-two, oracle"):
        cache_layout("slab", 1000)
