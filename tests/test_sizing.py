"""Sizing: the formula against the simulation, the simulation against what must hold of it."""

from dataclasses import replace
from itertools import pairwise

import pytest

from servelab import hardware, memory, models
from servelab.check.grading import Prediction, grade, report, simulated
from servelab.hardware import Accelerator
from servelab.models.parallel import rank
from servelab.roofline import step_cost, time_bound
from servelab.serving import Engine, RooflineRunner
from servelab.simulation import (
    Arrival,
    RankRunner,
    Replica,
    Targets,
    Trace,
    agent_sessions,
    estimate,
    least_replicas,
    operate,
    pareto_front,
    percentile,
    poisson,
    serve,
    simulate,
    size,
    traces,
)

SPEC = models.get("qwen3-8b")
H100, L4 = hardware.get("h100-sxm-80gb"), hardware.get("l4")
CONVERSATION = [
    (a.prompt_tokens, a.output_tokens) for a in traces.get("azure_2023_conv", 240).arrivals
]


# --- ranks --------------------------------------------------------------------------------------


def test_a_single_rank_is_the_runner_itself() -> None:
    trace = poisson(8.0, CONVERSATION[:30])
    ours = simulate(Engine(RankRunner(SPEC, H100)), trace)
    plain = simulate(Engine(RooflineRunner(SPEC, H100)), trace)
    assert ours.served == plain.served


def test_a_rank_steps_as_its_part_does_and_waits_for_two_reductions_a_layer() -> None:
    (one,) = simulate(
        Engine(RankRunner(SPEC, H100, tp=4)), Trace("one", (Arrival(0.0, 700, 1),))
    ).served
    alone = time_bound(step_cost(rank(SPEC, 4), [(700, 0)]), H100, "bf16").serial_seconds
    sent = 700 * 2 * len(SPEC.layers) * 2 * 3 / 4 * SPEC.hidden_size * 2
    assert H100.link_bytes_per_second is not None
    assert one.ttft_seconds == pytest.approx(alone + sent / H100.link_bytes_per_second, rel=1e-9)


def test_the_pool_is_the_budget_in_blocks() -> None:
    for tp in (1, 2):
        left = memory.budget(SPEC, H100, 0.9, tp=tp).available_bytes
        fits = memory.capacity(SPEC, left, max_model_len=1024, block_size=16, tp=tp)
        assert Replica(SPEC, H100, tp).pool_tokens == fits.tokens - 16  # the null block


def test_a_doubled_resource_is_the_only_one() -> None:
    replica, step = Replica(SPEC, H100, tp=2), step_cost(SPEC, [(1, 2000)])
    base = time_bound(step, H100, "bf16")
    for resource, changed in [("compute", "compute_seconds"), ("bandwidth", "memory_seconds")]:
        twice = time_bound(step, replica.doubled(resource).chip, "bf16")
        for part in ("compute_seconds", "memory_seconds"):
            scale = 2 if part == changed else 1
            assert getattr(base, part) == pytest.approx(scale * getattr(twice, part))
    larger = replica.doubled("capacity")
    assert larger.pool_tokens > 2 * replica.pool_tokens, "the weights do not double"
    assert replica.doubled("bandwidth").pool_tokens == replica.pool_tokens
    link = replica.doubled("link").runner().link_seconds_per_token
    assert replica.runner().link_seconds_per_token == pytest.approx(2 * link)
    assert replica.doubled("places").max_num_seqs == 2 * replica.max_num_seqs
    with pytest.raises(ValueError, match="has no 'luck' to double"):
        replica.doubled("luck")  # type: ignore[arg-type]


# --- the formula --------------------------------------------------------------------------------


@pytest.mark.parametrize(("chip", "rate"), [("h100-sxm-80gb", 16.0), ("l4", 1.0)])
def test_the_formula_says_what_the_simulation_finds(chip: str, rate: float) -> None:
    replica, trace = Replica(SPEC, hardware.get(chip)), poisson(rate, CONVERSATION)
    said, found = estimate(replica, trace, rate), serve(replica, trace)
    assert said is not None
    assert said.tpot_seconds == pytest.approx(found.mean_tpot_seconds, rel=0.15)
    assert said.ttft_seconds == pytest.approx(found.mean_ttft_seconds, rel=0.35)
    assert said.sequences == pytest.approx(found.mean_users, rel=0.3)


