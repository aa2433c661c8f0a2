"""Size a service by formula: one replica in its steady state, and how many of them it takes.

Models: a replica, an engine on one chip or on ``tp`` chips that share every layer. In a steady
state each request owes its prefill and its share of decode steps; Little's law says how many of
them decode at once, and from that follow the times and the cache that is held.

Assumes: arrivals at random, spread evenly over replicas; every request like the mean of its trace,
but for prompts, which queue as they are. Ranks of tensor parallelism do the same at the same time,
and their all-reduces overlap with nothing.

Ignores: the tail. Means are what a formula can say; percentiles are for
`servelab.simulation.service`. Blocks that requests share are counted once for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from servelab.hardware import Accelerator
from servelab.memory.search import largest
from servelab.models import ModelSpec
from servelab.models.parallel import rank
from servelab.roofline import Precision, step_time
from servelab.serving.engine import Engine
from servelab.serving.plan import Plan, StepResult
from servelab.serving.roofline_runner import RooflineRunner
from servelab.simulation.traces import Trace
from servelab.units import check_count, check_number, check_positive

Resource = Literal["capacity", "bandwidth", "compute", "link", "places"]
Missed = Literal["places", "capacity", "ttft", "tpot"]

# Prompts of a trace that the calculator prices: more change its means by less than its own error.
_PRICED = 100


class RankRunner(RooflineRunner):
    """Predicts the steps of one of ``tp`` ranks, all-reduces included: all ranks step together.

    Parameters: as `RooflineRunner`, with ``tp`` ranks.
    Raises: as `RooflineRunner`; ``ValueError`` where heads do not divide over ranks, or for more
    than one rank of a chip without a known link.

    >>> from servelab import hardware, models
    >>> runner = RankRunner(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"), tp=4)
    >>> runner.spec.kv_bytes_per_token(), f"{runner.link_seconds_per_token * 1e6:.2f} us"
    (36864, '1.97 us')
    """

    def __init__(
        self,
        spec: ModelSpec,
        chip: Accelerator,
        tp: int = 1,
        dtype: str = "bf16",
        **options: Any,
    ) -> None:
        super().__init__(rank(spec, tp), chip, dtype, **options)
        formats = Precision(activations=dtype, compute=dtype)
        #: Zero for a single rank; every token of a step is reduced after each half of a layer.
        self.link_seconds_per_token = step_time(spec, [(1, 0)], chip, formats, tp).link_seconds

    def execute(self, plan: Plan) -> StepResult:
        """Return the step as `RooflineRunner` does, the time on the link added."""
        result = super().execute(plan)
        return replace(result, seconds=result.seconds + self.link_seconds(plan.num_new_tokens))

    def link_seconds(self, tokens: int) -> float:
        """Return the time that the all-reduces of a step take."""
        return tokens * self.link_seconds_per_token / self.efficiency


@dataclass(frozen=True)
class Replica:
    """One engine, as it would be started: a model, the chip, ranks, and the engine's settings.

    Parameters: ``spec``; ``chip``; ``tp`` chips that share every layer; ``max_num_seqs``,
    ``max_num_batched_tokens``, ``gpu_memory_utilization`` and ``enable_prefix_caching`` as in
    `Engine`; ``runner_options`` of `RooflineRunner`: dtype, kv_dtype, weight_dtype, efficiency,
    overhead_seconds, reserve_bytes.
    Raises: ``TypeError``, ``ValueError`` for bad counts; when used, as `Engine`, and ``ValueError``
    where the weights leave no room.

    >>> from servelab import hardware, models
    >>> Replica(models.get("qwen3-8b"), hardware.get("l4")).pool_tokens
    33264
    """

    spec: ModelSpec
    chip: Accelerator
    tp: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = False
    runner_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tp", "max_num_seqs", "max_num_batched_tokens"):
            check_count(name, getattr(self, name))

    def runner(self) -> RankRunner:
        """Return a fresh runner."""
        return RankRunner(self.spec, self.chip, self.tp, **self.runner_options)

    def engine(self) -> Engine:
        """Return a fresh engine, its pool as large as the memory allows."""
        return Engine(
            self.runner(),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    @cached_property
    def pool_tokens(self) -> int:
        """Return the slots of the pool that sequences can have."""
        shape = self.engine().scheduler.pool.shape
        return (shape.num_blocks - 1) * shape.block_size

    def doubled(self, resource: Resource) -> Replica:
        """Return the same with twice of one resource.

        Parameters: ``resource`` "capacity" of the memory, its "bandwidth", "compute", the "link"
        between chips, or "places" (``max_num_seqs``).
        """
        chip = self.chip
        if resource == "places":
            return replace(self, max_num_seqs=2 * self.max_num_seqs)
        if resource == "capacity":
            visible = chip.visible_memory_bytes or chip.memory_bytes
            twice = replace(
                chip, memory_bytes=2 * chip.memory_bytes, visible_memory_bytes=2 * visible
            )
        elif resource == "bandwidth":
            twice = replace(chip, bandwidth_bytes_per_second=2 * chip.bandwidth_bytes_per_second)
        elif resource == "compute":
            rates = {dtype: 2 * rate for dtype, rate in chip.dense_flop_per_second.items()}
            twice = replace(chip, dense_flop_per_second=rates)
        elif resource == "link" and chip.link_bytes_per_second is not None:
            twice = replace(chip, link_bytes_per_second=2 * chip.link_bytes_per_second)
        else:
            raise ValueError(f"{chip.name} has no {resource!r} to double")
        return replace(self, chip=twice)


@dataclass(frozen=True)
class Targets:
    """What is promised: times that ``percent`` of the requests do not exceed.

    Raises: ``TypeError``, ``ValueError`` for times that are not positive, percentages beyond 100.

    >>> Targets(ttft_seconds=0.5, tpot_seconds=0.02).percent
    99
    """

    ttft_seconds: float
    tpot_seconds: float
    percent: float = 99

    def __post_init__(self) -> None:
        check_positive("ttft_seconds", self.ttft_seconds)
        check_positive("tpot_seconds", self.tpot_seconds)
        if check_positive("percent", self.percent) > 100:
            raise ValueError(f"percent must be at most 100, got {self.percent}")


# --- the calculator: means ----------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A replica in its steady state, by formula: means, no tail.

    Fields: ``rate`` of requests per second it gets; ``sequences`` that decode at once;
    ``held_tokens`` of their contexts, shared ones counted for each; ``prefill_share`` of the time
    that goes to prompts; ``ttft_seconds``, ``tpot_seconds``.
    """

    rate: float
    sequences: int
    held_tokens: float
    prefill_share: float
    ttft_seconds: float
    tpot_seconds: float


def estimate(replica: Replica, trace: Trace, rate: float, hit_rate: float = 0.0) -> Estimate | None:
    """Return the steady state of a replica that gets requests of a trace's lengths.

    A request owes ``d``, what its prompt adds to a step, and m decode steps of T(B), each shared by
    the B that decode. Always busy with them means 1 = rate (d + m T(B) / B); the step is then
    stretched to T(B) / (1 - rate d), which is the time per output token. Prompts queue for each
    other as in an M/G/1 queue (Pollaczek and Khinchine). A prompt waits for half a step, for
    that queue, and for its own steps, one for each chunk; the others decode in each of them.

    Parameters: ``trace`` for its lengths only; ``rate`` of requests per second; ``hit_rate`` share
    of each prompt that the prefix cache has.
    Returns: None where no number of sequences within the replica's places carries the rate.
    Raises: ``ValueError`` for a rate or share out of range, a replica that holds no model.

    >>> from servelab import hardware, models
    >>> from servelab.simulation import poisson
    >>> replica = Replica(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> found = estimate(replica, poisson(1.0, [(1000, 101)]), rate=10.0)
    >>> found.sequences, f"{found.tpot_seconds * 1e3:.2f} ms", f"{found.prefill_share:.2f}"
    (6, '5.36 ms', '0.10')
    """
    return _Owed(replica, trace, hit_rate).steady(rate)


class _Owed:
    """What a replica owes for the mean request of a trace; each price is asked for once."""

    def __init__(self, replica: Replica, trace: Trace, hit_rate: float) -> None:
        if not 0 <= check_number("hit_rate", hit_rate) < 1:
            raise ValueError(f"hit_rate must be in [0, 1), got {hit_rate}")
        self.replica, self.runner, self.hit_rate = replica, replica.runner(), hit_rate
        self.context = _mean_context(trace)
        self.decodes = sum(a.output_tokens - 1 for a in trace.arrivals) / len(trace.arrivals)
        self.prompts = [
            a.prompt_tokens for a in trace.arrivals[:: -(-len(trace.arrivals) // _PRICED)]
        ]
        self.chunks = sum(len(list(self._chunks(p))) for p in self.prompts) / len(self.prompts)
        self._debts: dict[int, tuple[float, float]] = {}

    def steady(self, rate: float) -> Estimate | None:
        """Return the steady state at a rate."""
        rate = check_positive("rate", rate)

        def is_behind(sequences: int) -> bool:
            return sequences < 1 or rate * self.each(sequences) >= 1

        fewer = largest(is_behind, self.replica.max_num_seqs)
        if fewer is None or fewer >= self.replica.max_num_seqs:
            return None
        sequences = fewer + 1
        mean, square = self.debts(sequences)
        step, share = self.decode(sequences), rate * mean
        queue = rate * square / (2 * (1 - share))
        return Estimate(
            rate,
            sequences,
            sequences * self.context,
            share,
            ttft_seconds=queue + mean + (0.5 + self.chunks) * step,
            tpot_seconds=step / (1 - share),
        )

    def each(self, sequences: int) -> float:
        """Return the seconds that a request owes where so many decode."""
        shared = self.decodes * self.decode(sequences) / sequences
        return self.debts(sequences)[0] + shared

    def decode(self, sequences: int) -> float:
        """Return the time of a step in which all decode."""
        return self.seconds([(1, self.context)] * sequences) + self.runner.overhead_seconds

    def debts(self, sequences: int) -> tuple[float, float]:
        """Return what a prompt adds to the steps that carry it: the mean, and that of squares."""
        if sequences not in self._debts:
            others = [(1, self.context)] * sequences
            alone, found = self.seconds(others), []
            for prompt in self.prompts:
                chunks = self._chunks(prompt)
                found.append(math.fsum(self.seconds([*others, each]) - alone for each in chunks))
            squares = math.fsum(debt**2 for debt in found)
            self._debts[sequences] = math.fsum(found) / len(found), squares / len(found)
        return self._debts[sequences]

    def seconds(self, step: list[tuple[int, int]]) -> float:
        """Return the time of a step, but for the overhead."""
        bound = self.runner.pricer.price(step).seconds / self.runner.efficiency
        return bound + self.runner.link_seconds(sum(new for new, _ in step))

    def _chunks(self, prompt: int) -> Iterator[tuple[int, int]]:
        """Yield the (new, cached) pairs in which a prompt is computed."""
        cached = int(self.hit_rate * prompt)
        while cached < prompt:
            new = min(self.replica.max_num_batched_tokens, prompt - cached)
            yield new, cached
            cached += new


def _mean_context(trace: Trace) -> int:
    """Return the context of the sequences that decode, averaged over steps."""
    steps = sum(a.output_tokens for a in trace.arrivals)
    tokens = sum(a.output_tokens * (a.prompt_tokens + a.output_tokens / 2) for a in trace.arrivals)
    return round(tokens / steps)


@dataclass(frozen=True)
class Least:
    """The fewest replicas whose means keep the targets, and what one fewer would miss.

    Fields: ``replicas``; ``each`` the steady state of one; ``missed`` with one replica fewer:
    "places" (no number of sequences within ``max_num_seqs`` carries the rate), "capacity" of the
    pool, "tpot" or "ttft"; None where one is enough.
    """

    replicas: int
    each: Estimate
    missed: Missed | None


def least_replicas(
    replica: Replica,
    trace: Trace,
    rate: float,
    targets: Targets,
    hit_rate: float = 0.0,
    most: int = 1024,
) -> Least:
    """Return the fewest replicas that keep the targets on average.

    With fewer the steady state misses them: its times on average, its pool, or there is none. A
    percentile can be kept all the same where a few outliers make the mean, or where a trace ends
    before its queues have grown.

    Parameters: as ``estimate``, ``rate`` that of the whole service; ``most`` replicas to consider.
    Raises: as ``estimate``; ``ValueError`` where ``most`` replicas are too few.

    >>> from servelab import hardware, models
    >>> from servelab.simulation import poisson
    >>> replica = Replica(models.get("qwen3-8b"), hardware.get("l4"))
    >>> targets = Targets(ttft_seconds=1.0, tpot_seconds=0.1)
    >>> found = least_replicas(replica, poisson(1.0, [(1000, 250)]), 10.0, targets)
    >>> found.replicas, found.missed
    (7, 'capacity')
    """
    rate, owed = check_positive("rate", rate), _Owed(replica, trace, hit_rate)

    def missed(replicas: int) -> Missed | None:
        found = owed.steady(rate / replicas)
        if found is None:
            return "places"
        if found.held_tokens > replica.pool_tokens:
            return "capacity"
        if found.tpot_seconds > targets.tpot_seconds:
            return "tpot"
        return "ttft" if found.ttft_seconds > targets.ttft_seconds else None

    fewer = largest(lambda n: n < 1 or missed(n) is not None, check_count("most", most)) or 0
    if fewer == most:
        raise ValueError(f"{most} replicas miss the targets on average: {missed(most)}")
    each = owed.steady(rate / (fewer + 1))
    if each is None:
        raise RuntimeError(f"{fewer + 1} replicas were enough and now are not")
    return Least(fewer + 1, each, missed(fewer) if fewer else None)
