"""Where the time of a step above its bound goes, from parts that were measured one by one.

Models: a step as its bound and what stands above it: matrices slower than their bound, attention's
gathered copy and what else it takes, norms, rotation and gates, sampling, the host's preparation.
What the parts, each measured alone, do not add up to stays under its own name.

Assumes: a record of `servelab.measure.sweeps` that has this step taken apart.

Ignores: which of two parts waits for the other: on a GPU the host prepares while the device works.
"""

from __future__ import annotations

from servelab.measure.records import Measurement, Record
from servelab.measure.sweeps import cost_of
from servelab.roofline import Cost, time_bound

_ATTENTION = ("attention", "kv_append")


def parts_of(record: Record, model: str, shape: tuple[int, int, int]) -> dict[str, Measurement]:
    """Return what was measured of a step, by quantity.

    Raises: ``ValueError`` where the record does not have this step.
    """
    found = {m.quantity: m for m in record.measurements if (m.model, m.shape) == (model, shape)}
    if "step" not in found:
        raise ValueError(f"{record.name} has no step of {model} with shape {shape}")
    return found


def taken_apart(record: Record) -> list[tuple[str, tuple[int, int, int]]]:
    """Return the steps of which a record has the parts: model, and rows, new tokens, context."""
    return [
        (m.model, (m.shape[0], m.shape[1], m.shape[2]))
        for m in record.measurements
        if m.quantity == "matrices" and m.model is not None
    ]


def bounds_of(record: Record, step: Measurement) -> dict[str, float]:
    """Return the bounds of the step's matrices and of its attention, one operator after another."""
    chip, named = record.as_accelerator(), cost_of(step).by_name()
    sides: dict[str, list[Cost]] = {"matrices": [], "attention": []}
    for name, cost in named.items():
        if name != "embedding":
            sides["attention" if name in _ATTENTION else "matrices"].append(cost)
    return {
        side: sum(time_bound(cost, chip, step.dtype).serial_seconds for cost in costs)
        for side, costs in sides.items()
    }


def causes(record: Record, model: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """Return the seconds of an engine's step by cause; their sum is the step with its bookkeeping.

    Of a part that is faster than its bound, since a cache held what the bound reads from memory,
    only the time that it took counts as bound.
    Raises: ``ValueError`` where the record does not have this step with its parts.
    """
    parts = parts_of(record, model, shape)
    seconds = {name: m.median_seconds for name, m in parts.items()}
    bounds = bounds_of(record, parts["step"])
    reached = {side: min(bounds[side], seconds[side]) for side in bounds}
    gather = min(seconds.get("gather", 0.0), seconds["attention"] - reached["attention"])
    found = {
        "bound of the matrices": reached["matrices"],
        "bound of attention": reached["attention"],
        "matrices above it": seconds["matrices"] - reached["matrices"],
        "gathered copy": gather,
        "attention, besides": seconds["attention"] - reached["attention"] - gather,
        "norms, rotation, gates": seconds["elementwise"],
        "sampling": seconds["sampling"],
        "staging, bookkeeping": seconds["staging"] + seconds["bookkeeping"],
    }
    found["not accounted for"] = seconds["step"] + seconds["bookkeeping"] - sum(found.values())
    return found
