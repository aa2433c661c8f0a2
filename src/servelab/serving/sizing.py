"""Size a service: how many replicas of a model on a chip keep promises of latency.

Models: a service of equal replicas, each an engine on one chip or on ``tp`` chips that share every
layer. Two answers to one question. A calculator: in a steady state each request owes its prefill
and its share of decode steps, and Little's law says how many of them decode at once; it knows means.
A simulation: each replica serves its part of a trace on the predicted clock; it knows the tail. What
limits a service is found by relief: of its resources, the one whose double helps most.

Assumes: replicas are independent; a router gives every request to one of them as it comes. Ranks of
tensor parallelism do the same at the same time, and their all-reduces overlap with nothing.

Ignores: failures, start-up, traffic that changes over the day, and users who wait for an answer
before they ask again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from servelab.hardware import Accelerator
from servelab.memory.search import largest
from servelab.models import ModelSpec
from servelab.models.parallel import rank
from servelab.roofline import Precision, step_time
from servelab.serving.engine import Engine
from servelab.serving.plan import Plan, StepResult
from servelab.serving.roofline_runner import RooflineRunner
from servelab.serving.simulation import Served, Simulation, percentile, simulate
from servelab.serving.traces import Arrival, Trace
from servelab.units import check_count, check_number, check_positive

Resource = Literal["capacity", "bandwidth", "compute", "link", "places"]
Router = Callable[[int, Arrival], int]

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
        tokens = sum(row.new_tokens for row in plan.rows)
        return replace(result, seconds=result.seconds + self.link_seconds(tokens))

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
    36416
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
    ``held_tokens`` in the cache; ``prefill_share`` of the time that goes to prompts;
    ``ttft_seconds``, ``tpot_seconds``.
    """

    rate: float
    sequences: int
    held_tokens: float
    prefill_share: float
    ttft_seconds: float
    tpot_seconds: float


