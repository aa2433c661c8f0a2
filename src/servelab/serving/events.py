"""What an engine does, as values, beside the events of its pool (`servelab.paging.events`).

Models: one event per decision: a sequence is admitted, forked, pre-empted, finished; a step is
planned and done. With the pool's events between them they tell a whole run, in order.

Assumes: the sink takes every event and raises nothing; of the engine it may call ``add`` and
``abort``. Without a sink no event is built.

Ignores: the clock of the machine: ``seconds`` are the runner's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from servelab.paging import Copy, Event
from servelab.serving.plan import Plan, StepResult
from servelab.serving.request import Request

Mode = Literal["recompute", "swap"]


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A request has arrived; ``sequence`` is the first it will have."""

    request: str
    sequence: str
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    n: int
    seconds: float

    @classmethod
    def of(cls, request: Request) -> Submitted:
        """Return the event of a request that the engine has just accepted."""
        return cls(
            request=request.id,
            sequence=request.sequences[0].name,
            prompt_tokens=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            n=request.params.n,
            seconds=request.times.arrival,
        )


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A sequence has got a table and runs; ``cached_tokens`` it need not compute (again)."""

    sequence: str
    table: int
    cached_tokens: int
    back_from: Mode | None  # None: it runs for the first time


@dataclass(frozen=True, kw_only=True)
class Forked:
    """A sequence has a new sibling, whose table shares all its blocks (None: it has none)."""

    parent: str
    child: str
    table: int | None


@dataclass(frozen=True, kw_only=True)
class Preempted:
    """A sequence gave its blocks up; ``lost_tokens`` must be computed again (0 after a swap)."""

    sequence: str
    mode: Mode
    lost_tokens: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A sequence has ended and released its blocks."""

    sequence: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A step is about to run; ``rows`` are (sequence, new tokens, cached tokens, samples)."""

    step: int
    rows: tuple[tuple[str, int, int, int], ...]
    copies: tuple[Copy, ...]
    swap_in: tuple[Copy, ...]
    swap_out: tuple[Copy, ...]
    waiting: int

    @classmethod
    def of(cls, step: int, plan: Plan, waiting: int) -> Planned:
        """Return the event of a plan; ``waiting`` sequences take no part in it."""
        return cls(
            step=step,
            rows=tuple(
                (s.name, new, cached, len(samples)) for s, new, cached, samples in plan.rows
            ),
            copies=tuple(plan.copies),
            swap_in=tuple(plan.swap_in),
            swap_out=tuple(plan.swap_out),
            waiting=waiting,
        )


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A step has run; ``tokens`` are (sequence, token) in the order they were drawn."""

    step: int
    seconds: float
    tokens: tuple[tuple[str, int], ...]
    error: str | None = None

    @classmethod
    def of(cls, step: int, plan: Plan, result: StepResult) -> Stepped:
        """Return the event of a step that has been carried out."""
        pairs = zip(plan.rows, result.tokens, strict=True)
        drawn = tuple((s.name, token) for (s, *_), tokens in pairs for token in tokens)
        return cls(step=step, seconds=result.seconds, tokens=drawn)


@dataclass(frozen=True, kw_only=True)
class SwapPoolChanged:
    """The CPU's pool has changed."""

    change: Event


EngineEvent = (
    Submitted | Admitted | Forked | Preempted | Finished | Planned | Stepped | SwapPoolChanged
)
Sink = Callable[[EngineEvent | Event], None]
