"""One engine on a simulated clock: a trace in, latencies and throughput out.

Models: the engine as it serves, step by step: requests are added when their time has come, a step
takes what the runner predicts, and where nothing is left to do the clock jumps to the next arrival.

Assumes: an engine of its own, whose runner is a `RooflineRunner`. A request that the engine can
never serve (longer than the model's context or the whole pool) is refused on arrival and counts in
no latency; one that the context ends early is served as far as it goes.

Ignores: the network, the tokenizer, and what an engine does between two steps, but for the runner's
stated overhead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from servelab.serving.engine import Engine
from servelab.serving.params import SamplingParams
from servelab.serving.request import Request, RequestOutput
from servelab.serving.roofline_runner import RooflineRunner
from servelab.serving.scheduler import Counters
from servelab.simulation.traces import Arrival, Trace

_GREEDY = SamplingParams(temperature=0)

# Steps between two calls of ``progress``.
_STEPS_PER_REPORT = 200


class Served(NamedTuple):
    """What is kept of a finished request; times in seconds of the simulated clock."""

    arrival: int  # its place in the trace
    arrival_seconds: float
    first_token_seconds: float
    last_token_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int

    @property
    def ttft_seconds(self) -> float:
        """Return the time to the first token, queueing included."""
        return self.first_token_seconds - self.arrival_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Return the mean time per output token behind the first; None if there is no second."""
        if self.output_tokens < 2:
            return None
        return (self.last_token_seconds - self.first_token_seconds) / (self.output_tokens - 1)

    @property
    def latency_seconds(self) -> float:
        """Return the time from arrival to the last token."""
        return self.last_token_seconds - self.arrival_seconds


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the least value that at least ``percent`` of all values do not exceed: nearest rank.

    Nothing is interpolated, so the answer is a value that occurred.
    Raises: ``ValueError`` for no values, or a percentage out of 0 to 100.

    >>> percentile([4, 1, 3, 2], 50), percentile([4, 1, 3, 2], 99)
    (2, 4)
    """
    ranked = sorted(values)
    if not ranked or not 0 <= percent <= 100:
        raise ValueError(f"a percentile is of values, from 0 to 100: {percent} of {len(ranked)}")
    return ranked[max(1, math.ceil(percent * len(ranked) / 100)) - 1]


@dataclass(frozen=True)
class Simulation:
    """What a service did with a trace.

    Fields: ``trace``; ``served`` in order of their last token; ``refused`` places in the trace of
    requests that can never be served, with the first reason; ``clock_seconds`` when it ended;
    ``counters`` of the scheduler; ``num_blocks`` that tables can hold; ``block_size``;
    ``block_seconds`` held blocks, summed over time, as the steps left them; ``peak_blocks``;
    ``request_seconds`` unfinished requests, summed over time; ``interrupted`` before all were
    served.
    """

    trace: Trace
    served: tuple[Served, ...]
    refused: tuple[int, ...]
    refusal: str | None
    clock_seconds: float
    counters: Counters
    num_blocks: int
    block_size: int
    block_seconds: float
    peak_blocks: int
    request_seconds: float
    interrupted: bool

    @property
    def output_tokens_per_second(self) -> float:
        """Return the tokens of served requests per second from 0 to the end of the run."""
        tokens = sum(one.output_tokens for one in self.served)
        return tokens / self.clock_seconds if self.clock_seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        """Return the served requests per second from 0 to the end of the run."""
        return len(self.served) / self.clock_seconds if self.clock_seconds else 0.0

    @property
    def ttft_seconds(self) -> list[float]:
        """Return each served request's time to its first token."""
        return [one.ttft_seconds for one in self.served]

    @property
    def tpot_seconds(self) -> list[float]:
        """Return the time per output token of each served request with at least two."""
        return [t for t in (one.tpot_seconds for one in self.served) if t is not None]

    @property
    def latency_seconds(self) -> list[float]:
        """Return each served request's time from arrival to last token."""
        return [one.latency_seconds for one in self.served]

    @property
    def preemptions(self) -> int:
        """Return how often a sequence lost its blocks."""
        return self.counters.preemptions_by_recompute + self.counters.preemptions_by_swap

    @property
    def prefix_hit_rate(self) -> float:
        """Return the share of tokens looked up that the prefix cache had.

        A sequence that lost its blocks is looked up again when it comes back.
        """
        queried = self.counters.prefix_queried_tokens
        return self.counters.prefix_hit_tokens / queried if queried else 0.0

    @property
    def mean_pool_use(self) -> float:
        """Return the share of the pool's blocks that tables held, mean over time."""
        whole = self.num_blocks * self.clock_seconds
        return self.block_seconds / whole if whole else 0.0

    @property
    def mean_requests(self) -> float:
        """Return the requests in the system, waiting or running, mean over time."""
        return self.request_seconds / self.clock_seconds if self.clock_seconds else 0.0

    @property
    def unfinished_at_last_arrival(self) -> int:
        """Return the requests that were waiting or running when the last one arrived, it included.

        In a service that keeps up their number does not grow with the length of the trace.
        """
        end = self.trace.seconds
        done = sum(one.last_token_seconds < end for one in self.served)
        return len(self.trace.arrivals) - len(self.refused) - done

    @property
    def littles_law_error(self) -> float:
        """Return by what share Little's law is missed: 0 but for rounding, or a request was lost.

        One side is ``request_seconds``, counted from step to step; the other is the time that each
        request spent in the system, by its own two times, those still unfinished included.
        """
        gone = {one.arrival for one in self.served}.union(self.refused)
        spent = [one.latency_seconds for one in self.served]
        for place, arrival in enumerate(self.trace.arrivals):
            if place not in gone and arrival.seconds < self.clock_seconds:
                spent.append(self.clock_seconds - arrival.seconds)
        total = math.fsum(spent)
        return abs(self.request_seconds - total) / total if total else 0.0