def test_a_prompt_of_several_chunks_takes_part_in_as_many_steps() -> None:
    said = estimate(Replica(SPEC, H100), poisson(1.0, [(8 * 2048, 300)]), 0.02)
    assert said is not None
    assert said.sequences == 1
    context = 8 * 2048 + 150
    own = sum(
        time_bound(step_cost(SPEC, [(1, context), (2048, cached)]), H100, "bf16").serial_seconds
        for cached in range(0, 8 * 2048, 2048)
    )
    wait = time_bound(step_cost(SPEC, [(1, context)]), H100, "bf16").serial_seconds / 2
    assert own + wait <= said.ttft_seconds < 1.01 * (own + wait), "the queue of one is short"


def test_littles_law_holds_of_the_formula() -> None:
    replica, trace = Replica(SPEC, H100), poisson(1.0, [(1000, 201)])
    for rate in (2.0, 10.0, 25.0):
        said = estimate(replica, trace, rate)
        assert said is not None
        assert rate * 200 * said.tpot_seconds == pytest.approx(said.sequences, abs=1)
        assert said.held_tokens / said.sequences == pytest.approx(1000 + 201 / 2, abs=1)


def test_equal_prompts_queue_as_in_m_d_1() -> None:
    """Equal service times wait for half of what random ones would: rho d / (2 (1 - rho))."""
    found = estimate(Replica(SPEC, H100), poisson(1.0, [(1000, 101)]), rate=15.0)
    assert found is not None
    share = found.prefill_share
    debt, step = share / found.rate, found.tpot_seconds * (1 - share)
    queue = share * debt / (2 * (1 - share))
    assert found.ttft_seconds == pytest.approx(queue + debt + 1.5 * step, rel=1e-9)


def test_a_hit_spares_the_prefill_and_nothing_else() -> None:
    replica, trace = Replica(SPEC, H100), poisson(1.0, [(8000, 100)])
    cold, warm = (estimate(replica, trace, 2.0, hit_rate=hit) for hit in (0.0, 0.75))
    assert cold is not None
    assert warm is not None
    assert warm.prefill_share < 0.5 * cold.prefill_share
    assert warm.ttft_seconds < 0.5 * cold.ttft_seconds


def test_a_rate_beyond_the_places_has_no_steady_state() -> None:
    trace = poisson(1.0, [(1000, 200)])
    assert estimate(Replica(SPEC, H100, max_num_seqs=8), trace, 20.0) is None
    assert estimate(Replica(SPEC, H100), trace, 500.0) is None
    with pytest.raises(ValueError, match=r"hit_rate must be in \[0, 1\)"):
        estimate(Replica(SPEC, H100), trace, 1.0, hit_rate=1.0)


def test_the_least_number_names_what_one_fewer_misses() -> None:
    chat, hour = poisson(1.0, [(1000, 250)]), 3600.0
    for chip, targets, missed in [
        ("l4", Targets(hour, hour), "capacity"),
        ("h100-sxm-80gb", Targets(hour, 0.006), "tpot"),
        ("h100-sxm-80gb", Targets(0.022, hour), "ttft"),
    ]:
        found = least_replicas(Replica(SPEC, hardware.get(chip)), chat, 40.0, targets)
        assert found.missed == missed, chip
        assert found.replicas > 1
    few = least_replicas(Replica(SPEC, H100, max_num_seqs=4), chat, 40.0, Targets(hour, hour))
    assert few.missed == "places"
    one = least_replicas(Replica(SPEC, H100), chat, 1.0, Targets(hour, hour))
    assert (one.replicas, one.missed) == (1, None)
    with pytest.raises(ValueError, match="1024 replicas miss the targets on average: tpot"):
        least_replicas(Replica(SPEC, L4), chat, 1.0, Targets(hour, 0.01))


# --- the simulation -----------------------------------------------------------------------------


def test_each_request_is_served_once_by_the_replica_of_its_router() -> None:
    trace = poisson(20.0, CONVERSATION[:60])
    found = serve(Replica(SPEC, H100), trace, 3)
    assert [len(run.served) for run in found.runs] == [20, 20, 20]
    assert sorted(one.prompt_tokens for one in found.served) == sorted(
        prompt for prompt, _ in CONVERSATION[:60]
    )
    lone = serve(Replica(SPEC, H100), trace, 3, router=lambda place, arrival: 7)
    assert [len(run.served) for run in lone.runs] == [60]
    assert lone.ttft_seconds(99) == serve(Replica(SPEC, H100), trace).ttft_seconds(99)
    assert found.ttft_seconds(50) == percentile([one.ttft_seconds for one in found.served], 50)


def test_the_most_users_of_a_replica_are_those_at_one_time() -> None:
    """Three overlap, two come alone much later."""
    times = (0.0, 0.001, 0.002, 100.0, 200.0)
    trace = Trace("five", tuple(Arrival(seconds, 100, 50) for seconds in times))
    assert serve(Replica(SPEC, H100), trace).peak_users == 3
    assert serve(Replica(SPEC, H100), trace, 3).peak_users == 1


