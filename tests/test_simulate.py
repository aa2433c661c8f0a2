"""The simulated service against closed forms: bounds, Little's law, and what paging must show."""

import gc
import math
import os
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from servelab import hardware, memory, models
from servelab.allocation.hits import engine_hit_rate
from servelab.paging import BlockTable, PoolShape
from servelab.roofline import step_cost, time_bound
from servelab.serving import (
    Engine,
    EngineClosed,
    Plan,
    Request,
    RooflineRunner,
    SamplingParams,
    Sequence,
    beam_search,
)
from servelab.serving.roofline_runner import PCIE_4_BYTES_PER_SECOND
from servelab.simulation import Arrival, Trace, percentile, poisson, simulate, traces
from tests.serving_world import check_pools

SPEC = models.get("qwen3-8b")
CHIP = hardware.get("a100-sxm-40gb")
WORKING = (Request, Sequence, BlockTable)  # what an engine has for each request in the system


def lengths(count, seed=0, longest=(600, 80)):
    rng = random.Random(seed)
    return [(rng.randint(1, longest[0]), rng.randint(1, longest[1])) for _ in range(count)]


def run(trace, *, runner=None, progress=None, **options):
    """Simulate, and hold what must hold of every run."""
    engine = Engine(runner or RooflineRunner(SPEC, CHIP), **options)
    done = simulate(engine, trace, progress)
    assert done.littles_law_error < 1e-9
    if not done.interrupted:
        check_pools(engine.scheduler)
        assert engine.unfinished == []
        assert len(done.served) + len(done.refused) == len(trace.arrivals)
        assert {one.arrival for one in done.served}.isdisjoint(done.refused)
        assert engine.scheduler.pool.num_free == done.num_blocks
    for one in done.served:
        wanted = trace.arrivals[one.arrival]
        assert one.arrival_seconds == wanted.seconds < one.first_token_seconds
        assert one.first_token_seconds <= one.last_token_seconds <= done.clock_seconds
        assert (one.prompt_tokens, one.output_tokens) == wanted[1:3]
    assert 0 <= done.mean_pool_use <= done.peak_blocks / done.num_blocks <= 1
    return done


def bound(step, dtype="bf16"):
    return time_bound(step_cost(SPEC, step), CHIP, dtype).serial_seconds


# --- closed forms -------------------------------------------------------------------------------


def test_one_request_takes_the_bounds_of_its_steps():
    (one,) = run(Trace("one", (Arrival(3.0, 700, 40),))).served
    prefill, decodes = bound([(700, 0)]), [bound([(1, 700 + n)]) for n in range(39)]
    assert one.ttft_seconds == pytest.approx(prefill, rel=1e-9)
    assert one.tpot_seconds == pytest.approx(math.fsum(decodes) / 39, rel=1e-9)
    assert one.latency_seconds == pytest.approx(prefill + math.fsum(decodes), rel=1e-9)


def test_a_chunked_prompt_takes_the_bounds_of_its_chunks():
    (one,) = run(Trace("one", (Arrival(0.0, 700, 1),)), max_num_batched_tokens=300).served
    chunks = [bound([(300, 0)]), bound([(300, 300)]), bound([(100, 600)])]
    # Only the last chunk draws a token; the others need no row of lm_head.
    head = time_bound(step_cost(SPEC, [(1, 0)]), CHIP, "bf16").serial_seconds
    head -= time_bound(step_cost(SPEC, [(1, 0)], [0]), CHIP, "bf16").serial_seconds
    assert one.latency_seconds == pytest.approx(math.fsum(chunks) - 2 * head, rel=1e-9)
    assert one.tpot_seconds is None


def test_saturated_decoding_reaches_the_bound_at_the_mean_batch():
    rng = random.Random(1)
    load = Trace("load", tuple(Arrival(0.0, 1, rng.randint(50, 150)) for _ in range(400)))
    done = run(load, max_num_seqs=32)
    batch = done.counters.generated_tokens / done.counters.steps
    assert 28 < batch < 32
    cached = [context for one in done.served for context in range(one.output_tokens)]
    context = round(sum(cached) / len(cached))
    low, high = (bound([(1, context)] * size) for size in (int(batch), int(batch) + 1))
    step_seconds = low + (batch - int(batch)) * (high - low)
    assert done.output_tokens_per_second == pytest.approx(batch / step_seconds, rel=0.01)


@pytest.mark.parametrize(("apart_seconds", "unfinished"), [(1e-4, 5), (100.0, 1)])
def test_who_is_unfinished_at_the_last_arrival_tells_an_overload(apart_seconds, unfinished):
    arrivals = [Arrival(place * apart_seconds, 100, 20) for place in range(5)]
    too_long = Arrival(0.0, 10**6, 1)  # refused: it never was in the system
    done = run(Trace("five", (too_long, *arrivals)))
    assert len(done.refused) == 1
    assert done.unfinished_at_last_arrival == unfinished


