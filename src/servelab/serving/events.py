"""What an engine does, as values, beside the events of its pool (`servelab.paging.events`).

Models: one event per decision: a sequence is admitted, forked, pre-empted, finished; a step is
planned and done. With the pool's events between them they tell a whole run, in order.

Assumes: the sink takes every event and raises nothing. Without a sink no event is built.

Ignores: the clock of the machine: ``seconds`` are the runner's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from servelab.paging import Copy, Event

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


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A step has run; ``tokens`` are (sequence, token) in the order they were drawn."""

    step: int
    seconds: float
    tokens: tuple[tuple[str, int], ...]
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class SwapPoolChanged:
    """The CPU's pool has changed."""

    change: Event


EngineEvent = (
    Submitted | Admitted | Forked | Preempted | Finished | Planned | Stepped | SwapPoolChanged
)
