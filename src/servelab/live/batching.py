"""The explorer of batching: one workload, served in static batches and continuously, side by side.

Models: requests of one prompt length whose answers differ (log-normal around a mean of 12 tokens),
arriving at random or all at once. The continuous run is the real engine on the clock of a
`RooflineRunner`, Qwen3-8B on an H100; the static one gets the same prices. Both are drawn, and
counted, from their events.

Assumes: the static server has memory for every batch, computes a batch's prompts in one step, and
knows no token budget: those two controls are the engine's.

Ignores: the prefix cache: no two prompts are alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean

from servelab import hardware, models
from servelab.explore import Job, Timeline, draw_timeline, static_batches, timeline
from servelab.explore.pool import counted
from servelab.explore.state import RunEvent
from servelab.live.panel import Answer, Choice, Panel, Slider, Values, among, table_html
from servelab.paging import Event
from servelab.serving import Engine, RooflineRunner, SamplingParams
from servelab.serving.events import Planned
from servelab.simulation import poisson
from servelab.units import format_seconds

_PROMPT_TOKENS, _MEAN_OUTPUT_TOKENS, _MOST_OUTPUT_TOKENS = 48, 12, 80
_BLOCK_SIZE = 16
_BLOCKS_ENOUGH = 1000
_AT_ONCE = "all"
_ENOUGH = "enough"
_RATES = (
    (_AT_ONCE, "all at once"),
    *((rate, f"{rate} per second, at random") for rate in ("200", "100", "50", "25", "10")),
)
_GROUPS: dict[str, tuple[Choice | Slider, ...]] = {
    "Requests": (
        Slider("requests", "How many", ("2", "4", "6", "8", "12", "16"), "12"),
        Choice("rate", "They come", _RATES, _AT_ONCE),
        Slider("spread", "Spread of the answers", ("0", "0.25", "0.5", "0.75", "1"), "0.75"),
        Slider("seed", "Draw", tuple(map(str, range(1, 10))), "1"),
    ),
    "Server": (
        Slider("places", "Sequences at a time", ("1", "2", "3", "4", "6", "8", "12"), "4"),
        Slider(
            "budget",
            "Token budget",
            ("16", "32", "48", "64", "96", "128", "256", "640"),
            "256",
        ),
        Slider("blocks", "Blocks", ("8", "10", "12", "14", "16", "20", "24", _ENOUGH), _ENOUGH),
    ),
    "Show": (Choice("unit", "Time in", (("seconds", "seconds"), ("steps", "steps")), "seconds"),),
}


def panel() -> Panel:
    """Return the explorer, opened with twelve requests that come at once."""
    title = "Static and continuous batching of the same requests"
    return Panel("batching", title, {**_GROUPS}, answer)


def answer(values: Values, action: str) -> Answer:
    """Return both runs, drawn and counted.

    Raises: ``ValueError`` for what no control offers.
    """
    for control in (control for group in _GROUPS.values() for control in group):
        among(control.name, values[control.name], control.known)
    jobs = workload(
        int(values["requests"]), values["rate"], float(values["spread"]), int(values["seed"])
    )
    places, budget = int(values["places"]), int(values["budget"])
    blocks = _BLOCKS_ENOUGH if values["blocks"] == _ENOUGH else int(values["blocks"])
    runs = static_run(jobs, places), engine_run(jobs, places, budget, blocks)
    lanes = timeline(runs[0], "seconds"), timeline(runs[1], "seconds", budget)
    static, continuous = (count_run(runs[i], lanes[i], jobs) for i in (0, 1))
    if values["unit"] == "steps":
        lanes = timeline(runs[0]), timeline(runs[1], budget=budget)
    names = f"static, batches of {places}", f"continuous, {places} at a time"
    picture = draw_timeline(
        dict(zip(names, lanes, strict=True)),
        "Who computes when",
    )
    rows = [[title, said, continuous.rows()[title]] for title, said in static.rows().items()]
    table = table_html("The same requests, counted from the events", ["", *names], rows)
    return Answer(
        _words(static, continuous),
        parts={"lanes": picture, "numbers": table},
        said={"blocks": f"{values['blocks']} of {_BLOCK_SIZE} slots"},
    )


def _words(static: Counted, continuous: Counted) -> str:
    said = (
        f"Continuous batching takes {counted(continuous.steps, 'step')} instead of "
        f"{static.steps:,}, and {format_seconds(continuous.seconds)} instead of "
        f"{format_seconds(static.seconds)}. Of the places that decode in static batches "
        f"{static.useful:.0%} compute a token that somebody reads."
    ).replace("%", " %")
    if continuous.preemptions:
        said += (
            f" The pool is too small: {counted(continuous.preemptions, 'pre-emption')}, "
            f"{counted(continuous.again_tokens, 'token')} computed again. The "
            "static server is given memory for all that its batches may become."
        )
    return said


# --- the runs -----------------------------------------------------------------------------------


@lru_cache
def workload(requests: int, rate: str, spread: float, seed: int) -> tuple[Job, ...]:
    """Return requests; ``spread`` is the sigma of the answers' logarithm, and moves no mean.

    >>> [job.output_tokens for job in workload(4, "all", spread=0.0, seed=1)]
    [12, 12, 12, 12]
    """
    draw = random.Random(seed)
    centre = math.log(_MEAN_OUTPUT_TOKENS) - spread**2 / 2
    outputs = [round(math.exp(centre + spread * draw.gauss(0, 1))) for _ in range(requests)]
    lengths = [(_PROMPT_TOKENS, min(max(1, each), _MOST_OUTPUT_TOKENS)) for each in outputs]
    if rate == _AT_ONCE:
        times = [0.0] * requests
    else:
        times = [arrival.seconds for arrival in poisson(float(rate), lengths, seed).arrivals]
    pairs = zip(lengths, times, strict=True)
    return tuple(Job(f"r{i}", *sizes, time) for i, (sizes, time) in enumerate(pairs))


@lru_cache
def _runner() -> RooflineRunner:
    return RooflineRunner(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))


@lru_cache
def static_run(jobs: tuple[Job, ...], places: int) -> list[RunEvent]:
    """Return the events of static batches."""
    return list(static_batches(jobs, places, lambda step: _runner().pricer.price(step).seconds))


@lru_cache
def engine_run(jobs: tuple[Job, ...], places: int, budget: int, blocks: int) -> list[RunEvent]:
    """Return the events of the engine, those of its pool left out."""
    events: list[RunEvent] = []
    runner = _runner()
    engine = Engine(
        runner,
        num_blocks=blocks + 1,
        block_size=_BLOCK_SIZE,
        max_num_seqs=places,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
        sink=lambda event: None if isinstance(event, Event) else events.append(event),
    )
    coming = list(jobs)
    while coming or engine.unfinished:
        if not engine.unfinished:  # idle: on to the next arrival
            engine.clock_seconds = max(engine.clock_seconds, coming[0].arrival_seconds)
        while coming and coming[0].arrival_seconds <= engine.clock_seconds:
            job = coming.pop(0)
            engine.add(
                runner.new_prompt(job.prompt_tokens),
                SamplingParams(temperature=0, max_tokens=job.output_tokens),
                request_id=job.name,
                arrival_seconds=job.arrival_seconds,
            )
        engine.step()
    return events


# --- what is counted ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """The numbers of a run, from its events."""

    steps: int
    seconds: float
    useful: float
    ttft_seconds: float
    tokens_per_second: float
    preemptions: int
    again_tokens: int

    def rows(self) -> dict[str, str]:
        """Return each number as text, by what it is."""
        return {
            "steps": f"{self.steps:,}",
            "time to the end": format_seconds(self.seconds),
            "decode places that are useful": f"{self.useful:.1%}".replace("%", " %"),
            "mean time to first token": format_seconds(self.ttft_seconds),
            "output tokens per second": f"{self.tokens_per_second:,.0f}",
            "pre-emptions": f"{self.preemptions:,}",
            "tokens computed again": f"{self.again_tokens:,}",
        }


def count_run(events: Sequence[RunEvent], run: Timeline, jobs: Sequence[Job]) -> Counted:
    """Return the numbers of a run of these requests, all of which it has served.

    Parameters: ``events`` of the run, and its timeline ``run`` in seconds.
    """
    tokens = run.tokens
    arrived = {lane.name: lane.began for lane in run.lanes}
    first: dict[str, float] = {}
    plans = (event for event in events if isinstance(event, Planned))
    for plan, bar in zip(plans, run.bars, strict=True):
        for name, _, _, samples in plan.rows:
            if samples:
                first.setdefault(name, bar.stop)
    outputs = sum(job.output_tokens for job in jobs)
    decodes = tokens["decode"] + tokens["padding"]
    return Counted(
        steps=len(run.bars),
        seconds=run.end,
        useful=tokens["decode"] / decodes if decodes else 1.0,
        ttft_seconds=mean(first[name] - arrived[name] for name in arrived),
        tokens_per_second=outputs / run.end,
        preemptions=sum(lane.preempted for lane in run.lanes),
        # Each token is computed once but the last of an answer, which is only read.
        again_tokens=tokens["prefill"]
        + tokens["decode"]
        - sum(job.prompt_tokens + job.output_tokens - 1 for job in jobs),
    )