def test_the_size_is_the_least_from_wherever_the_search_starts() -> None:
    replica, trace = Replica(SPEC, L4), poisson(8.0, CONVERSATION[:60])
    targets = Targets(1.0, 0.1)
    few, many = (size(replica, trace, targets, start=start) for start in (1, 3))
    assert few.replicas == many.replicas > 1
    assert few.kept.strain(targets) <= 1 < few.missed.strain(targets)
    assert many.missed.strain(targets) == few.missed.strain(targets)
    assert few.chips == few.replicas


def test_what_the_mean_misses_the_tail_misses() -> None:
    replica, trace, targets = Replica(SPEC, H100), poisson(40.0, CONVERSATION), Targets(0.3, 0.01)
    average = least_replicas(replica, trace, 40.0, targets)
    assert average.replicas > 1
    assert serve(replica, trace, average.replicas - 1).strain(targets) > 1


def test_of_one_replica_the_limit_is_what_more_traffic_meets() -> None:
    trace, targets = poisson(16.0, CONVERSATION[:120]), Targets(0.5, 0.012)
    found = size(Replica(SPEC, H100), trace, targets)
    assert found.replicas == 1
    faster = trace.seconds / found.missed.trace.seconds
    assert faster in (pytest.approx(2), pytest.approx(4))
    assert found.missed.strain(targets) > 1


CRAMPED = Replica(SPEC, H100, runner_options={"reserve_bytes": 58 * 10**9})
SLOW_LINK = Accelerator("slow link", {"bf16": 989e12}, 80 * 2**30, 3.35e12, None, 2e9)


@pytest.mark.parametrize(
    ("limit", "replica", "lengths", "rate", "targets"),
    [
        ("bandwidth", Replica(SPEC, H100), (16, 300), 60.0, Targets(9.0, 0.0068)),
        ("compute", Replica(SPEC, H100), (4000, 2), 30.0, Targets(0.5, 9.0)),
        ("capacity", CRAMPED, (1000, 100), 20.0, Targets(1.0, 9.0)),
        ("link", Replica(SPEC, SLOW_LINK, tp=2), (4000, 2), 3.0, Targets(2.0, 9.0)),
        ("places", Replica(SPEC, H100, max_num_seqs=4), (200, 100), 15.0, Targets(1.0, 9.0)),
    ],
)
def test_the_limit_is_the_resource_that_was_made_scarce(
    limit: str, replica: Replica, lengths: tuple[int, int], rate: float, targets: Targets
) -> None:
    found = size(replica, poisson(rate, [lengths] * 80), targets)
    assert found.limit == limit, found.relief
    assert found.relief[found.limit] < 0.9 * found.missed.strain(targets)
    assert found.chips == found.replicas * replica.tp


def test_what_no_number_of_replicas_can_do_is_said() -> None:
    trace = poisson(4.0, [(1000, 20)] * 20)
    with pytest.raises(ValueError, match="2 replicas miss the targets"):
        size(Replica(SPEC, L4), trace, Targets(9.0, 0.01), most=2)
    long = Trace("long", (*trace.arrivals, Arrival(9.0, 10**6, 5)))
    with pytest.raises(ValueError, match="more replicas do not help: the prompt has 1000000"):
        size(Replica(SPEC, L4), long, Targets(9.0, 9.0))
    with pytest.raises(ValueError, match="no request can be served"):
        serve(Replica(SPEC, L4), Trace("long", (Arrival(0.0, 10**6, 5),)))
    with pytest.raises(ValueError, match="percent must be at most 100"):
        Targets(1.0, 1.0, 101)


# --- operating points ---------------------------------------------------------------------------


def test_a_full_pool_is_seen_and_places_beyond_it_add_nothing() -> None:
    trace = Trace("equal", tuple(Arrival(0.0, 900, 60) for _ in range(160)))
    small, large, larger = (operate(Replica(SPEC, L4, max_num_seqs=n), trace) for n in (8, 96, 200))
    assert (small.is_full, large.is_full) == (False, True)
    assert (large.tpot_seconds, large.tokens_per_second) == (
        larger.tpot_seconds,
        larger.tokens_per_second,
    )
    assert large.tokens_per_second > 2 * small.tokens_per_second
    assert large.tpot_seconds > small.tpot_seconds


