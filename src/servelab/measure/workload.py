"""Requests of mixed lengths, served by a real engine and by a predicted one in the same way.

Models: requests that arrive over time and leave when their last token is there; one loop for every
runner, so that a difference between two runs is a difference between two clocks. The clock of a run
is the engine's: a runner's seconds are added up, and where nothing is left to do it jumps to the
next arrival, so that nobody waits for somebody to arrive.

Assumes: lengths of answers are given; prompts share nothing.

Ignores: the time of adding a request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from servelab.decoder import TorchRunner
from servelab.serving import Engine, Plan, SamplingParams, StepResult
from servelab.serving.plan import Runner
from servelab.units import check_count, check_number, check_positive, dtype_bits

Arrivals = tuple[tuple[float, int, int], ...]  # seconds, tokens of prompt and answer
Times = tuple[tuple[float, float], ...]  # of the first and the last token of each request


@dataclass(frozen=True)
class Workload:
    """Requests, the engine they were sent to, and when their tokens came.

    Parameters: ``model`` by its bundled name; ``dtype`` it ran in; ``requests`` in order of
    arrival: second of arrival, tokens of prompt and answer; ``num_blocks``, ``block_size``,
    ``max_num_seqs``, ``max_num_batched_tokens`` of the engine; ``runs`` that were measured, each
    with the seconds of every request's first and last token on the engine's clock.
    Raises: ``TypeError``, ``ValueError`` that names the field and the rule it broke.

    >>> work = Workload("stories", "bf16", ((0.0, 8, 4), (0.5, 8, 1)), 9, 16, 2, 64)
    >>> work.output_tokens, work.at(runs=(((0.1, 0.4), (0.6, 0.6)),)).tokens_per_second(0)
    (5, 8.333333333333334)
    """

    model: str
    dtype: str
    requests: Arrivals
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    runs: tuple[Times, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be a name, got {self.model!r}")
        dtype_bits(self.dtype)
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            check_count(name, getattr(self, name))
        requests = tuple(_request(*_row("requests", row, 3)) for row in self.requests)
        if not requests or any(b[0] < a[0] for a, b in pairwise(requests)):
            raise ValueError("requests must be at least one, in order of arrival")
        runs = tuple(tuple(_times(*_row("runs", row, 2)) for row in run) for run in self.runs)
        if any(len(run) != len(requests) for run in runs):
            raise ValueError(f"runs must have the times of all {len(requests)} requests")
        object.__setattr__(self, "requests", requests)
        object.__setattr__(self, "runs", runs)

    @property
    def output_tokens(self) -> int:
        """Return the tokens that are generated for all requests."""
        return sum(output for _, _, output in self.requests)

    def at(self, runs: tuple[Times, ...]) -> Workload:
        """Return the same requests and engine with other runs."""
        size = self.num_blocks, self.block_size, self.max_num_seqs, self.max_num_batched_tokens
        return Workload(self.model, self.dtype, self.requests, *size, runs)

    def ttft_seconds(self, run: int) -> list[float]:
        """Return each request's time to its first token in a run, queueing included."""
        times = zip(self.requests, self.runs[run], strict=True)
        return [first - arrival for (arrival, _, _), (first, _) in times]

    def tpot_seconds(self, run: int) -> list[float]:
        """Return the time per token behind the first, of each request that has two or more."""
        times = zip(self.requests, self.runs[run], strict=True)
        return [(last - first) / (n - 1) for (_, _, n), (first, last) in times if n > 1]

    def tokens_per_second(self, run: int) -> float:
        """Return the tokens generated per second from 0 to the last one."""
        return self.output_tokens / max(last for _, last in self.runs[run])


class WallClockRunner(TorchRunner):
    """A runner whose step takes as long as the engine takes for it: from the end of the last one.

    What the scheduler and the accounting need between two steps counts as well, then.
    """

    mark: float | None = None  # end of the last step; None where nothing was under way

    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step."""
        result, now = super().execute(plan), perf_counter()
        seconds = result.seconds if self.mark is None else now - self.mark
        self.mark = now
        return StepResult(result.tokens, seconds, result.logprobs)


def mixed(
    count: int, rate: float, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0
) -> Arrivals:
    """Return ``count`` requests, ``rate`` per second on average, lengths drawn evenly in ranges.

    >>> mixed(2, rate=10, prompt=(4, 8), output=(1, 3))
    ((0.0, 7, 2), (0.004133, 8, 2))
    """
    draw, clock, rows = random.Random(seed), 0.0, []
    check_positive("rate", rate)
    for _ in range(check_count("count", count)):
        rows.append((round(clock, 6), draw.randint(*prompt), draw.randint(*output)))
        clock += draw.expovariate(rate)
    return tuple(rows)


def serve(
    runner: Runner, work: Workload, prompt: Callable[[int], Sequence[int]] | None = None
) -> Times:
    """Serve the requests of ``work`` with a runner; return when their tokens came, by its clock.

    Parameters: ``prompt`` makes one of so many tokens (None: a token of its own for each request).
    Raises: ``ValueError`` where a request does not fit the model or the pool.

    >>> from servelab import hardware, models
    >>> from servelab.serving import RooflineRunner
    >>> runner = RooflineRunner(models.get("stories"), hardware.get("a100-sxm-40gb"))
    >>> work = Workload("stories", "bf16", ((0.0, 8, 4), (0.5, 8, 1)), 9, 16, 2, 64)
    >>> (first, last), (second, _) = serve(runner, work, runner.new_prompt)
    >>> 0 < first < last < 0.5 < second
    True
    """
    engine = Engine(
        runner,
        num_blocks=work.num_blocks,
        block_size=work.block_size,
        max_num_seqs=work.max_num_seqs,
        max_num_batched_tokens=work.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    found: dict[str, tuple[float, float]] = {}
    coming = list(enumerate(work.requests))
    while coming or engine.unfinished:
        if not engine.unfinished:  # idle: on to the next arrival
            engine.clock_seconds = max(engine.clock_seconds, coming[0][1][0])
            if isinstance(runner, WallClockRunner):
                runner.mark = None
        while coming and coming[0][1][0] <= engine.clock_seconds:
            place, (arrival, tokens, output) = coming.pop(0)
            own = [place % runner.vocab_size] * tokens if prompt is None else prompt(tokens)
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            engine.add(list(own), params, str(place), arrival_seconds=arrival)
        for answer in engine.step():
            first, last = answer.times.first_token, answer.times.last_token
            if first is None or last is None:
                raise RuntimeError(f"request {answer.request_id} failed: {answer.error}")
            found[answer.request_id] = round(first, 9), round(last, 9)
    return tuple(found[str(place)] for place in range(len(work.requests)))


def _row(name: str, row: object, length: int) -> list[float]:
    if not isinstance(row, list | tuple) or len(row) != length:
        raise ValueError(f"{name} must hold rows of {length} numbers, got {row!r}")
    return list(row)


def _request(seconds: float, prompt: float, output: float) -> tuple[float, int, int]:
    if check_number("arrival", seconds) < 0:
        raise ValueError(f"arrival must be at least 0, got {seconds}")
    return seconds, check_count("prompt", prompt), check_count("output", output)


def _times(first: float, last: float) -> tuple[float, float]:
    if check_positive("last token", last) < check_positive("first token", first):
        raise ValueError(f"the last token cannot come before the first, got {first}, {last}")
    return first, last