def simulate(
    engine: Engine, trace: Trace, progress: Callable[[int, float], None] | None = None
) -> Simulation:
    """Serve a trace to its end, or until interrupted.

    Parameters: ``engine`` unused so far, with a `RooflineRunner`; ``progress`` is told now and then
    how many requests are done, refused ones included, and the clock's seconds. A
    ``KeyboardInterrupt``, wherever it comes from, ends the run with what is done so far.
    Raises: ``TypeError`` for another runner, ``ValueError`` for an engine that has served before.

    >>> from servelab import hardware, models
    >>> from servelab.simulation import poisson
    >>> runner = RooflineRunner(models.get("qwen3-8b"), hardware.get("a100-sxm-40gb"))
    >>> run = simulate(Engine(runner), poisson(4.0, [(1000, 50)] * 100))
    >>> len(run.served), f"{percentile(run.ttft_seconds, 50) * 1e3:.1f} ms"
    (100, '49.7 ms')
    """
    service = _Service(engine, trace)
    interrupted = False
    try:
        while service.step():
            if progress is not None and service.steps % _STEPS_PER_REPORT == 0:
                progress(service.done, service.clock)
    except KeyboardInterrupt:
        interrupted = True
    return service.result(interrupted)


class _Service:
    """An engine, a trace, and how far they have come; its numbers are those of whole steps."""

    def __init__(self, engine: Engine, trace: Trace) -> None:
        if not isinstance(engine.runner, RooflineRunner):
            raise TypeError(f"simulation needs a RooflineRunner, got {engine.runner!r}")
        if engine.clock_seconds or engine.unfinished:
            raise ValueError("simulation needs an engine that has served nothing yet")
        self.engine, self.runner, self.trace = engine, engine.runner, trace
        self.refused: list[int] = []
        self.refusal: str | None = None
        #: Requests to come, with their places in the trace and the tokens that each can generate.
        self.coming = [
            (place, arrival, room)
            for place, arrival in enumerate(trace.arrivals)
            if (room := self._room(place, arrival))
        ]
        self.arrived = self.added = 0  # how many of them the clock has passed, the engine has
        self.served: list[Served] = []
        self.steps = self.peak_blocks = 0
        self.clock = self.block_seconds = self.request_seconds = 0.0

    def _room(self, place: int, arrival: Arrival) -> int:
        """Return the tokens that a request can generate; if none, note that it is refused."""
        try:
            return self.engine.limits.room(arrival.prompt_tokens, arrival.output_tokens)
        except ValueError as error:
            self.refused.append(place)
            self.refusal = self.refusal or str(error)
            return 0

    @property
    def done(self) -> int:
        """Return the requests that need no more work, by the clock."""
        passed = self.coming[self.arrived][0] if self.arrived < len(self.coming) else math.inf
        return len(self.served) + bisect_left(self.refused, passed)

    def step(self) -> bool:
        """Take one step of the engine; False: everything is served."""
        engine = self.engine
        if self.arrived == len(self.served):  # idle: on to the next arrival
            if self.arrived == len(self.coming):
                return False
            engine.clock_seconds = self.coming[self.arrived][1].seconds
            self.arrived, _ = self._arrivals(engine.clock_seconds)
        self._add()
        before, present = engine.clock_seconds, self.arrived - len(self.served)
        finished = [self._row(answer) for answer in engine.step()]
        clock, pool = engine.clock_seconds, engine.scheduler.pool
        arrived, waited = self._arrivals(clock)
        held = pool.shape.num_blocks - 1 - pool.num_free
        self.steps += 1
        self.peak_blocks = max(self.peak_blocks, held)
        self.block_seconds += held * (clock - before)
        self.request_seconds += present * (clock - before) + waited
        self.clock, self.arrived = clock, arrived
        self.served += finished
        return True

    def _arrivals(self, clock: float) -> tuple[int, float]:
        """Return how many requests have come by then, and how long those have been there that were
        not counted yet, all together."""
        arrived, seconds = self.arrived, 0.0
        while arrived < len(self.coming) and self.coming[arrived][1].seconds <= clock:
            seconds += clock - self.coming[arrived][1].seconds
            arrived += 1
        return arrived, seconds

    def _add(self) -> None:
        """Hand over to the engine who has come, but no more than could start in one step.

        First come, first served: who waits out here would wait in there, and there his prompt takes
        memory.
        """
        scheduler = self.engine.scheduler
        while self.added < self.arrived and len(scheduler.waiting) <= scheduler.max_num_seqs:
            place, arrival, room = self.coming[self.added]
            prompt = self.runner.new_prompt(arrival.prompt_tokens, self._shared(arrival))
            # Nothing is left to check: the prompt is made here, and there is room for it.
            request = Request(None, prompt, _GREEDY, room)
            self.engine.submit(request, str(place), arrival_seconds=arrival.seconds)
            self.added += 1

    def _shared(self, arrival: Arrival) -> tuple[int, ...]:
        """Return the prompt's tokens where the trace knows its blocks: their ids, repeated."""
        tokens: list[int] = []
        for block in arrival.block_ids:
            tokens += [block] * self.trace.block_tokens
        return tuple(tokens[: arrival.prompt_tokens])

    def _row(self, answer: RequestOutput) -> Served:
        times = answer.times
        if times.first_token is None or times.last_token is None:
            raise RuntimeError(f"request {answer.request_id} failed: {answer.error}")
        return Served(
            int(answer.request_id),
            times.arrival,
            times.first_token,
            times.last_token,
            len(answer.prompt_token_ids),
            answer.num_cached_tokens,
            len(answer.outputs[0].token_ids),
            answer.num_preemptions,
        )

    def result(self, interrupted: bool) -> Simulation:
        """Return what is done so far."""
        return Simulation(
            trace=self.trace,
            served=tuple(self.served),
            refused=tuple(self.refused),
            refusal=self.refusal,
            clock_seconds=self.clock,
            counters=replace(self.engine.counters),
            num_blocks=self.engine.scheduler.pool.shape.num_blocks - 1,
            block_size=self.engine.scheduler.pool.block_size,
            block_seconds=self.block_seconds,
            peak_blocks=self.peak_blocks,
            request_seconds=self.request_seconds,
            interrupted=interrupted,
        )
