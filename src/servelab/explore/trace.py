"""A run as its events: recorded by a sink, stored as JSON, folded to any point, forwards or back.

Models: a trace is what an engine (or a pool alone) told its sink, in order. Everything else
follows: the steps, the state after each event, a keyframe every 32 steps so that no state is far
away, and a check per step (a hash of the folded state) that a reader of the file can hold it to.

Assumes: the sink was there from the start of the engine or pool.

Ignores: the machine's clock. The runner's seconds are kept, and can be left out.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from servelab import __version__
from servelab.explore.codec import decode, encode
from servelab.explore.state import Move, RunEvent, RunState
from servelab.paging.events import CachedChanged, EntryChanged, LengthChanged, RefChanged
from servelab.serving.events import (
    Admitted,
    Forked,
    Preempted,
    Stepped,
    Submitted,
    SwapPoolChanged,
)
from servelab.units import check_fields

#: The version of the file format.
SCHEMA = 2
#: Steps from one keyframe to the next.
KEYFRAME_STEPS = 32


@dataclass(frozen=True)
class Header:
    """What a run ran on.

    Parameters: ``block_size`` slots; ``num_blocks`` of the device's pool, null block included;
    ``num_swap_blocks`` of the CPU's, without; ``bytes_per_block``, ``token_budget`` and
    ``max_seqs`` of a step, ``model``, ``dtype``, ``seed``: None where there is none.
    Raises: ``TypeError``, ``ValueError`` for sizes that no pool has.
    """

    block_size: int
    num_blocks: int
    num_swap_blocks: int = 0
    bytes_per_block: int | None = None
    token_budget: int | None = None
    max_seqs: int | None = None
    model: str | None = None
    dtype: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "block_size")
        check_fields(self, "num_blocks", minimum=2)
        check_fields(self, "num_swap_blocks", minimum=0)
        optional = ("bytes_per_block", "token_budget", "max_seqs")
        check_fields(self, *(name for name in optional if getattr(self, name) is not None))


class Trace:
    """The events of a run; call it with each of them: it is a sink.

    Parameters: ``header``; ``events`` so far.

    >>> from servelab.paging import BlockPool, BlockTable
    >>> trace = Trace(Header(block_size=2, num_blocks=4))
    >>> table = BlockTable(BlockPool(num_blocks=4, block_size=2, sink=trace))
    >>> table.append(3)
    []
    >>> trace.state_at(len(trace.events)).device.tables, trace.state_at(0).device.tables
    ({0: [1, 2]}, {})
    >>> Trace.from_json(trace.to_json()).events == trace.events
    True
    """

    def __init__(self, header: Header, events: Iterable[RunEvent] = ()) -> None:
        self.header = header
        self.events: list[RunEvent] = list(events)
        # What follows from the events, caught up with them on demand: a sink must not raise.
        self._moves: list[Move] = []
        self._tip = self._empty()
        self._keyframes: list[tuple[int, RunState]] = [(0, self._empty())]
        self._ends: list[int] = []
        self._checks: list[str] = []

    def __call__(self, event: RunEvent) -> None:
        """Record one event."""
        self.events.append(event)

    def __iter__(self) -> Iterator[RunEvent]:
        """Return the events in order: ``timeline(trace)`` and whatever else reads events."""
        return iter(self.events)

    # --- states ---------------------------------------------------------------------------------

    def state_at(self, position: int) -> RunState:
        """Return the state after the first ``position`` events, as a copy.

        Raises: ``ValueError`` beyond the events; where they contradict each other.
        """
        self._fold()
        self._check_position(position)
        place = bisect_right(self._keyframes, position, key=lambda frame: frame[0]) - 1
        start, frame = self._keyframes[place]
        state = frame.copy()
        for move in self._moves[start:position]:
            move.apply(state)
        return state

    def cursor(self, position: int = 0) -> Cursor:
        """Return a place in the trace that can be moved."""
        return Cursor(self, position)

    @property
    def ends(self) -> list[int]:
        """Return, for each step, the number of events up to its end.

        A step ends with ``Stepped``. What follows from it (blocks published, forks, ends) comes
        after, at the head of the next step.
        """
        self._fold()
        return list(self._ends)

    @property
    def checks(self) -> list[str]:
        """Return the check of each step."""
        self._fold()
        return list(self._checks)

    def moves(self, start: int, stop: int) -> list[Move]:
        """Return what the events from ``start`` to before ``stop`` do."""
        self._fold()
        return self._moves[start:stop]

    def _empty(self) -> RunState:
        return RunState.empty(self.header.num_blocks, self.header.num_swap_blocks)

    def _check_position(self, position: int) -> None:
        if not 0 <= position <= len(self.events):
            raise ValueError(f"position must be in 0 to {len(self.events)}, got {position}")

    def _fold(self) -> None:
        while len(self._moves) < len(self.events):
            place = len(self._moves)
            event = self.events[place]
            try:
                move = Move.of(event, self._tip)
                move.apply(self._tip)
            except (ValueError, LookupError) as error:
                raise ValueError(f"event {place} does not follow: {event}: {error}") from error
            self._moves.append(move)
            if isinstance(event, Stepped):
                self._ends.append(place + 1)
                self._checks.append(check(self._tip))
                if len(self._ends) % KEYFRAME_STEPS == 0:
                    self._keyframes.append((place + 1, self._tip.copy()))

    # --- names and histories --------------------------------------------------------------------

    @property
    def names(self) -> dict[int, str]:
        """Return the sequence of each table that the device's pool has ever had."""
        found: dict[int, str] = {}
        for event in self.events:
            if isinstance(event, Admitted):
                found[event.table] = event.sequence
            elif isinstance(event, Forked) and event.table is not None:
                found[event.table] = event.child
        return found

    @property
    def host_names(self) -> dict[int, str]:
        """Return the sequence of each table that the CPU's pool has ever had.

        A table filled there is followed by the pre-emption it was filled for.
        """
        found: dict[int, str] = {}
        filled: int | None = None
        for event in self.events:
            if isinstance(event, SwapPoolChanged):
                change = event.change
                if isinstance(change, LengthChanged) and change.old == 0:
                    filled = change.table
            elif isinstance(event, Preempted) and event.mode == "swap" and filled is not None:
                found[filled], filled = event.sequence, None
        return found

    @property
    def prefixes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return, for each key that was ever cached, its parent's key and its block's tokens."""
        return {
            event.new: (event.parent, event.tokens)
            for event in self.events
            if isinstance(event, CachedChanged) and event.new is not None
        }

    def history(self, block: int) -> list[int]:
        """Return the places of the events that name a block of the device's pool."""
        return [place for place, event in enumerate(self.events) if block in blocks_in(event)]

    # --- files ----------------------------------------------------------------------------------

    def without_seconds(self) -> Trace:
        """Return the trace with every time set to 0: what is left is equal on every machine."""
        return Trace(
            self.header,
            (
                replace(event, seconds=0.0) if isinstance(event, Stepped | Submitted) else event
                for event in self.events
            ),
        )

    def to_json(self) -> str:
        """Return the trace as text: one line per step, equal events giving equal text."""
        ends = [0, *self.ends, len(self.events)]
        groups = [list(map(encode, self.events[start:stop])) for start, stop in pairwise(ends)]
        return _document(
            {
                "schema": SCHEMA,
                "generator": f"servelab {__version__}",
                "header": asdict(self.header),
            },
            steps=[
                {"check": c, "events": events}
                for c, events in zip(self._checks, groups, strict=False)
            ],
            tail=groups[-1],
            keyframes=[
                {"events": place, "state": state.to_plain()} for place, state in self._keyframes[1:]
            ],
        )

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Return the trace that ``to_json`` gave, folded and held to its checks and keyframes.

        Raises: ``ValueError`` for text that is not a trace of this schema, events that contradict
        each other, and a state that differs from its check or keyframe.
        """
        plain = json.loads(text)
        if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
            raise ValueError(f"not a trace of schema {SCHEMA}: {text[:40]!r}")
        try:
            groups = [*(step["events"] for step in plain["steps"]), plain["tail"]]
            trace = cls(Header(**plain["header"]), (decode(e) for group in groups for e in group))
            checks = [step["check"] for step in plain["steps"]]
            frames = [(f["events"], RunState.from_plain(f["state"])) for f in plain["keyframes"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the trace lacks a part or has a wrong one: {error!r}") from error
        trace._fold()
        for step, (said, folded) in enumerate(zip(checks, trace._checks, strict=False)):
            if said != folded:
                raise ValueError(f"step {step}: the folded state has check {folded}, not {said}")
        if len(checks) != len(trace._checks) or frames != trace._keyframes[1:]:
            raise ValueError("the trace's steps or keyframes differ from those of its events")
        return trace


class Cursor:
    """A place in a trace and the state there; it moves by applying and undoing events.

    Parameters: ``trace``; ``position`` events lie before it.

    >>> from servelab.paging import BlockPool
    >>> trace = Trace(Header(block_size=2, num_blocks=4))
    >>> BlockPool(num_blocks=4, block_size=2, sink=trace).allocate()
    1
    >>> cursor = trace.cursor()
    >>> cursor.move_to(1).device.free
    [2, 3]
    >>> cursor.move_to(0).device.free
    [1, 2, 3]
    """

    def __init__(self, trace: Trace, position: int = 0) -> None:
        self.trace = trace
        self.position = position
        self.state = trace.state_at(position)

    def move_to(self, position: int) -> RunState:
        """Go to another place; return the state there, which changes with the next move.

        Raises: ``ValueError`` beyond the events.
        """
        self.trace._check_position(position)
        for move in self.trace.moves(self.position, position):
            move.apply(self.state)
        for move in reversed(self.trace.moves(position, self.position)):
            move.undo(self.state)
        self.position = position
        return self.state


def check(state: RunState) -> str:
    """Return 16 hexadecimal digits that follow from a state, the clock apart.

    >>> check(RunState.empty(num_blocks=4)) == check(RunState.empty(num_blocks=5))
    False
    """
    plain = state.to_plain()
    del plain["seconds"]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def blocks_in(event: RunEvent) -> frozenset[int]:
    """Return the blocks of the device's pool that an event names.

    >>> sorted(blocks_in(EntryChanged(table=0, index=1, old=7, new=9)))
    [7, 9]
    """
    if isinstance(event, RefChanged | CachedChanged):
        return frozenset({event.block})
    if isinstance(event, EntryChanged):
        return frozenset(block for block in (event.old, event.new) if block is not None)
    return frozenset()


def _document(head: dict[str, Any], **lists: list[Any]) -> str:
    def dumped(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"))

    parts = [f"{dumped(name)}:{dumped(value)}" for name, value in head.items()]
    parts += [
        f"{dumped(name)}:[" + ",".join("\n" + dumped(each) for each in values) + "]"
        for name, values in lists.items()
    ]
    return "{" + ",\n".join(parts) + "}\n"
