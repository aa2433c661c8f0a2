"""The state of a run between two events, and how each event takes it forwards and back.

Models: the pool of the device, the CPU's pool, where each sequence stands, and the runner's clock.
Pool events carry their old values; for an engine event the old value is looked up once, when the
run is folded, so that both kinds can be undone.

Assumes: events in the order of one sink, from a new engine or a new pool on. ``Submitted.seconds``
is the clock at which a request arrived, ``Stepped.seconds`` the length of a step.

Ignores: token ids, and what a pool of the CPU calls its tables.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from servelab.paging import Event, PoolState
from servelab.serving import State
from servelab.serving.events import (
    Admitted,
    EngineEvent,
    Finished,
    Forked,
    Planned,
    Preempted,
    Stepped,
    Submitted,
    SwapPoolChanged,
)

RunEvent = Event | EngineEvent


@dataclass(frozen=True)
class Status:
    """Where a sequence stands: its request, state, table in the device's pool, why it ended."""

    request: str
    state: State = State.WAITING
    table: int | None = None
    reason: str | None = None


@dataclass
class RunState:
    """All that the events up to a point determine.

    Parameters: ``device`` and ``host`` pools; ``sequences`` by name, in order of arrival; ``steps``
    done, and the runner's ``seconds``.

    >>> RunState.empty(num_blocks=4).device.free
    [1, 2, 3]
    """

    device: PoolState
    host: PoolState
    sequences: dict[str, Status] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def empty(cls, num_blocks: int, num_swap_blocks: int = 0) -> RunState:
        """Return the state of a new engine; its CPU pool has a null block of its own besides."""
        return cls(PoolState.empty(num_blocks), PoolState.empty(num_swap_blocks + 1))

    @property
    def names(self) -> dict[int, str]:
        """Return the sequence of each table in the device's pool."""
        return {s.table: name for name, s in self.sequences.items() if s.table is not None}

    def copy(self) -> RunState:
        """Return a state that shares nothing with this one."""
        return RunState.from_plain(self.to_plain())

    def to_plain(self) -> dict[str, Any]:
        """Return the state in the types of JSON."""
        return {
            "device": _plain(self.device),
            "host": _plain(self.host),
            "sequences": {
                name: [s.request, str(s.state), s.table, s.reason]
                for name, s in self.sequences.items()
            },
            "steps": self.steps,
            "seconds": self.seconds,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RunState:
        """Return the state that ``to_plain`` gave."""
        return cls(
            _from_plain(plain["device"]),
            _from_plain(plain["host"]),
            {
                name: Status(request, State(state), table, reason)
                for name, (request, state, table, reason) in plain["sequences"].items()
            },
            plain["steps"],
            plain["seconds"],
        )


def _plain(pool: PoolState) -> dict[str, Any]:
    plain = asdict(pool)
    for name in ("tables", "lengths"):  # JSON's names are text
        plain[name] = {str(table): value for table, value in plain[name].items()}
    return plain


def _from_plain(plain: dict[str, Any]) -> PoolState:
    return PoolState(
        refs=list(plain["refs"]),
        free=list(plain["free"]),
        cached={key: list(blocks) for key, blocks in plain["cached"].items()},
        tables={int(table): list(blocks) for table, blocks in plain["tables"].items()},
        lengths={int(table): tokens for table, tokens in plain["lengths"].items()},
        epoch=plain["epoch"],
    )


@dataclass(frozen=True)
class Move:
    """What one event does to a state: a change of a pool, of a sequence, of the clock.

    Parameters: ``device`` and ``host`` change of that pool; ``sequence`` (name, old, new status);
    ``clock`` (old, new), each steps and seconds.
    """

    device: Event | None = None
    host: Event | None = None
    sequence: tuple[str, Status | None, Status | None] | None = None
    clock: tuple[tuple[int, float], tuple[int, float]] | None = None

    @classmethod
    def of(cls, event: RunEvent, state: RunState) -> Move:
        """Return what ``event`` does to ``state``.

        Raises: ``ValueError`` for an event about a sequence that was never submitted.
        """
        clock = state.steps, state.seconds
        if isinstance(event, Event):
            return cls(device=event)
        if isinstance(event, SwapPoolChanged):
            return cls(host=event.change)
        if isinstance(event, Planned):
            return cls()
        if isinstance(event, Stepped):
            return cls(clock=(clock, (state.steps + 1, state.seconds + event.seconds)))
        if isinstance(event, Submitted):
            name, seconds = event.sequence, state.seconds
            if all(s.state is State.FINISHED for s in state.sequences.values()):
                seconds = max(seconds, event.seconds)  # without work it skips to the next arrival
            old = state.sequences.get(name)  # an id may be used again once it is finished
            new = Status(event.request)
            return cls(sequence=(name, old, new), clock=(clock, (state.steps, seconds)))
        name = event.parent if isinstance(event, Forked) else event.sequence
        old = state.sequences.get(name)
        if old is None:
            raise ValueError(f"sequence {name!r} was never submitted: {event}")
        if isinstance(event, Forked):
            # A sibling without a table waits; one with a table goes on from where its parent is.
            child = State.WAITING if event.table is None else old.state
            return cls(sequence=(event.child, None, replace(old, state=child, table=event.table)))
        return cls(sequence=(name, old, _next_status(event, old)))

    def apply(self, state: RunState) -> None:
        """Take ``state`` forwards over the event."""
        if self.device is not None:
            self.device.apply(state.device)
        if self.host is not None:
            self.host.apply(state.host)
        if self.sequence is not None:
            _put(state, self.sequence[0], self.sequence[2])
        if self.clock is not None:
            state.steps, state.seconds = self.clock[1]

    def undo(self, state: RunState) -> None:
        """Take ``state`` back over the event."""
        if self.device is not None:
            self.device.undo(state.device)
        if self.host is not None:
            self.host.undo(state.host)
        if self.sequence is not None:
            _put(state, self.sequence[0], self.sequence[1])
        if self.clock is not None:
            state.steps, state.seconds = self.clock[0]


def _next_status(event: Admitted | Preempted | Finished, old: Status) -> Status:
    if isinstance(event, Admitted):
        return replace(old, state=State.RUNNING, table=event.table)
    if isinstance(event, Preempted):
        state = State.SWAPPED if event.mode == "swap" else State.PREEMPTED
        return replace(old, state=state, table=None)
    return replace(old, state=State.FINISHED, table=None, reason=event.reason)


def _put(state: RunState, name: str, status: Status | None) -> None:
    if status is None:
        del state.sequences[name]
    else:
        state.sequences[name] = status
