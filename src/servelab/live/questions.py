"""What a reader can be asked before the next event of a recorded run, and the answer.

Models: a question is put where the run has not yet decided, and is answered by events that follow:
how many blocks a step takes, which free block is taken, which cached one is evicted, how many are
copied, how many of a prompt's the prefix cache finds, whose blocks are taken away.

Assumes: a trace of one engine, as `servelab.live.scenarios` records it.

Ignores: what has an obvious answer: which block of a new pool, whose order is still 1, 2, 3, ...
"""

from __future__ import annotations

from dataclasses import dataclass

from servelab.explore import kind_of
from servelab.explore.state import RunEvent, RunState
from servelab.live.scenarios import Recorded
from servelab.paging.events import CachedChanged, EntryChanged
from servelab.serving import State
from servelab.serving.events import Admitted, Planned, Preempted, Submitted


@dataclass(frozen=True)
class Question:
    """A question and its ``answer``, one of ``options``.

    Parameters: ``at`` events lie before it; ``until`` events are needed to see the answer; ``why``
    the answer is what it is; ``hides`` the free order, which would give it away.
    """

    at: int
    until: int
    text: str
    options: tuple[str, ...]
    answer: str
    why: str
    hides: bool = False


def questions(run: Recorded) -> dict[int, Question]:
    """Return the questions of a run, by the number of events before each.

    >>> from servelab.live.scenarios import recorded
    >>> [(q.text, q.options, q.answer) for q in questions(recorded("sampling")).values()][0]
    ('The samples share block 3 and write into it now. How many blocks are copied in this step?',
     ('0', '1', '2', '3'), '2')
    """
    events, cursor = run.trace.events, run.trace.cursor()
    found: dict[int, Question] = {}
    for place, event in enumerate(events):
        before = cursor.move_to(place)
        if isinstance(event, CachedChanged) and event.new is None:
            found[place] = _evicted(place, event, before)
        elif run.kinds[place] == "allocate" and _is_open(run, place, before):
            found[place] = _taken(place, before)
    for place in range(len(events)):  # these take the place of those above that they answer
        if question := _of_several(run, place):
            inside = range(question.at, question.until)
            found = {at: other for at, other in found.items() if at not in inside}
            found[question.at] = question
    return dict(sorted(found.items()))


def _is_open(run: Recorded, place: int, before: RunState) -> bool:
    """Return whether the block to be taken is neither known already nor plain to see."""
    free = before.device.free
    return run.kinds[place - 1] != "evict" and free != sorted(free)


def _taken(place: int, before: RunState) -> Question:
    block = before.device.free[0]
    return Question(
        place,
        place + 1,
        "A block is needed. Which of the free ones is taken?",
        tuple(map(str, sorted(before.device.free))),
        str(block),
        f"of those that are free, block {block} has been free for the longest time",
        hides=True,
    )


def _evicted(place: int, event: CachedChanged, before: RunState) -> Question:
    cached = {block for blocks in before.device.cached.values() for block in blocks}
    return Question(
        place,
        place + 1,
        "A block is needed, and the one that is next in the free order is still cached. Which?",
        tuple(map(str, sorted(cached))),
        str(event.block),
        f"of those that are free, block {event.block} was released first",
        hides=True,
    )


def _of_several(run: Recorded, place: int) -> Question | None:
    """Return the question that the event at ``place`` answers, with several before it."""
    event = run.trace.events[place]
    if isinstance(event, Planned) and event.copies:
        return _copies(run, place, event)
    if isinstance(event, Planned) and not {"copy", "hit", "preempt"}.intersection(run.kinds):
        return _needed(run, place)
    if isinstance(event, Admitted) and "hit" in run.kinds:
        return _hits(run, place, event)
    if isinstance(event, Preempted):
        return _victim(run, place, event)
    return None


def _needed(run: Recorded, place: int) -> Question:
    at = place
    while at and run.kinds[at - 1] in ("allocate", "add", "grow", "admit"):
        at -= 1
    return Question(
        at,
        place + 1,
        "A step is planned. How many blocks do the sequences take for it, together?",
        ("0", "1", "2", "3"),
        str(run.kinds[at:place].count("allocate")),
        f"a block has {run.trace.header.block_size} slots, and a new one is taken only when a "
        "token has no slot",
    )


def _copies(run: Recorded, place: int, event: Planned) -> Question:
    source = event.copies[0][0]
    before = run.trace.ends[event.step - 2]  # nothing is shared in the first step
    at = run.kinds.index("copy", before) - 1  # the block of the copy is taken first
    return Question(
        at,
        place + 1,
        f"The samples share block {source} and write into it now. "
        "How many blocks are copied in this step?",
        tuple(map(str, range(run.trace.state_at(at).device.refs[source] + 1))),
        str(len(event.copies)),
        "all but the last holder copy; the last writes in place",
    )


def _hits(run: Recorded, place: int, event: Admitted) -> Question:
    events, size = run.trace.events, run.trace.header.block_size
    at = next(
        back
        for back in range(place, -1, -1)
        if isinstance(found := events[back], EntryChanged)
        and (found.table, found.index, found.old) == (event.table, 0, None)
    )
    at -= 1  # its block was held first
    at -= kind_of(events[at - 1]) == "evict"
    prompt = next(
        len(each.prompt_tokens)
        for each in events
        if isinstance(each, Submitted) and each.sequence == event.sequence
    )
    return Question(
        at,
        place + 1,
        f"{event.sequence} starts with a prompt of {prompt} tokens. "
        "How many of its blocks does the prefix cache find?",
        tuple(map(str, range(-(-prompt // size) + 1))),
        str(event.cached_tokens // size),
        "only full blocks are found, from the start, and only while nobody has reused them",
    )


def _victim(run: Recorded, place: int, event: Preempted) -> Question:
    at = place
    while at and _gives_up(run.trace.events[at - 1]):
        at -= 1
    running = [
        name
        for name, status in run.trace.state_at(at).sequences.items()
        if status.state is State.RUNNING
    ]
    return Question(
        at,
        place + 1,
        "A block is needed and none is free. Who gives its blocks up?",
        tuple(running),
        event.sequence,
        "the sequence that arrived last gives way, so that the oldest is sure to end",
    )


def _gives_up(event: RunEvent) -> bool:
    return kind_of(event) in ("drop", "release", "shrink", "swap")
