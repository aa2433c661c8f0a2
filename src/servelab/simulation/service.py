"""A service of several replicas, simulated: its tail, its size, its best operating points.

Models: equal replicas, each with its part of a trace on its own predicted clock. The fewest of them
whose percentiles keep the targets are found by trying. What limits a service is found by relief: of
its resources, the one whose double shortens the worst time of one replica fewer the most. An
operating point is a replica that does not run out of requests while it is looked at.

Assumes: a router gives every request to one replica as it comes, and replicas know nothing of each
other. Percentiles are over the requests of all. The trace lasts several times as long as a request
does: in a shorter one no queue has time to grow, and too few replicas look enough.

Ignores: failures, start-up, traffic that changes over the day, and users who wait for an answer
before they ask again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

from servelab.simulation.run import Served, Simulation, percentile, simulate
from servelab.simulation.sizing import Replica, Resource, Targets
from servelab.simulation.traces import Arrival, Trace
from servelab.units import check_count

Router = Callable[[int, Arrival], int]

# A thousand times the traffic that one replica serves.
_DOUBLINGS = 10


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

    @cached_property
    def steady(self) -> list[Served]:
        """Return the requests that came in the middle half of the trace: no filling, no draining.

        All of them where none came then.
        """
        end = self.trace.seconds
        middle = [one for one in self.served if end <= 4 * one.arrival_seconds <= 3 * end]
        return middle or self.served

    @property
    def mean_ttft_seconds(self) -> float:
        """Return the mean time to the first token, of the steady requests."""
        return math.fsum(one.ttft_seconds for one in self.steady) / len(self.steady)

    @property
    def mean_tpot_seconds(self) -> float:
        """Return the mean time of a further token of the steady requests; 0 where there is none."""
        further = sum(one.output_tokens - 1 for one in self.steady)
        spent = math.fsum(one.last_token_seconds - one.first_token_seconds for one in self.steady)
        return spent / further if further else 0.0

    @property
    def mean_users(self) -> float:
        """Return how many requests are in the system while it is steady, by Little's law."""
        seconds = self.trace.seconds / 2 or math.inf
        return math.fsum(one.latency_seconds for one in self.steady) / seconds

    @property
    def steady_tokens_per_second(self) -> float:
        """Return the rate of output while the middle half of the requests finishes."""
        ends = sorted((one.last_token_seconds, one.output_tokens) for one in self.served)
        first, last = len(ends) // 4, 3 * len(ends) // 4
        seconds = ends[last][0] - ends[first][0]
        tokens = sum(output for _, output in ends[first + 1 : last + 1])
        return tokens / seconds if seconds else 0.0

    @property
    def peak_users(self) -> int:
        """Return the most requests that any replica had at once, waiting or running."""
        most = 0
        for run in self.runs:
            moves = [(one.arrival_seconds, 1) for one in run.served]
            moves += [(one.last_token_seconds, -1) for one in run.served]
            most = max(most, *accumulate(change for _, change in sorted(moves)))
        return most

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
    >>> from servelab.simulation import poisson
    >>> replica = Replica(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> found = serve(replica, poisson(8.0, [(1000, 50)] * 100), replicas=2)
    >>> len(found.served), f"{found.tpot_seconds(50) * 1e3:.2f} ms"
    (100, '4.59 ms')
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
    the service of one replica fewer (of one alone: with its traffic twice as fast, as often as it
    takes), ``target`` it misses most and ``limit``: the resource whose double relieves it most;
    ``relief`` its strain with each resource doubled.
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
    >>> from servelab.simulation import poisson
    >>> replica = Replica(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> trace = poisson(60.0, [(1000, 100)] * 200)
    >>> found = size(replica, trace, Targets(ttft_seconds=0.2, tpot_seconds=0.010))
    >>> found.replicas, found.target, found.limit
    (2, 'tpot', 'compute')
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
        if replicas == most:
            times = tried[most].strain(targets)
            raise ValueError(f"{most} replicas miss the targets: {times:.2f} times the time")
        replicas += 1
    while replicas > 1 and replicas - 1 not in tried and strain(replicas - 1) <= 1:
        replicas -= 1
    fewer, load = replicas - 1, trace
    if replicas > 1:
        missed = tried[fewer]
    else:  # no fewer than one: the load grows instead
        fewer = 1
        for _ in range(_DOUBLINGS):
            load = _twice_as_fast(load)
            missed = serve(replica, load, fewer, router)
            if missed.strain(targets) > 1:
                break
    resources: list[Resource] = ["capacity", "bandwidth", "compute"]
    if replica.tp > 1:
        resources.append("link")
    if missed.peak_users > replica.max_num_seqs:  # otherwise no one ever waited for a place
        resources.append("places")
    relief = {
        resource: serve(replica.doubled(resource), load, fewer, router).strain(targets)
        for resource in resources
    }
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


# --- operating points ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A replica under a queue that does not empty: what its users see, what its chips yield.

    Fields: ``replica``; ``tpot_seconds`` a percentile; ``tokens_per_second`` of output, per chip;
    ``is_full`` if the pool, not ``max_num_seqs``, limited how many ran.
    """

    replica: Replica
    tpot_seconds: float
    tokens_per_second: float
    is_full: bool


def operate(replica: Replica, trace: Trace, percent: float = 50) -> Point:
    """Return the operating point of a replica to which all requests of a trace come at once.

    The last of them has to wait until three in four are done, so that the yield of the middle half
    is that of a full batch: that takes about four times as many requests as run at once.

    Raises: as ``serve``; ``ValueError`` where the queue is empty earlier.
    """
    at_once = replace(trace, arrivals=tuple(a._replace(seconds=0.0) for a in trace.arrivals))
    found = serve(replica, at_once)
    (run,) = found.runs
    ends = [one.last_token_seconds for one in found.served]
    if max(one.first_token_seconds for one in found.served) < percentile(ends, 75):
        raise ValueError(
            f"the queue of {len(ends)} requests is empty before three in four are done: "
            "a full batch needs about four times as many as run at once"
        )
    # A pool is full for whoever waits as soon as the next prompt does not fit.
    longest = max(arrival.prompt_tokens for arrival in trace.arrivals)
    free = run.num_blocks - run.peak_blocks
    return Point(
        replica,
        found.tpot_seconds(percent),
        found.steady_tokens_per_second / replica.tp,
        is_full=bool(run.preemptions) or free * run.block_size < longest,
    )


def pareto_front(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other beats in latency and in throughput, by latency.

    >>> from servelab import hardware, models
    >>> spare = Replica(models.get("qwen3-8b"), hardware.get("l4"))
    >>> points = [Point(spare, *pair, False) for pair in [(0.1, 5.0), (0.2, 4.0), (0.3, 9.0)]]
    >>> [point.tpot_seconds for point in pareto_front(points)]
    [0.1, 0.3]
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.tpot_seconds, -p.tokens_per_second)):
        if not front or point.tokens_per_second > front[-1].tokens_per_second:
            front.append(point)
    return front
