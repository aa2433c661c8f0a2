"""One start of an engine, and what a number that follows from its others is.

Models: the readings of a start in order, found again by what lies nearest; intervals for what was
rounded or may have been cut.

Assumes: of several numbers that one may follow from (workers, repeated lines) any will do, the
nearest first.

Ignores: numbers further away than a dozen others of their kind.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from servelab.logs.readings import Reading
from servelab.models import ModelSpec

#: A reading has at most this many others of one quantity, on each side, to follow from.
_NEAREST = 12


@dataclass(frozen=True)
class Derived:
    """A number as it follows from others.

    Fields: ``value`` and the interval ``low`` to ``high``, in bytes for a size; ``why`` the
    arithmetic; ``doubt`` why agreement would prove nothing, ``excuse`` why a difference would
    ("" where it would prove something).
    """

    value: float
    low: float
    high: float
    why: str
    doubt: str = ""
    excuse: str = ""


class Run:
    """The readings of one start of an engine.

    Parameters: ``spec`` the model, if it is known; ``ranks_seen`` how many tensor-parallel ranks
    the log's prefixes name; ``readings`` in order, the settings in force among them.
    """

    def __init__(
        self, readings: Iterable[Reading], spec: ModelSpec | None = None, ranks_seen: int = 1
    ) -> None:
        self.spec = spec
        self.ranks_seen = ranks_seen
        self._readings: dict[str, list[Reading]] = {}
        self._stated: dict[tuple[int, str], list[Reading]] = {}
        for reading in readings:
            self._readings.setdefault(reading.quantity, []).append(reading)
            stated = self._stated.setdefault((reading.statement, reading.quantity), [])
            stated += [reading, *reading.extensions()]

    def nearest(self, quantity: str, to: Reading) -> list[Reading]:
        """Return the readings of a quantity, nearest first, those before ``to`` before the rest.

        One that may have been cut is followed by what it may have been.
        """
        found = self._readings.get(quantity, [])
        place = bisect.bisect_left(found, to.place, key=_place)
        before = reversed(found[max(place - _NEAREST, 0) : place])
        after = found[place : place + _NEAREST]
        different: dict[tuple[float, float], Reading] = {}
        for reading in (*before, *after):
            if reading is not to:
                different.setdefault((reading.low, reading.high), reading)
        return [r for one in different.values() for r in (one, *one.extensions())]

    def same_statement(self, quantity: str, as_: Reading) -> list[Reading]:
        """Return the readings of a quantity in the sentence of another."""
        return self._stated.get((as_.statement, quantity), [])

    def setting(self, quantity: str) -> Reading | None:
        """Return the last reading of a setting, None if there is none."""
        found = self._readings.get(quantity)
        return found[-1] if found else None


def _place(reading: Reading) -> tuple[int, int]:
    return reading.place


def uniform(spec: ModelSpec) -> bool:
    """Return whether every layer with a cache keeps every token, and none a state.

    >>> from servelab import models
    >>> [uniform(models.get(name)) for name in ("qwen3-8b", "mistral-7b")]
    [True, False]
    """
    return not spec.state_bytes_per_sequence and all(
        layer.attention is None or layer.attention.window is None for layer in spec.layer_counts
    )


Rule = Callable[[Reading, Run], Iterator[Derived]]


def cut(*readings: Reading) -> str:
    """Return the doubt that comes with readings that may have been cut."""
    return "; ".join(f"{r.text} ends its line and may be cut" for r in readings if r.extended)


def proportional(run: Run) -> bool:
    """Return whether a request's need grows with its length alone, as far as is known.

    Windows and states are counted by group: then `servelab.logs.model_rules` has the rule.
    """
    return run.spec is None or uniform(run.spec)
