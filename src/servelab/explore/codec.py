"""Events as JSON and back: ``[kind, field, field, ...]``, the fields in their declared order.

Models: one short word per kind of event; tuples become arrays.

Assumes: field values are numbers, text, None, tuples of these, or another event.

Ignores: the meaning of a field, and its type: ``trace.schema.json`` beside this file has those.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from servelab.explore.state import RunEvent
from servelab.paging import events as pool
from servelab.serving import events as engine

#: The kinds of events, by the word that names them in a trace.
KINDS: dict[str, type[Any]] = {
    "ref": pool.RefChanged,
    "entry": pool.EntryChanged,
    "length": pool.LengthChanged,
    "cached": pool.CachedChanged,
    "epoch": pool.EpochChanged,
    "submit": engine.Submitted,
    "admit": engine.Admitted,
    "fork": engine.Forked,
    "preempt": engine.Preempted,
    "finish": engine.Finished,
    "plan": engine.Planned,
    "step": engine.Stepped,
    "swap": engine.SwapPoolChanged,
}
_WORDS = {kind: word for word, kind in KINDS.items()}


def encode(event: RunEvent) -> list[Any]:
    """Return an event in the types of JSON.

    >>> encode(pool.LengthChanged(old=0, new=5, table=2))
    ['length', 0, 5, 2]
    """
    return [_WORDS[type(event)], *(_encoded(getattr(event, f.name)) for f in fields(event))]


def _encoded(value: Any) -> Any:
    if is_dataclass(value):
        return encode(value)  # type: ignore[arg-type]
    if isinstance(value, tuple):
        return [_encoded(each) for each in value]
    return value


def decode(plain: Any) -> RunEvent:
    """Return the event that ``encode`` gave.

    Raises: ``ValueError`` for an unknown kind or another number of fields.

    >>> decode(["length", 0, 5, 2])
    LengthChanged(old=0, new=5, table=2)
    """
    kind = KINDS.get(plain[0]) if isinstance(plain, list) and plain else None
    if kind is None:
        raise ValueError(f"an event is [kind, fields...], kind one of {', '.join(KINDS)}: {plain}")
    names = [field.name for field in fields(kind)]
    if len(plain) != len(names) + 1:
        raise ValueError(f"event {plain} needs {len(names)} fields: {', '.join(names)}")
    values = {
        name: decode(each) if name == "change" else _decoded(each)
        for name, each in zip(names, plain[1:], strict=True)
    }
    event: RunEvent = kind(**values)
    return event


def _decoded(value: Any) -> Any:
    return tuple(map(_decoded, value)) if isinstance(value, list) else value