def test_littles_law_without_an_identity():
    """Requests in the system as an observer counts them, at times that are nobody's."""
    done = run(poisson(8.0, lengths(700), seed=4))
    looks = random.Random(5)
    times = [looks.uniform(0, done.clock_seconds) for _ in range(1000)]
    seen = [
        sum(one.arrival_seconds <= t < one.last_token_seconds for one in done.served) for t in times
    ]
    expected = done.requests_per_second * sum(done.latency_seconds) / len(done.served)
    assert done.mean_requests == pytest.approx(expected, rel=1e-9)
    assert sum(seen) / len(seen) == pytest.approx(expected, rel=0.1)


def test_efficiency_and_overhead():
    trace = Trace("one", (Arrival(0.0, 700, 40),))
    plain = run(trace).served[0].latency_seconds
    half = run(trace, runner=RooflineRunner(SPEC, CHIP, efficiency=0.5))
    late = run(trace, runner=RooflineRunner(SPEC, CHIP, overhead_seconds=0.25))
    assert half.served[0].latency_seconds == pytest.approx(2 * plain, rel=1e-9)
    assert late.served[0].latency_seconds == pytest.approx(plain + 40 * 0.25, rel=1e-9)


# --- the same everywhere ------------------------------------------------------------------------

SCRIPT = """
from servelab import hardware, models
from servelab.serving import Engine, RooflineRunner
from servelab.simulation import poisson, simulate
spec, chip = models.get("qwen3-8b"), hardware.get("a100-sxm-40gb")
trace = poisson(40.0, [(100 + 7 * n % 500, 5 + n % 30) for n in range(120)], seed=9)
print(repr(simulate(Engine(RooflineRunner(spec, chip), num_blocks=300), trace)))
"""


def test_same_seed_same_bytes():
    answers = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        told = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True
        )
        answers.add(told.stdout)
    assert len(answers) == 1
    assert len(answers.pop()) > 10_000


# --- the driver ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_num_seqs": 3}, {"num_blocks": 90}, {}])
def test_requests_held_back_change_nothing(options):
    """The same trace through an engine that is given each request as soon as it has come."""
    trace = poisson(60.0, lengths(150, seed=2), seed=3)
    done = run(trace, **options)
    engine = Engine(RooflineRunner(SPEC, CHIP), **options)
    requests, coming = [], list(trace.arrivals)
    while coming or engine.unfinished:
        if not engine.unfinished and coming[0].seconds > engine.clock_seconds:
            engine.clock_seconds = coming[0].seconds
        while coming and coming[0].seconds <= engine.clock_seconds:
            next_one = coming.pop(0)
            prompt = engine.runner.new_prompt(next_one.prompt_tokens)
            params = SamplingParams(temperature=0, max_tokens=next_one.output_tokens)
            requests.append(engine.add(prompt, params))
        engine.step()
    assert done.counters == engine.counters
    in_order = sorted(done.served)
    assert [one.first_token_seconds for one in in_order] == [r.times.first_token for r in requests]
    assert [one.last_token_seconds for one in in_order] == [r.times.last_token for r in requests]
    assert [one.preemptions for one in in_order] == [r.num_preemptions for r in requests]


def test_the_clock_jumps_over_idle_time():
    done = run(Trace("gap", (Arrival(0.0, 100, 5), Arrival(500.0, 100, 5))))
    first, second = done.served
    assert first.latency_seconds == pytest.approx(second.latency_seconds, rel=1e-9)
    assert done.mean_requests < 0.01
    assert done.clock_seconds == pytest.approx(500, abs=1)


def test_too_small_a_pool_preempts_and_serves_all_the_same():
    trace = poisson(60.0, lengths(200, seed=6), seed=7)
    roomy = run(trace)
    assert roomy.preemptions == 0
    tight = run(trace, num_blocks=120, enable_prefix_caching=False)
    swapping = run(trace, num_blocks=120, num_swap_blocks=200, enable_prefix_caching=False)
    assert tight.counters.preemptions_by_recompute > 20
    assert swapping.counters.preemptions_by_swap > 20
    assert tight.counters.computed_tokens > roomy.counters.computed_tokens
    assert tight.mean_pool_use > 0.8 > roomy.mean_pool_use
    assert sum(tight.latency_seconds) > sum(roomy.latency_seconds)


def test_what_can_never_be_served_is_refused_and_the_rest_served():
    limit = SPEC.max_context_tokens
    trace = Trace("long", (Arrival(0.0, 10, 5), Arrival(0.0, limit, 5), Arrival(1.0, 900, 200)))
    done = run(trace, num_blocks=60)
    assert (done.refused, len(done.served)) == ((1, 2), 1)
    assert f"the model's context is {limit}" in done.refusal


