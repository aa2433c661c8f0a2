"""What an event says, in words.

Models: one sentence per event, from the event and the state before it: who holds a block that is
written, how many tokens a pre-emption costs.

Assumes: the state before the event, as ``servelab.explore.trace`` folds it.

Ignores: token ids, but for those drawn.
"""

from __future__ import annotations

from collections.abc import Mapping

from servelab.explore.pool import NO_NAMES, counted, name_of
from servelab.explore.state import RunEvent, RunState
from servelab.explore.trace import Trace
from servelab.paging import Event, PoolState
from servelab.paging.events import (
    CachedChanged,
    EntryChanged,
    EpochChanged,
    LengthChanged,
    RefChanged,
)
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
from servelab.units import format_seconds


def kind_of(event: RunEvent) -> str:
    """Return one word for what happens: that by which an explorer looks for the next of its kind.

    >>> kind_of(EntryChanged(table=0, index=1, old=7, new=9))
    'copy'
    """
    if isinstance(event, RefChanged):
        return event.reason
    if isinstance(event, EntryChanged):
        if event.old is None:
            return "add"
        return "drop" if event.new is None else "copy"
    if isinstance(event, LengthChanged):
        return "grow" if event.new > event.old else "shrink"
    if isinstance(event, CachedChanged):
        return "cache" if event.old is None else "evict"
    if isinstance(event, Admitted) and event.back_from is not None:
        return "return"
    return _KINDS[type(event)]


_KINDS: dict[type, str] = {
    EpochChanged: "epoch",
    Submitted: "submit",
    Admitted: "admit",
    Forked: "fork",
    Preempted: "preempt",
    Finished: "finish",
    Planned: "plan",
    Stepped: "step",
    SwapPoolChanged: "swap",
}


def next_of(trace: Trace, kind: str, after: int) -> int | None:
    """Return the place of the next event of a kind, at ``after`` or later; None: there is none."""
    places = range(after, len(trace.events))
    return next((place for place in places if kind_of(trace.events[place]) == kind), None)


def say(trace: Trace, place: int) -> str:
    """Return the event at a place of a trace, in words.

    Raises: ``ValueError`` for a place that has no event.
    """
    state = trace.state_at(place)
    if place == len(trace.events):
        raise ValueError(f"place must be below {place}, the number of events")
    return say_event(trace.events[place], state, trace.names, trace.host_names)


def say_event(
    event: RunEvent,
    before: RunState,
    names: Mapping[int, str] = NO_NAMES,
    host_names: Mapping[int, str] = NO_NAMES,
) -> str:
    """Return an event in words.

    Parameters: ``before`` state of the run; ``names`` of the tables in the device's pool, and
    ``host_names`` in the CPU's, by id.

    >>> state = RunState(PoolState([0, 2, 0], [2]), PoolState.empty(num_blocks=1))
    >>> say_event(EntryChanged(table=2, index=0, old=1, new=2), state, {2: "r2"})
    'r2 writes into block 1, shared by 2: copied to block 2'
    """
    if isinstance(event, Event):
        return _say_change(event, before.device, names)
    if isinstance(event, SwapPoolChanged):
        return "on the CPU: " + _say_change(event.change, before.host, host_names)
    return _say_engine(event)


def _say_change(event: Event, before: PoolState, names: Mapping[int, str]) -> str:
    if isinstance(event, RefChanged):
        return _say_ref(event)
    if isinstance(event, CachedChanged):
        if event.old is None:
            return f"block {event.block} is full: from now on the prefix cache finds it"
        why = "" if before.refs[event.block] else " is about to be used again"
        return f"block {event.block}{why}: the prefix cache finds it no more"
    if isinstance(event, EpochChanged):
        return f"the weights have changed: the prefix cache begins epoch {event.new}"
    name = name_of(event.table, names)
    if isinstance(event, LengthChanged):
        change = event.new - event.old
        if change > 0:
            return f"{name} has room for {counted(change, 'token')} more: {event.new:,}"
        return f"{name} keeps {event.new:,} of {counted(event.old, 'token')}"
    if event.old is None:
        return f"{name} continues in block {event.new} (entry {event.index} of its table)"
    if event.new is None:
        return f"{name} drops block {event.old}"
    refs = before.refs[event.old]
    why = f"shared by {refs}" if refs > 1 else "found by the prefix cache"
    return f"{name} writes into block {event.old}, {why}: copied to block {event.new}"


def _say_ref(event: RefChanged) -> str:
    block = f"block {event.block}"
    held = f"held by {counted(event.new, 'table')}"
    if event.reason == "allocate":
        return f"{block}, the first of the free ones, is taken"
    if event.reason == "hit":
        return f"{block} is found by its prefix: {held}"
    if event.reason == "release":
        return f"{block} is released: " + (held if event.new else "it goes to the end of the free")
    return f"{block} is shared with a fork: {held}"


def _say_engine(event: EngineEvent) -> str:
    if isinstance(event, Submitted):
        asks = (
            f"{counted(len(event.prompt_tokens), 'prompt token')}, up to {event.max_tokens:,} new"
        )
        many = f", {event.n} times" if event.n > 1 else ""
        return f"request {event.request} arrives: {asks}{many}"
    if isinstance(event, Admitted):
        begins = "starts" if event.back_from is None else f"returns from {_BACK[event.back_from]}"
        hit = f", {counted(event.cached_tokens, 'token')} cached" if event.cached_tokens else ""
        return f"{event.sequence} {begins}{hit}"
    if isinstance(event, Forked):
        shares = "; they share all blocks" if event.table is not None else ""
        return f"{event.parent} forks: {event.child}{shares}"
    if isinstance(event, Preempted):
        lost = f"{counted(event.lost_tokens, 'token')} must be computed again"
        cost = "its blocks go to the CPU" if event.mode == "swap" else lost
        return f"{event.sequence} is pre-empted: {cost}"
    if isinstance(event, Finished):
        return f"{event.sequence} ends ({event.reason})"
    if isinstance(event, Planned):
        return _say_plan(event)
    if isinstance(event, Stepped):
        if event.error is not None:
            return f"step {event.step} fails: {event.error}"
        drawn = ", ".join(f"{name} draws {token}" for name, token in event.tokens[:8])
        more = f", and {len(event.tokens) - 8:,} more" if len(event.tokens) > 8 else ""
        return (
            f"step {event.step} is done in {format_seconds(event.seconds)}: {drawn}{more}".rstrip(
                ": "
            )
        )
    raise TypeError(f"not an event of an engine: {event!r}")


_BACK = {"recompute": "pre-emption, to be computed again", "swap": "the CPU"}


def _say_plan(event: Planned) -> str:
    computed = sum(new for _, new, _, _ in event.rows)
    said = (
        f"step {event.step}: {counted(computed, 'token')} of {counted(len(event.rows), 'sequence')}"
    )
    for copies, what in (
        (event.copies, "copied"),
        (event.swap_out, "swapped out"),
        (event.swap_in, "swapped in"),
    ):
        if copies:
            said += f", {counted(len(copies), 'block')} {what}"
    return said + (f"; {event.waiting:,} wait" if event.waiting else "")
