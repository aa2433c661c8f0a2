"""The explorer of batching: its numbers are those of the runs, and of the formula of chapter 8."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean
from xml.etree import ElementTree

import pytest

from servelab.explore import Job, timeline
from servelab.explore.state import RunEvent
from servelab.live import batching
from servelab.live.panel import Choice, Slider
from servelab.serving import Engine
from servelab.serving.events import Finished, Planned, Preempted
from servelab.simulation import Arrival, Trace, simulate

ROWS = [
    "steps",
    "time to the end",
    "decode places that are useful",
    "mean time to first token",
    "output tokens per second",
    "pre-emptions",
    "tokens computed again",
]


def stops_of(name: str) -> list[str]:
    (control,) = (c for c in batching.panel().controls if c.name == name)
    if isinstance(control, Slider):
        return list(control.stops)
    assert isinstance(control, Choice)
    return [value for value, _ in control.options]


def settings(seed: int) -> dict[str, str]:
    draw = random.Random(seed)
    return {name: draw.choice(stops_of(name)) for name in batching.panel().values()}


def counted_run(events: list[RunEvent], jobs: Sequence[Job]) -> batching.Counted:
    return batching.count_run(events, timeline(events, "seconds"), jobs)


def useful_share(outputs: list[int], places: int) -> float:
    """Equation eq-c8-static: of decode places, batch by batch as they come."""
    decodes = [each - 1 for each in outputs]
    groups = [decodes[i : i + places] for i in range(0, len(decodes), places)]
    computed = sum(len(group) * max(group) for group in groups)
    return sum(decodes) / computed if computed else 1.0


@pytest.mark.parametrize("seed", range(12))
def test_every_setting_serves_every_request(seed: int) -> None:
    values = settings(seed)
    answer = batching.panel().answer(values, "")
    jobs = batching.workload(
        int(values["requests"]), values["rate"], float(values["spread"]), int(values["seed"])
    )
    places, budget = int(values["places"]), int(values["budget"])
    blocks = 1000 if values["blocks"] == "enough" else int(values["blocks"])
    static = batching.static_run(jobs, places)
    engine = batching.engine_run(jobs, places, budget, blocks)
    for events in (static, engine):
        assert sum(isinstance(event, Finished) for event in events) == len(jobs)
        assert all(len(e.rows) <= places for e in events if isinstance(e, Planned))
    assert all(sum(row[1] for row in e.rows) <= budget for e in engine if isinstance(e, Planned))
    # The table says what was counted, and the words say what the table says.
    counted = [counted_run(events, jobs) for events in (static, engine)]
    table = ElementTree.fromstring(answer.parts["numbers"])
    cells = [[cell.text for cell in row] for row in table.iter("tr")][1:]
    assert cells == [[title, *(each.rows()[title] for each in counted)] for title in ROWS]
    assert f"takes {counted[1].steps} step" in answer.words
    assert f"instead of {counted[0].steps}," in answer.words
    assert ("pre-emption" in answer.words) == (counted[1].preemptions > 0)
    ElementTree.fromstring(answer.parts["lanes"])
    # A fresh panel, and the same one again, say the same.
    assert batching.panel().answer(values, "") == answer


def test_static_batches_are_as_useful_as_the_formula_says() -> None:
    for seed, places in [(1, 4), (2, 3), (3, 8), (4, 1)]:
        jobs = batching.workload(12, "all", 0.75, seed)
        counted = counted_run(batching.static_run(jobs, places), jobs)
        expected = useful_share([job.output_tokens for job in jobs], places)
        assert counted.useful == pytest.approx(expected)
        assert counted.again_tokens == counted.preemptions == 0


@pytest.mark.parametrize(("rate", "blocks"), [("all", 12), ("100", 1000), ("25", 9)])
def test_the_engine_s_numbers_are_those_of_a_simulation(rate: str, blocks: int) -> None:
    jobs = batching.workload(12, rate, 0.75, seed=2)
    counted = counted_run(batching.engine_run(jobs, 4, 256, blocks), jobs)
    arrivals = tuple(Arrival(j.arrival_seconds, j.prompt_tokens, j.output_tokens) for j in jobs)
    engine = Engine(
        batching._runner(),
        num_blocks=blocks + 1,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
    )
    run = simulate(engine, Trace("the same", arrivals))
    assert counted.steps == engine.counters.steps
    assert counted.preemptions == run.preemptions
    assert counted.seconds == pytest.approx(run.clock_seconds)
    assert counted.ttft_seconds == pytest.approx(mean(run.ttft_seconds))
    assert counted.tokens_per_second == pytest.approx(run.output_tokens_per_second)
    needed = sum(job.prompt_tokens + job.output_tokens - 1 for job in jobs)
    assert counted.again_tokens == engine.counters.computed_tokens - needed


def test_a_small_pool_shows_pre_emptions() -> None:
    values = batching.panel().values() | {"blocks": "10"}
    answer = batching.panel().answer(values, "")
    jobs = batching.workload(12, "all", 0.75, seed=1)
    events = batching.engine_run(jobs, 4, 256, 10)
    assert sum(isinstance(event, Preempted) for event in events) > 0
    assert "The pool is too small" in answer.words
    assert "pre-empted" in answer.parts["lanes"]


def test_the_smallest_pool_holds_the_longest_request() -> None:
    smallest = min(int(stop) for stop in stops_of("blocks") if stop != "enough")
    longest = batching._PROMPT_TOKENS + batching._MOST_OUTPUT_TOKENS
    jobs = (Job("r0", batching._PROMPT_TOKENS, batching._MOST_OUTPUT_TOKENS),)
    assert longest <= smallest * 16
    run = timeline(batching.engine_run(jobs, 1, 16, smallest))
    assert run.lanes[0].reason == "length"


def test_the_spread_moves_no_mean_and_a_seed_is_a_draw() -> None:
    outputs = [
        job.output_tokens for seed in range(200) for job in batching.workload(16, "all", 0.5, seed)
    ]
    assert mean(outputs) == pytest.approx(12, abs=0.5)
    assert len({batching.workload(6, "50", 1.0, seed) for seed in range(1, 10)}) == 9
    assert batching.workload(6, "50", 1.0, 3) == batching.workload.__wrapped__(6, "50", 1.0, 3)
    times = [job.arrival_seconds for job in batching.workload(6, "50", 1.0, 3)]
    assert times[0] == 0
    assert times == sorted(times)


def test_one_axis_shows_steps_or_seconds() -> None:
    values = batching.panel().values()
    for unit in ("steps", "seconds"):
        drawn = batching.panel().answer(values | {"unit": unit}, "").parts["lanes"]
        assert f">{unit}<" in drawn