def test_the_context_ends_a_request_early():
    limit = SPEC.max_context_tokens
    done = simulate(Engine(RooflineRunner(SPEC, CHIP)), Trace("a", (Arrival(0.0, limit - 3, 9),)))
    assert done.served[0].output_tokens == 3


def test_shared_prefixes_hit_and_others_never():
    apart = run(poisson(5.0, [(64, 40)] * 60), num_blocks=40)
    assert apart.counters.prefix_queried_tokens > 0
    assert apart.counters.prefix_hit_tokens <= 40 * apart.preemptions  # its own blocks, come back
    turns = [Arrival(float(n), 1100 + n, 4, (1, 2, 10 + n)) for n in range(5)]
    for block_size in (16, 512, 2000):
        done = run(Trace("shared", tuple(turns)), block_size=block_size)
        found = {1024} if block_size < 1100 else {0}
        assert {one.cached_tokens for one in done.served[1:]} == found
        assert done.served[0].cached_tokens == 0
        hits = 4 * found.pop() / sum(turn.prompt_tokens for turn in turns)
        assert done.prefix_hit_rate == pytest.approx(hits)


def test_the_engine_hits_what_its_cache_alone_would():
    """One request at a time, answers of one token: the same blocks as `engine_hit_rate` counts."""
    short = [a for a in traces.get("mooncake_synthetic", 250).arrivals if a.prompt_tokens < 20_000]
    apart = [a._replace(seconds=1e3 * n, output_tokens=1) for n, a in enumerate(short)]
    trace = Trace("apart", tuple(apart))
    done = run(trace, block_size=512, num_blocks=301)
    asked = sum(len(arrival.block_ids) for arrival in apart)
    hits = engine_hit_rate(trace, 300)
    assert 0.02 < hits < engine_hit_rate(trace, 10_000)
    assert done.counters.prefix_hit_tokens == 512 * round(hits * asked)


def test_a_runner_prices_only_for_the_engine_made_with_it_last():
    runner = RooflineRunner(SPEC, CHIP)
    first, last = Engine(runner, num_blocks=9), Engine(runner, num_blocks=9, block_size=32)
    with pytest.raises(EngineClosed, match="another engine has bound it since"):
        first.generate(runner.new_prompt(5))
    assert last.generate(runner.new_prompt(5))[0].error is None


def test_nothing_is_kept_of_a_finished_request_but_its_row():
    kept = Counter()

    def count(done, clock):
        gc.collect()
        kept.update(type(thing) for thing in gc.get_objects() if type(thing) in WORKING)

    gc.collect()
    before = Counter(type(thing) for thing in gc.get_objects() if type(thing) in WORKING)
    done = run(poisson(4.0, lengths(120), seed=6), progress=count, max_num_seqs=8)
    looks = done.counters.steps // 200
    assert looks > 5
    # Over all looks; what other tests have left is there in each of them.
    seen = {kind: kept[kind] - looks * before[kind] for kind in WORKING}
    assert 0 < seen[Request] <= 2 * looks * done.mean_requests
    assert seen[Request] == seen[Sequence] >= seen[BlockTable] > 0


def test_progress_and_interruption():
    trace = poisson(30.0, lengths(300, seed=8), seed=8)
    told = []

    def stop(done, seconds):
        told.append((done, seconds))
        if done > 100:
            raise KeyboardInterrupt

    part, whole = run(trace, progress=stop), run(trace)
    assert part.interrupted
    assert not whole.interrupted
    assert told == sorted(told)
    assert 100 < len(part.served) < 300
    assert part.served == whole.served[: len(part.served)]
    assert part.clock_seconds == told[-1][1]


def test_interrupted_within_a_step():
    class Impatient(RooflineRunner):
        steps = 0

        def execute(self, plan):
            self.steps += 1
            if self.steps == 300:
                raise KeyboardInterrupt
            return super().execute(plan)

    part = run(poisson(30.0, lengths(300, seed=8), seed=8), runner=Impatient(SPEC, CHIP))
    assert part.interrupted
    assert 0 < len(part.served) < 300


def test_an_engine_of_its_own():
    trace = Trace("one", (Arrival(0.0, 10, 5),))
    engine = Engine(RooflineRunner(SPEC, CHIP))
    simulate(engine, trace)
    with pytest.raises(ValueError, match="served nothing yet"):
        simulate(engine, trace)
    engine.runner = object()
    with pytest.raises(TypeError, match="needs a RooflineRunner"):
        simulate(engine, trace)


def test_percentile_is_the_nearest_rank():
    values = list(range(1, 201))
    random.Random(0).shuffle(values)
    assert [percentile(values, p) for p in (0, 0.5, 50, 90, 99, 99.9, 100)] == [
        1, 1, 100, 180, 198, 200, 200,
    ]  # fmt: skip
    assert percentile([7.0], 50) == 7.0
    for bad in ([], 50), ([1], -1), ([1], 101):
        with pytest.raises(ValueError, match="a percentile is of values, from 0 to 100"):
            percentile(*bad)


