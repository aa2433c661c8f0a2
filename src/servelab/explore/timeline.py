"""Who ran when: what an engine's events say of each sequence, as lanes over steps or seconds.

Models: a lane per sequence with its spans (waiting, prefill, decode, pre-empted, swapped out,
padding) and a bar per step with the tokens it computed; a step that failed has neither. A row with
one new token behind a whole prompt is decode; any other is prefill, also where a pre-empted
sequence is computed again. A row of a sequence that has already finished is padding: a slot that
static batching computes for nothing.

Assumes: events in the order of one sink; ``Submitted.seconds`` on the runner's clock,
``Stepped.seconds`` the length of a step.

Ignores: the pool: timelines of allocators without one are made of the same events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from servelab.explore.state import RunEvent
from servelab.serving.events import (
    Admitted,
    Finished,
    Forked,
    Planned,
    Preempted,
    Stepped,
    Submitted,
)
from servelab.units import check_count

Kind = Literal["waiting", "prefill", "decode", "preempted", "swapped", "padding"]
Unit = Literal["steps", "seconds"]


class Span(NamedTuple):
    """What a sequence did from ``start`` to ``stop``, and the tokens it had computed for it."""

    kind: Kind
    start: float
    stop: float
    tokens: int = 0


class Bar(NamedTuple):
    """The tokens that a step computed, by what for."""

    start: float
    stop: float
    prefill: int
    decode: int
    padding: int

    @property
    def tokens(self) -> int:
        """Return all tokens of the step."""
        return self.prefill + self.decode + self.padding


@dataclass
class Lane:
    """One sequence: its spans in order, when it ``began`` and ``finished`` (None: not yet), why.

    ``preempted`` and ``swapped`` count how often it lost its blocks, to be computed again or to the
    CPU. There may be fewer such spans: a victim can come back in the step that it was taken from.
    """

    name: str
    began: float
    spans: list[Span] = field(default_factory=list)
    finished: float | None = None
    reason: str | None = None
    preempted: int = 0
    swapped: int = 0

    def add(self, span: Span) -> None:
        """Append a span, joined with the last one where it goes on."""
        last = self.spans[-1] if self.spans else None
        if last and (last.kind, last.stop) == (span.kind, span.start):
            self.spans[-1] = Span(span.kind, last.start, span.stop, last.tokens + span.tokens)
        elif span.stop > span.start:
            self.spans.append(span)

    def length(self, kind: Kind) -> float:
        """Return how long it spent in spans of a kind."""
        return sum(span.stop - span.start for span in self.spans if span.kind == kind)


@dataclass(frozen=True)
class Timeline:
    """A run as lanes and bars; ``budget`` tokens may be computed in a step (None: no limit)."""

    unit: Unit
    lanes: tuple[Lane, ...]
    bars: tuple[Bar, ...]
    budget: int | None = None

    @property
    def end(self) -> float:
        """Return when the last step or span ended."""
        ends = [bar.stop for bar in self.bars[-1:]]
        ends += [span.stop for lane in self.lanes for span in lane.spans[-1:]]
        return max(ends, default=0)

    @property
    def tokens(self) -> dict[str, int]:
        """Return the tokens computed in all steps, by what for."""
        return {
            "prefill": sum(bar.prefill for bar in self.bars),
            "decode": sum(bar.decode for bar in self.bars),
            "padding": sum(bar.padding for bar in self.bars),
        }


def timeline(
    events: Iterable[RunEvent], unit: Unit = "steps", budget: int | None = None
) -> Timeline:
    """Return the lanes and bars of a run.

    Parameters: ``events`` of an engine (those of its pool may be among them); ``unit`` of the axis;
    ``budget`` tokens per step.
    Raises: ``ValueError`` for another unit, or an event about a sequence that was never submitted;
    ``TypeError``, ``ValueError`` for a budget below 1.

    >>> run = timeline([
    ...     Submitted(request="r", sequence="r/0", prompt_tokens=(1, 2), max_tokens=1, n=1,
    ...               seconds=0.0),
    ...     Admitted(sequence="r/0", table=0, cached_tokens=0, back_from=None),
    ...     Planned(step=1, rows=(("r/0", 2, 0, 1),), copies=(), swap_in=(), swap_out=(),
    ...             waiting=0),
    ...     Stepped(step=1, seconds=0.5, tokens=(("r/0", 7),)),
    ...     Finished(sequence="r/0", reason="length"),
    ... ])
    >>> run.lanes[0].spans, run.bars
    ([Span(kind='prefill', start=0, stop=1, tokens=2)],
     (Bar(start=0, stop=1, prefill=2, decode=0, padding=0),))
    """
    if unit not in ("steps", "seconds"):
        raise ValueError(f"unit must be 'steps' or 'seconds', got {unit!r}")
    if budget is not None:
        check_count("budget", budget)
    reading = _Reading(unit)
    for event in events:
        reading.take(event)
    return Timeline(unit, tuple(reading.close()), tuple(reading.bars), budget)


class _Reading:
    """The lanes and bars so far, and what is still open."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.now: float = 0
        self.all: list[Lane] = []
        self.lanes: dict[str, Lane] = {}  # by name: an id may be used again once it is finished
        self.bars: list[Bar] = []
        self._requests: dict[str, Submitted] = {}  # by sequence
        self._open: dict[str, tuple[Kind, float]] = {}
        self._planned: Planned | None = None

    def take(self, event: RunEvent) -> None:
        if isinstance(event, Submitted):
            self._submit(event)
        elif isinstance(event, Planned):
            self._planned = event
        elif isinstance(event, Stepped):
            self._step(event)
        elif isinstance(event, Forked):
            self._fork(event)
        elif isinstance(event, Admitted):
            self._close(event.sequence)
        elif isinstance(event, Preempted):
            self._close(event.sequence)
            lane, swapped = self._lane(event.sequence), event.mode == "swap"
            lane.swapped += swapped
            lane.preempted += not swapped
            self._open[event.sequence] = ("swapped" if swapped else "preempted", self.now)
        elif isinstance(event, Finished):
            self._close(event.sequence)
            lane = self._lane(event.sequence)
            lane.finished, lane.reason = self.now, event.reason

    def close(self) -> list[Lane]:
        """End what is still open where the run ends."""
        for name in list(self._open):
            self._close(name)
        return self.all

    def _lane(self, name: str) -> Lane:
        try:
            return self.lanes[name]
        except KeyError:
            raise ValueError(f"sequence {name!r} was never submitted") from None

    def _submit(self, event: Submitted) -> None:
        arrival = self.now
        if self.unit == "seconds":
            arrival = event.seconds
            if not self._busy():  # an engine without work skips to the next arrival
                self.now = max(self.now, arrival)
        self._requests[event.sequence] = event
        self.lanes[event.sequence] = Lane(event.sequence, arrival)
        self.all.append(self.lanes[event.sequence])
        self._open[event.sequence] = ("waiting", arrival)

    def _busy(self) -> bool:
        return any(lane.finished is None for lane in self.lanes.values())

    def _fork(self, event: Forked) -> None:
        place = self.all.index(self._lane(event.parent)) + 1
        request = self._requests[event.child] = self._requests[event.parent]
        while place < len(self.all) and self._requests[self.all[place].name] is request:
            place += 1  # behind its siblings
        self.lanes[event.child] = Lane(event.child, self.now)
        self.all.insert(place, self.lanes[event.child])
        if event.table is None:
            self._open[event.child] = ("waiting", self.now)

    def _close(self, name: str) -> None:
        lane = self._lane(name)
        if name in self._open:
            kind, start = self._open.pop(name)
            lane.add(Span(kind, start, self.now))

    def _step(self, event: Stepped) -> None:
        plan, self._planned = self._planned, None
        start = self.now
        self.now += 1 if self.unit == "steps" else event.seconds
        if plan is None or event.error is not None:
            return
        computed: dict[Kind, int] = {"prefill": 0, "decode": 0, "padding": 0}
        for name, new, cached, _ in plan.rows:
            lane = self._lane(name)
            kind: Kind = "prefill"
            if lane.finished is not None:
                kind = "padding"
            elif new == 1 and cached >= len(self._requests[name].prompt_tokens):
                kind = "decode"
            computed[kind] += new
            lane.add(Span(kind, start, self.now, new))
        parts = computed["prefill"], computed["decode"], computed["padding"]
        self.bars.append(Bar(start, self.now, *parts))