def test_the_throughput_of_a_point_is_that_of_its_chips() -> None:
    trace = Trace("equal", tuple(Arrival(0.0, 200, 60) for _ in range(48)))
    one, four = (operate(Replica(SPEC, H100, tp, 8), trace) for tp in (1, 4))
    assert four.tpot_seconds < 0.5 * one.tpot_seconds
    assert four.tokens_per_second < one.tokens_per_second, "links and unread weights are no gain"


def test_a_batch_that_drains_is_no_operating_point() -> None:
    few, many = (Trace("equal", (Arrival(0.0, 200, 60),) * count) for count in (96, 192))
    with pytest.raises(ValueError, match="queue of 96 requests is empty before three in four"):
        operate(Replica(SPEC, H100, max_num_seqs=48), few)
    full = operate(Replica(SPEC, H100, max_num_seqs=48), many)
    step = time_bound(step_cost(SPEC, [(1, 230)] * 48), H100, "bf16").serial_seconds
    assert full.tpot_seconds >= step
    assert full.tokens_per_second == pytest.approx(48 / full.tpot_seconds, rel=0.2)


def test_a_point_off_the_front_is_beaten_and_one_on_it_is_not() -> None:
    trace = Trace("equal", tuple(Arrival(0.0, 500, 20) for _ in range(100)))
    points = [
        operate(Replica(SPEC, chip, max_num_seqs=n), trace)
        for chip in (H100, L4)
        for n in (1, 6, 24)
    ]
    front = pareto_front(points)
    for point in points:
        beaten = any(
            other.tpot_seconds <= point.tpot_seconds
            and other.tokens_per_second >= point.tokens_per_second
            for other in points
            if other is not point
        )
        assert beaten != (point in front)
    assert pareto_front([]) == []


# --- sessions -----------------------------------------------------------------------------------


def test_each_prompt_of_a_session_begins_with_the_one_before() -> None:
    trace = agent_sessions(2.0, 5, 4, 3, 2, 50, 2.0, seed=4)
    by_session: dict[int, list[Arrival]] = {}
    for arrival in trace.arrivals:
        by_session.setdefault(arrival.block_ids[3] - 3, []).append(arrival)
    assert sorted(by_session) == list(range(5))
    for turns in by_session.values():
        assert [a.prompt_tokens for a in turns] == [512 * n for n in (5, 7, 9, 11)]
        for before, after in pairwise(turns):
            assert after.block_ids[: len(before.block_ids)] == before.block_ids
            assert 1.5 <= after.seconds - before.seconds <= 2.5
    own = [set(turns[-1].block_ids[3:]) for turns in by_session.values()]
    assert len(set.union(*own)) == sum(map(len, own)), "nothing else is shared"


def test_with_room_enough_all_is_found_that_was_said_before() -> None:
    trace = agent_sessions(0.5, 6, 4, 3, 2, 20, 4.0)
    found = serve(Replica(SPEC, H100, enable_prefix_caching=True), trace)
    looked_up = 512 * sum(len(a.block_ids) for a in trace.arrivals)
    new = 512 * (3 + 6 * 4 * 2)  # the shared blocks once, each turn's own once
    assert found.prefix_hit_rate == pytest.approx(1 - new / looked_up, rel=0.01)


def test_a_session_needs_counts_and_times() -> None:
    with pytest.raises(ValueError, match="turns must be at least 1, got 0"):
        agent_sessions(1.0, 2, 0, 1, 1, 1, 1.0)
    with pytest.raises(ValueError, match="pause_seconds"):
        agent_sessions(1.0, 2, 1, 1, 1, 1, 0.0)


# --- grading ------------------------------------------------------------------------------------


def test_a_prediction_is_graded_field_by_field_within_its_tolerance() -> None:
    sizing = size(Replica(SPEC, H100), poisson(20.0, CONVERSATION[:60]), Targets(0.5, 0.02))
    truth = simulated(sizing)
    assert set(grade(truth, sizing).values()) == {"passed"}
    assert set(grade(Prediction(), sizing).values()) == {"not attempted"}
    near = replace(truth, users=1.2 * truth.users, ttft_seconds=0.6 * truth.ttft_seconds)
    assert set(grade(near, sizing).values()) == {"passed"}
    off = Prediction(1.3 * truth.users, 1.6 * truth.ttft_seconds, 0.7 * truth.tpot_seconds, 9, "x")
    assert set(grade(off, sizing).values()) == {"failed"}
    odd = Prediction("many", float("nan"), 10**400, True, 3)  # type: ignore[arg-type]
    assert set(grade(odd, sizing).values()) == {"failed"}
    text = report({"you": Prediction(chips=1), "odd": odd}, sizing)
    assert "not attempted" in text
    assert "many" in text
    assert "25 %" in text
