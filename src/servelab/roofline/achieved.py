"""Measured times beside their bounds: the fraction of the roof that was reached.

Models: bound divided by measurement, for a measurement of the reader's own and for published ones,
each priced from the model, the device and the number formats that its source states.

Assumes: what a source leaves open is filled so that the bound is lower: the shortest context, the
cache in the narrower format.

Ignores: everything that explains a fraction; chapters 3 and 9 discuss it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from servelab import hardware, models
from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.roofline.phases import Precision, request_time, step_time
from servelab.units import check_positive

#: Fractions outside of this range are more likely errors of the data than of the machine.
PLAUSIBLE = (0.15, 1.0)


@dataclass(frozen=True)
class Achieved:
    """A measured time, its bound, and what to think of their ratio.

    Fields: ``bound_seconds``, ``measured_seconds``, both positive.
    Raises: ``TypeError``, ``ValueError`` for anything else.

    >>> Achieved(bound_seconds=4.5e-3, measured_seconds=9.0e-3).fraction
    0.5
    >>> Achieved(bound_seconds=4.5e-3, measured_seconds=4.0e-3).warning
    'faster than its bound: check units, formats, device count and which bytes are really read'
    """

    bound_seconds: float
    measured_seconds: float

    def __post_init__(self) -> None:
        check_positive("bound_seconds", self.bound_seconds)
        check_positive("measured_seconds", self.measured_seconds)

    @property
    def fraction(self) -> float:
        """Return the fraction of the bound's speed that was reached."""
        return self.bound_seconds / self.measured_seconds

    @property
    def warning(self) -> str | None:
        """Return what is suspicious about the fraction, None where nothing is."""
        low, high = PLAUSIBLE
        if self.fraction > high:
            return (
                "faster than its bound: check units, formats, device count and which bytes are "
                "really read"
            )
        if self.fraction < low:
            return f"below {low:g} of its bound: a wrong code path, or an error in the data"
        return None


@dataclass(frozen=True)
class Measurement:
    """A published measurement.

    Fields: ``name``, ``source``, ``kind`` ("decode", "prefill", "static batch end to end", ...);
    ``model``, ``dtype``, ``hardware``, ``devices`` (None where not stated), ``batch``, ``tokens``
    as the source names them; ``note``; ``apart`` why it is no measurement to hold against a bound,
    None where it is one; ``achieved`` None where there is not enough stated to price it.
    """

    name: str
    source: str
    kind: str
    model: str
    dtype: str
    hardware: str
    devices: int | None
    batch: int | None
    tokens: str
    note: str
    apart: str | None
    achieved: Achieved | None


@cache
def published() -> tuple[Measurement, ...]:
    """Return the published measurements, those that stand apart among them.

    >>> rows = [m for m in published() if m.achieved and m.apart is None]
    >>> all(m.achieved.fraction < 1 for m in rows)
    True
    """
    return tuple(_measurement(record) for record in json.loads(_read("perf_cases.json")))


def _measurement(record: Mapping[str, Any]) -> Measurement:
    run = record.get("run")
    achieved = None
    if run is not None:
        achieved = Achieved(_bound_seconds(record, run), _measured_seconds(record, run))
    return Measurement(
        record["id"],
        record["source"],
        record["kind"],
        record["model"],
        record["dtype"],
        record["hardware"],
        record["num_devices"],
        record["batch"],
        str(record["context"]),
        record["note"],
        record.get("apart"),
        achieved,
    )


def _measured_seconds(record: Mapping[str, Any], run: Mapping[str, Any]) -> float:
    """Return the time of one step, or of a whole batch of requests."""
    value: float = record["measured"]
    if record["unit"] == "ms":
        return value / 1e3
    per_second = value * run["tp"] if record["metric"].endswith("/GPU") else value
    return float(run["batch"] * run.get("output", run.get("prompt", 1)) / per_second)


def _bound_seconds(record: Mapping[str, Any], run: Mapping[str, Any]) -> float:
    spec, chip, tp, batch = _spec(run["model"]), _chip(record, run), run["tp"], run["batch"]
    bits = run.get("all_weight_bytes")
    precision = Precision(
        run["weights"],
        run["kv"],
        run["activations"],
        run["compute"],
        None if bits is None else 8 * bits / spec.params_total,
    )
    if "output" in run:
        shape = run["prompt"], run["output"], batch
        return request_time(spec, chip, *shape, precision=precision, tp=tp).seconds
    pair = (run["prompt"], 0) if "prompt" in run else (1, run["cached"])
    time = step_time(spec, [pair] * batch, chip, precision, tp)
    return time.kv_seconds if run.get("term") == "kv" else time.seconds


def _chip(record: Mapping[str, Any], run: Mapping[str, Any]) -> Accelerator:
    chip = hardware.get(record["hardware"].lower())
    share = run.get("share_of_device", 1)  # one of the two dies of an MI250X is a device
    return replace(
        chip,
        dense_flop_per_second={d: share * r for d, r in chip.dense_flop_per_second.items()},
        bandwidth_bytes_per_second=share * chip.bandwidth_bytes_per_second,
    )


@cache
def _spec(name: str) -> ModelSpec:
    if name in models.names():
        return models.get(name)
    return ModelSpec.from_config(json.loads(_read("perf_models.json"))[name], name)


def _read(name: str) -> str:
    return (resources.files("servelab") / "data/cases" / name).read_text(encoding="utf-8")
