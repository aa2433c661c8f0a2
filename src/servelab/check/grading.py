"""A prediction of a whole service, graded against its simulation within stated tolerances.

Models: five numbers that whoever sizes a service commits to: users at once, mean TTFT, mean TPOT,
chips, and which resource limits. Numbers are right within a share of what was simulated; the
resource is right where it is the one whose double relieves most.

Assumes: a `servelab.simulation.service.Sizing`, whose means leave out the filling and the draining.

Ignores: how the prediction was made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from types import EllipsisType

from servelab.check.values import shown
from servelab.simulation import Sizing
from servelab.units import format_seconds, table

#: By how much of the simulated value a prediction may be off.
TOLERANCES = {"users": 0.25, "ttft_seconds": 0.5, "tpot_seconds": 0.25, "chips": 0.1}
_NAMES = {
    "users": "users at once",
    "ttft_seconds": "TTFT, mean",
    "tpot_seconds": "TPOT, mean",
    "chips": "chips",
    "limit": "limit",
}


@dataclass(frozen=True)
class Prediction:
    """What somebody commits to before the simulation runs; dots for what is left open.

    Fields: ``users`` in the system at once, of all replicas; ``ttft_seconds``, ``tpot_seconds``
    means; ``chips`` that it takes; ``limit``: "capacity", "bandwidth", "compute", "link" or
    "places".
    """

    users: float | EllipsisType = ...
    ttft_seconds: float | EllipsisType = ...
    tpot_seconds: float | EllipsisType = ...
    chips: int | EllipsisType = ...
    limit: str | EllipsisType = ...


def simulated(sizing: Sizing) -> Prediction:
    """Return what the simulation says, in the form of a prediction."""
    kept = sizing.kept
    times = kept.mean_ttft_seconds, kept.mean_tpot_seconds
    return Prediction(kept.mean_users, *times, sizing.chips, sizing.limit)


def grade(predicted: Prediction, sizing: Sizing) -> dict[str, str]:
    """Return a verdict on each field: "passed", "failed" or "not attempted".

    It never raises, whatever the fields hold.

    >>> from servelab import hardware, models
    >>> from servelab.simulation import Targets, poisson, size
    >>> from servelab.simulation import Replica
    >>> replica = Replica(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> found = size(replica, poisson(40.0, [(1000, 50)] * 100), Targets(0.2, 0.02))
    >>> grade(Prediction(chips=1, limit="link"), found)["limit"]
    'failed'
    """
    truth = simulated(sizing)
    return {
        field.name: _verdict(getattr(predicted, field.name), getattr(truth, field.name), field.name)
        for field in fields(Prediction)
    }


def report(predictions: dict[str, Prediction], sizing: Sizing) -> str:
    """Return a table: each prediction with its verdict, beside the simulation."""
    truth, rows = simulated(sizing), []
    for name, label in _NAMES.items():
        row: list[object] = [label]
        for predicted in predictions.values():
            row += [_text(name, getattr(predicted, name)), grade(predicted, sizing)[name]]
        within = f"{TOLERANCES[name]:.0%}".replace("%", " %") if name in TOLERANCES else "equal"
        rows.append([*row, _text(name, getattr(truth, name)), within])
    header = ["quantity"]
    for name in predictions:
        header += [name, "verdict"]
    return table(rows, [*header, "simulated", "tolerance"])


def _verdict(answer: object, truth: object, name: str) -> str:
    if answer is ... or answer is None:
        return "not attempted"
    if name == "limit":
        return "passed" if isinstance(answer, str) and answer.lower() == truth else "failed"
    value, goal = _number(answer), _number(truth)
    if value is None or goal is None or abs(value - goal) > TOLERANCES[name] * goal:
        return "failed"
    return "passed"


def _number(value: object) -> float | None:
    """Return a finite number, None for everything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _text(name: str, value: object) -> str:
    if value is ... or value is None:
        return "..."
    number = _number(value)
    if number is None:
        return shown(value)[:20].strip("'")
    return format_seconds(number) if name.endswith("seconds") else f"{number:,.0f}"