def estimate(
    replica: Replica, trace: Trace, rate: float, hit_rate: float = 0.0
) -> Estimate | None:
    """Return the steady state of a replica that gets requests of a trace's lengths.

    A request owes ``d``, what its prompt adds to a step, and m decode steps of T(B), each shared by
    the B that decode. Always busy with them means 1 = rate (d + m T(B) / B); the step is then
    stretched to T(B) / (1 - rate d), which is the time per output token. Prompts queue for each
    other as in an M/G/1 queue (Pollaczek and Khinchine).

    Parameters: ``trace`` for its lengths only; ``rate`` of requests per second; ``hit_rate`` share
    of each prompt that the prefix cache has.
    Returns: None where no number of sequences within the replica's places carries the rate.
    Raises: ``ValueError`` for a rate or share out of range, a replica that holds no model.

    >>> from servelab import hardware, models
    >>> from servelab.serving import poisson
    >>> replica = Replica(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> found = estimate(replica, poisson(1.0, [(1000, 101)]), rate=10.0)
    >>> found.sequences, f"{found.tpot_seconds * 1e3:.2f} ms", f"{found.prefill_share:.2f}"
    (6, '5.40 ms', '0.12')
    """
    rate = check_positive("rate", rate)
    if not 0 <= check_number("hit_rate", hit_rate) < 1:
        raise ValueError(f"hit_rate must be in [0, 1), got {hit_rate}")
    runner, lengths = replica.runner(), trace.arrivals
    priced = lengths[:: -(-len(lengths) // _PRICED)]
    decodes = sum(a.output_tokens - 1 for a in lengths) / len(lengths)
    context = _mean_context(trace)

    def seconds(step: list[tuple[int, int]]) -> float:
        bound = runner.pricer.price(step).seconds / runner.efficiency
        return bound + runner.link_seconds(sum(new for new, _ in step))

    def decode(sequences: int) -> float:
        return seconds([(1, context)] * sequences) + runner.overhead_seconds

    def debts(sequences: int) -> list[float]:
        """Return what each prompt adds to the steps that carry it."""
        others, found = [(1, context)] * sequences, []
        alone = seconds(others)
        for arrival in priced:
            hit = int(hit_rate * arrival.prompt_tokens)
            chunks = list(_chunks(hit, arrival.prompt_tokens, replica.max_num_batched_tokens))
            found.append(math.fsum(seconds([*others, chunk]) - alone for chunk in chunks))
        return found

    def busy(sequences: int) -> float:
        """Return the share of the time that is owed, by that many sequences at once."""
        owed = debts(sequences)
        return rate * (math.fsum(owed) / len(owed) + decodes * decode(sequences) / sequences)

    fewer = largest(lambda n: n < 1 or busy(n) > 1, replica.max_num_seqs)
    if fewer is None or fewer >= replica.max_num_seqs:
        return None
    sequences = fewer + 1
    owed = debts(sequences)
    mean, square = (math.fsum(d**p for d in owed) / len(owed) for p in (1, 2))
    share = rate * mean
    step = decode(sequences)
    queue = rate * square / (2 * (1 - share))
    return Estimate(
        rate,
        sequences,
        sequences * context,
        share,
        ttft_seconds=queue + mean + 1.5 * step,
        tpot_seconds=step / (1 - share),
    )


def _mean_context(trace: Trace) -> int:
    """Return the context of the sequences that decode, averaged over steps."""
    steps = sum(a.output_tokens for a in trace.arrivals)
    tokens = sum(
        a.output_tokens * (a.prompt_tokens + a.output_tokens / 2) for a in trace.arrivals
    )
    return round(tokens / steps)


def _chunks(cached: int, prompt: int, budget: int) -> Iterator[tuple[int, int]]:
    """Yield the (new, cached) pairs in which a prompt is computed."""
    while cached < prompt:
        new = min(budget, prompt - cached)
        yield new, cached
        cached += new


# --- the simulation: tails ----------------------------------------------------------------------


@dataclass(frozen=True)
class Service:
    """What the replicas did with a trace, each with its part.

    Fields: ``trace`` whole; ``runs`` of the replicas that got a request.
    """

    trace: Trace
    runs: tuple[Simulation, ...]

    @cached_property
    def served(self) -> list[Served]:
        """Return every finished request, of all replicas; ``arrival`` is its place in the part."""
        return list(chain.from_iterable(run.served for run in self.runs))

    @property
    def refused(self) -> int:
        """Return how many requests no replica can ever serve."""
        return sum(len(run.refused) for run in self.runs)

    def ttft_seconds(self, percent: float) -> float:
        """Return a percentile of the times to the first token."""
        return percentile((one.ttft_seconds for one in self.served), percent)

    def tpot_seconds(self, percent: float) -> float:
        """Return a percentile of the times per further token; 0 where no answer has a second."""
        times = [one.tpot_seconds for one in self.served if one.tpot_seconds is not None]
        return percentile(times, percent) if times else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        """Return the tokens of all answers over the time to the last of them."""
        tokens = sum(one.output_tokens for one in self.served)
        return tokens / max(run.clock_seconds for run in self.runs)

    @property
    def prefix_hit_rate(self) -> float:
        """Return the share of the prompts' tokens that the prefix caches had."""
        found = sum(run.counters.prefix_hit_tokens for run in self.runs)
        queried = sum(run.counters.prefix_queried_tokens for run in self.runs)
        return found / queried if queried else 0.0

    @property
    def peak_pool_share(self) -> float:
        """Return the largest share of its pool that any replica ever held."""
        return max(run.peak_blocks / run.num_blocks for run in self.runs)

    def strain(self, targets: Targets) -> float:
        """Return the larger of the two times over what was promised: at most 1 is kept.

        Infinite where requests were refused.
        """
        return math.inf if self.refused else max(self.strains(targets).values())

    def strains(self, targets: Targets) -> dict[str, float]:
        """Return each time over what was promised, by its name: "ttft", "tpot"."""
        return {
            "ttft": self.ttft_seconds(targets.percent) / targets.ttft_seconds,
            "tpot": self.tpot_seconds(targets.percent) / targets.tpot_seconds,
        }


def serve(
    replica: Replica, trace: Trace, replicas: int = 1, router: Router | None = None
) -> Service:
    """Serve a trace with equal replicas.

    Parameters: ``replicas`` from 1; ``router`` from a request's place in the trace and the request
    to a number, whose remainder by ``replicas`` says who gets it (None: each in turn).
    Raises: as `Engine`; ``ValueError`` where no request can be served.

    >>> from servelab import hardware, models
    >>> from servelab.serving import poisson
    >>> replica = Replica(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> found = serve(replica, poisson(8.0, [(1000, 50)] * 100), replicas=2)
    >>> len(found.served), f"{found.tpot_seconds(50) * 1e3:.2f} ms"
    (100, '4.78 ms')
    """
    parts: list[list[Arrival]] = [[] for _ in range(check_count("replicas", replicas))]
    for place, arrival in enumerate(trace.arrivals):
        chosen = place if router is None else router(place, arrival)
        parts[chosen % replicas].append(arrival)
    runs = tuple(
        simulate(replica.engine(), replace(trace, arrivals=tuple(part))) for part in parts if part
    )
    if not any(run.served for run in runs):
        raise ValueError(f"no request can be served: {runs[0].refusal}")
    return Service(trace, runs)


@dataclass(frozen=True)
class Sizing:
    """The fewest replicas that keep the targets in simulation, and what one fewer would miss.

    Fields: ``replica``; ``targets``; ``replicas``; ``kept`` the service that they are; ``missed``
    the service of one replica fewer (of one alone: the same traffic twice as fast), ``target`` it
    misses most and ``limit``: the resource whose double relieves it most; ``relief`` its strain
    with each resource doubled.
    """

    replica: Replica
    targets: Targets
    replicas: int
    kept: Service
    missed: Service
    target: str
    limit: Resource
    relief: dict[Resource, float]

    @property
    def chips(self) -> int:
        """Return the chips of all replicas."""
        return self.replicas * self.replica.tp


def size(
    replica: Replica,
    trace: Trace,
    targets: Targets,
    start: int = 1,
    most: int = 64,
    router: Router | None = None,
) -> Sizing:
    """Return the fewest replicas that serve a trace as promised, found by simulation.

    Parameters: ``start`` a first guess, from the calculator; ``most`` replicas to try; ``router``
    as in ``serve``.
    Raises: as ``serve``; ``ValueError`` where ``most`` replicas miss the targets, or a request is
    too long for any.

    >>> from servelab import hardware, models
    >>> from servelab.serving import poisson
    >>> replica = Replica(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> trace = poisson(60.0, [(1000, 100)] * 200)
    >>> found = size(replica, trace, Targets(ttft_seconds=0.2, tpot_seconds=0.010))
    >>> found.replicas, found.target, found.limit
    (4, 'tpot', 'compute')
    """
    tried: dict[int, Service] = {}

    def strain(replicas: int) -> float:
        tried[replicas] = serve(replica, trace, replicas, router)
        if tried[replicas].refused:
            refusal = next(run.refusal for run in tried[replicas].runs if run.refused)
            raise ValueError(f"more replicas do not help: {refusal}")
        return tried[replicas].strain(targets)

    replicas = min(check_count("start", start), check_count("most", most))
    while strain(replicas) > 1:
        replicas += 1
        if replicas > most:
            raise ValueError(
                f"{most} replicas still miss the targets {tried[most].strain(targets):.2f} times"
            )
    while replicas > 1 and (replicas - 1 in tried or strain(replicas - 1) <= 1):
        if tried[replicas - 1].strain(targets) > 1:
            break
        replicas -= 1
    fewer, load = max(replicas - 1, 1), trace
    if replicas == 1:
        load = _twice_as_fast(trace)
        tried[0] = serve(replica, load, 1, router)
    missed = tried[replicas - 1]
    relief: dict[Resource, float] = {}
    resources: tuple[Resource, ...] = ("capacity", "bandwidth", "compute", "places")
    for resource in (*resources, *(("link",) if replica.tp > 1 else ())):
        helped = serve(replica.doubled(resource), load, fewer, router)
        relief[resource] = helped.strain(targets)
    strains = missed.strains(targets)
    return Sizing(
        replica,
        targets,
        replicas,
        tried[replicas],
        missed,
        target=max(strains, key=strains.__getitem__),
        limit=min(relief, key=relief.__getitem__),
        relief=relief,
    )


def _twice_as_fast(trace: Trace) -> Trace:
    moved = (a._replace(seconds=a.seconds / 2) for a in trace.arrivals)
    return replace(trace, arrivals=tuple(moved))