# --- the runner ---------------------------------------------------------------------------------


def test_copies_and_swaps_are_priced():
    runner = RooflineRunner(SPEC, CHIP)
    runner.bind(PoolShape(100, 16), 10)
    block_bytes = 16 * SPEC.kv_bytes_per_token()
    engine = Engine(RooflineRunner(SPEC, CHIP), num_blocks=100)
    (sequence,) = engine.add([1, 2, 3]).sequences
    row = (sequence, 3, 0, (0.5,))
    plain = runner.execute(Plan([row])).seconds
    copied = runner.execute(Plan([row], copies=[(1, 2), (3, 4)])).seconds
    swapped = runner.execute(Plan([row], swap_in=[(1, 2)], swap_out=[(3, 4), (5, 6)])).seconds
    assert copied - plain == pytest.approx(
        2 * 2 * block_bytes / CHIP.bandwidth_bytes_per_second, rel=1e-6
    )
    assert swapped - plain == pytest.approx(3 * block_bytes / PCIE_4_BYTES_PER_SECOND, rel=1e-6)
    assert pytest.approx(31.5e9, rel=1e-3) == PCIE_4_BYTES_PER_SECOND


def test_a_pool_beyond_the_chips_memory_is_refused_before_it_is_made():
    runner = RooflineRunner(SPEC, CHIP)
    engine = Engine(runner, num_blocks=8)
    rule = r"a pool of 1000000000000 blocks needs \S+ GiB, .* has \S+ GiB"
    with pytest.raises(MemoryError, match=rule):
        Engine(runner, num_blocks=10**12)
    # What was refused has not taken the runner.
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))


def test_siblings_draw_tokens_of_their_own():
    engine = Engine(RooflineRunner(SPEC, CHIP), num_blocks=100, block_size=4)
    (answer,) = engine.generate([1, 2, 3, 4, 5, 6], SamplingParams(n=3, max_tokens=9))
    tokens = [token for one in answer.outputs for token in one.token_ids]
    assert len(set(tokens)) == len(tokens) == 27
    assert engine.counters.copied_blocks == 2


def test_no_logits_no_log_probabilities():
    engine = Engine(RooflineRunner(SPEC, CHIP))
    with pytest.raises(ValueError, match="RooflineRunner has no logits"):
        engine.generate([1, 2, 3], SamplingParams(logprobs=1))
    with pytest.raises(ValueError, match="neither log-probabilities nor beam search"):
        beam_search(engine, [1, 2, 3], beam_width=2, max_tokens=4)
    assert engine.unfinished == []


def test_memory_left_for_the_cache():
    runner = RooflineRunner(SPEC, CHIP, reserve_bytes=2**30)
    expected = memory.budget(SPEC, CHIP, 0.9, "bf16", 2**30).available_bytes
    assert runner.available_kv_bytes(0.9) == expected
    assert RooflineRunner(SPEC, CHIP, kv_dtype="fp8").kv_dtype == "fp8"
    small = RooflineRunner(SPEC, hardware.get("t4"), "fp16")
    with pytest.raises(ValueError, match="qwen3-8b does not fit"):
        Engine(small)


def test_options_are_checked():
    for options, message in (
        ({"efficiency": 0}, "efficiency must be greater than 0"),
        ({"efficiency": 1.5}, "efficiency must be greater than 0 and at most 1, got 1.5"),
        ({"overhead_seconds": -1}, "overhead_seconds must be at least 0"),
        ({"dtype": "fp8"}, "no peak rate for 'fp8'"),
        ({"kv_dtype": "fp7"}, "fp7"),
        ({"weight_dtype": "fp7"}, "fp7"),
        ({"reserve_bytes": -1}, "reserve_bytes must be at least 0"),
        ({"host_link_bytes_per_second": 0}, "host_link"),
    ):
        with pytest.raises(ValueError, match=message):
            RooflineRunner(SPEC, CHIP, **options)
    narrow = RooflineRunner(SPEC, CHIP, efficiency=np.float32(0.5), overhead_seconds=np.float32(0))
    assert run(poisson(9.0, [(100, 9)] * 5), runner=narrow) == run(
        poisson(9.0, [(100, 9)] * 5), runner=RooflineRunner(SPEC, CHIP, efficiency=0.5)
    )
    runner = RooflineRunner(SPEC, CHIP)
    with pytest.raises(ValueError, match="cannot share 3"):
        runner.new_prompt(2, shared=(1, 2, 3))
    assert set(runner.new_prompt(5)).isdisjoint(runner.new_prompt(5))
