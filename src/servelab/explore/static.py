"""Static batching, as the events of an engine: what continuous batching is compared with.

Models: a batch takes the requests that have arrived, at most ``batch_size`` of them in order of
arrival, computes their prompts in one step, and then one token for each in every step until its
longest request is complete. Those that end earlier keep their rows; whoever arrives waits.

Assumes: the lengths of the outputs are given; nobody is cut short.

Ignores: padding of the prompts to one length (it would cost static batching more), and the cache,
which a static batch reserves for its longest request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from servelab.serving.events import Admitted, EngineEvent, Finished, Planned, Stepped, Submitted
from servelab.units import check_count, check_fields, check_number

# The time of a step from its (new tokens, cached tokens) per sequence.
Pricer = Callable[[list[tuple[int, int]]], float]


@dataclass(frozen=True)
class Job:
    """A request whose output length is known.

    Parameters: ``name``; ``prompt_tokens``; ``output_tokens``; ``arrival_seconds``.
    Raises: ``TypeError``, ``ValueError`` for lengths below 1 and times that are no finite numbers.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    arrival_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "prompt_tokens", "output_tokens")
        check_number("arrival_seconds", self.arrival_seconds)


def static_batches(jobs: Sequence[Job], batch_size: int, seconds: Pricer) -> list[EngineEvent]:
    """Return what an engine with static batching would tell its sink.

    Parameters: ``jobs`` with names of their own; ``batch_size`` requests at most in a batch;
    ``seconds`` prices a step (`servelab.roofline.time_bound` of a `step_cost`, or a constant).
    Raises: ``TypeError``, ``ValueError`` for a batch size below 1; ``ValueError`` for a name that
    two jobs have.

    >>> jobs = [Job("a", 5, 3), Job("b", 2, 1), Job("c", 2, 2)]
    >>> events = static_batches(jobs, batch_size=2, seconds=lambda pairs: 1.0)
    >>> [event.rows for event in events if isinstance(event, Planned)]
    [(('a', 5, 0, 1), ('b', 2, 0, 1)), (('a', 1, 5, 1), ('b', 1, 2, 0)),
     (('a', 1, 6, 1), ('b', 1, 3, 0)), (('c', 2, 0, 1),), (('c', 1, 2, 1),)]
    """
    check_count("batch_size", batch_size)
    waiting = sorted(jobs, key=_arrival)  # stable: ties keep their order
    names = Counter(job.name for job in waiting)
    if twice := sorted(name for name, times in names.items() if times > 1):
        raise ValueError(f"jobs need names of their own, twice given: {', '.join(twice)}")
    return list(_run(waiting, batch_size, seconds))


def _run(jobs: list[Job], batch_size: int, seconds: Pricer) -> Iterator[EngineEvent]:
    now, step, told, begun = 0.0, 0, 0, 0
    while begun < len(jobs):
        now = max(now, jobs[begun].arrival_seconds)
        arrived = bisect_right(jobs, now, key=_arrival)
        yield from map(_submitted, jobs[told:arrived])
        told = arrived
        batch = jobs[begun : min(arrived, begun + batch_size)]
        begun += len(batch)
        for place, job in enumerate(batch, start=begun - len(batch)):
            yield Admitted(sequence=job.name, table=place, cached_tokens=0, back_from=None)
        for turn in range(max(job.output_tokens for job in batch)):
            step += 1
            rows = tuple(_row(job, turn) for job in batch)
            waiting = told - begun
            yield Planned(step=step, rows=rows, copies=(), swap_in=(), swap_out=(), waiting=waiting)
            took = seconds([(new, cached) for _, new, cached, _ in rows])
            now += took
            yield Stepped(step=step, seconds=took, tokens=())
            for job in batch:
                if job.output_tokens == turn + 1:
                    yield Finished(sequence=job.name, reason="length")
            arrived = bisect_right(jobs, now, key=_arrival)
            yield from map(_submitted, jobs[told:arrived])
            told = arrived


def _arrival(job: Job) -> float:
    return job.arrival_seconds


def _submitted(job: Job) -> Submitted:
    return Submitted(
        request=job.name,
        sequence=job.name,
        prompt_tokens=(0,) * job.prompt_tokens,
        max_tokens=job.output_tokens,
        n=1,
        seconds=job.arrival_seconds,
    )


def _row(job: Job, turn: int) -> tuple[str, int, int, int]:
    """Return a job's row in a turn of its batch; it is there to the end, drawn from or not."""
    if turn == 0:
        return job.name, job.prompt_tokens, 0, 1
    return job.name, 1, job.prompt_tokens + turn - 1, int(turn < job.output_tokens)
