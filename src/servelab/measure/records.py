"""What was measured, on what, when: a record that can be checked and drawn.

Models: measurements of one device on one day, each with its raw samples; one JSON file a record, by
the schema ``data/measurements/record.schema.json``. A record has one subject: the roofs alone, or
the sweep of whole steps with the roofs that were measured beside it.

Assumes: the median of the samples stands for the measurement.

Ignores: what else ran on the machine meanwhile; ``note`` is the place to say it.
"""

import datetime
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from servelab.hardware import Accelerator
from servelab.measure.device import Device
from servelab.measure.workload import Workload
from servelab.units import check_count, check_positive, dtype_bits

SCHEMA = 2
FOLDER = Path(__file__).resolve().parents[1] / "data" / "measurements"
#: What `servelab.measure.parts` measures of a step.
PARTS = (
    "step_eager",
    "step_packed",
    "bookkeeping",
    "staging",
    "sampling",
    "attention",
    "matrices",
    "matrices_cold",
    "matrices_packed",
    "gather",
    "elementwise",
    "hollow",
)
SCHEMA_FILE = FOLDER / "record.schema.json"
Subject = Literal["roofs", "sweep"]


@dataclass(frozen=True)
class Measurement:
    """One quantity, measured a number of times.

    Parameters: ``quantity`` one of ``UNITS``; ``dtype`` of the elements; ``shape`` of the work: the
    elements of the buffer; rows, d_in, d_out of a matrix product; rows, context, query heads, KV
    heads, head_dim, block size of attention; rows, context, layers, hidden size of a step from
    `tools/gpu_check.py`; of all that has a ``model``: rows, new tokens of each, context behind the
    step; ``amount`` of FLOP or bytes (read and written) in one execution, or 1 execution;
    ``seconds`` of each execution, warm-up left out, in order; ``model`` that the step is one of, by
    its bundled name (None: no whole model was run).
    Raises: ``TypeError``, ``ValueError`` that names the field and the rule it broke.

    >>> copied = Measurement("copy_bandwidth", "fp32", (250_000,), 2_000_000, (1e-3, 2e-3, 1e-3))
    >>> copied.rate, copied.unit, copied.spread
    (2000000000.0, 'B/s', 0.5)
    """

    UNITS: ClassVar[Mapping[str, str]] = {
        "copy_bandwidth": "B/s",
        "read_bandwidth": "B/s",
        "matmul_rate": "FLOP/s",  # square matrices: a roof
        "linear_rate": "FLOP/s",  # a model's matrix and some rows: a point below the roof
        # `tools/gpu_check.py`, beside a copy of as many bytes
        "paged_decode_bandwidth": "B/s",  # one layer's attention through block tables
        "eager_step_bandwidth": "B/s",  # a model's decode step, launched kernel by kernel
        "graph_step_bandwidth": "B/s",  # the same step, replayed as a CUDA graph
        # `servelab.measure.sweeps`: a step and its parts (see `servelab.measure.parts`)
        "step": "1/s",
        **dict.fromkeys(PARTS, "1/s"),
    }

    quantity: str
    dtype: str
    shape: tuple[int, ...]
    amount: int
    seconds: tuple[float, ...]
    model: str | None = None

    def __post_init__(self) -> None:
        if (self.model is not None) != (self.UNITS.get(self.quantity) == "1/s"):
            raise ValueError(
                f"{self.quantity} with model {self.model!r}: a step and its parts have"
                " one, nothing else has"
            )
        if self.quantity not in self.UNITS:
            raise ValueError(
                f"quantity must be one of {', '.join(self.UNITS)}, got {self.quantity!r}"
            )
        dtype_bits(self.dtype)
        check_count("amount", self.amount)
        for name, check in (("shape", check_count), ("seconds", check_positive)):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(f"{name} must be a list with at least one entry, got {values!r}")
            object.__setattr__(self, name, tuple(check(name, value) for value in values))

    @property
    def unit(self) -> str:
        """Return the unit of ``rate``."""
        return self.UNITS[self.quantity]

    @property
    def median_seconds(self) -> float:
        """Return the median of the samples."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Return the amount per median second, in ``unit``."""
        return self.amount / self.median_seconds

    @property
    def spread(self) -> float:
        """Return the distance between the quartiles of the samples, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_seconds


def record_name(date: str, device: Device, subject: Subject = "roofs") -> str:
    """Return the name of a device's record of a day: date, device, its size, subject if a sweep."""
    size = f" {device.cores} cores" if device.kind == "cpu" else ""
    words = device.name + size + (f" {subject}" if subject != "roofs" else "")
    return f"{date}-{re.sub('[^a-z0-9]+', '-', words.lower()).strip('-')}"


@dataclass(frozen=True)
class Record:
    """The measurements of one device.

    Parameters: ``date`` as YYYY-MM-DD; ``device``; ``measurements``; ``note`` on the circumstances;
    ``subject`` "roofs" or "sweep"; ``workloads`` that were served, in a sweep.
    Raises: ``ValueError`` where the date is not one, nothing was measured, or the subject is
    another.
    """

    date: str
    device: Device
    measurements: tuple[Measurement, ...]
    note: str = ""
    subject: Subject = "roofs"
    workloads: tuple[Workload, ...] = ()

    def __post_init__(self) -> None:
        try:
            datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError):
            raise ValueError(f"date must be YYYY-MM-DD, got {self.date!r}") from None
        if not isinstance(self.note, str):
            raise TypeError(f"note must be a text, got {self.note!r}")
        if not self.measurements:
            raise ValueError("measurements must hold at least one, got none")
        if self.subject not in ("roofs", "sweep"):
            raise ValueError(f"subject must be 'roofs' or 'sweep', got {self.subject!r}")
        object.__setattr__(self, "measurements", tuple(self.measurements))
        object.__setattr__(self, "workloads", tuple(self.workloads))

    @property
    def name(self) -> str:
        """Return the record's name, which is also its file's: date, device, size of the device."""
        return record_name(self.date, self.device, self.subject)

    def best(self, quantity: str, dtype: str | None = None) -> Measurement:
        """Return the fastest measurement of a quantity, over all shapes; None: of any dtype.

        Raises: ``ValueError`` where it was not measured.
        """
        found = [
            m for m in self.measurements if m.quantity == quantity and dtype in (None, m.dtype)
        ]
        if not found:
            raise ValueError(f"{self.name} has no {quantity} in {dtype or 'any dtype'}")
        return max(found, key=lambda m: m.rate)

    def as_accelerator(self) -> Accelerator:
        """Return the measured roofs in place of a data sheet's, for ``roofline.time_bound``.

        The rate of a dtype is its fastest matrix product. The bandwidth is the faster of copying
        and reading, for a roof has to lie above both.
        Raises: ``ValueError`` where a roof or the size of the memory is missing.
        """
        if self.device.memory_bytes is None:
            raise ValueError(f"{self.name}: the system did not tell the size of its memory")
        dtypes = dict.fromkeys(m.dtype for m in self.measurements if m.quantity == "matmul_rate")
        return Accelerator(
            name=self.name,
            dense_flop_per_second={d: self.best("matmul_rate", d).rate for d in dtypes},
            memory_bytes=self.device.memory_bytes,
            bandwidth_bytes_per_second=max(
                self.best("copy_bandwidth").rate, self.best("read_bandwidth").rate
            ),
            label=f"{self.device.name}, measured",
        )

    def to_json(self) -> str:
        """Return the record as JSON text, with the medians beside the samples they belong to."""
        measurements = [
            {**asdict(m), "unit": m.unit, "median_seconds": m.median_seconds}
            for m in self.measurements
        ]
        whole = {
            "schema": SCHEMA,
            "date": self.date,
            "subject": self.subject,
            "note": self.note,
            "device": asdict(self.device),
            "measurements": measurements,
            "workloads": [asdict(workload) for workload in self.workloads],
        }
        text = json.dumps(whole, indent=1, ensure_ascii=False)
        # a list of numbers on one line: samples are data, not prose
        return re.sub(r"\[\s+([\d.,e+\s-]+?)\s+\]", _one_line, text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """Return the record that ``to_json`` wrote; strict.

        Raises: ``ValueError`` that names the key and the rule it broke.
        """
        raw = _mapping(json.loads(text), "record")
        keys = {"schema", "date", "subject", "note", "device", "measurements", "workloads"}
        _same_keys(raw, keys, "")
        if raw["schema"] != SCHEMA:
            raise ValueError(f"schema: must be {SCHEMA}, got {raw['schema']!r}")
        for key in ("measurements", "workloads"):
            if not isinstance(raw[key], list):
                raise ValueError(f"{key}: must be a list, got {raw[key]!r}")
        device = _build(Device, raw["device"], "device")
        measurements = tuple(
            _measurement(m, f"measurements[{i}]") for i, m in enumerate(raw["measurements"])
        )
        workloads = tuple(
            _build(Workload, w, f"workloads[{i}]") for i, w in enumerate(raw["workloads"])
        )
        return cls(raw["date"], device, measurements, raw["note"], raw["subject"], workloads)

    def save(self, folder: Path = FOLDER, replace: bool = False) -> Path:
        """Write the record to ``folder`` under its name and return the path.

        Raises: ``FileExistsError`` where it exists and ``replace`` was not asked for.
        """
        path = folder / f"{self.name}.json"
        if path.exists() and not replace:
            raise FileExistsError(f"{path} exists; replace it only if you mean to")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")
        return path


def load_records(folder: Path = FOLDER, subject: Subject | None = None) -> tuple[Record, ...]:
    """Return the records of a folder, by default those that the package brings, oldest first.

    Parameters: ``subject`` of the records wanted (None: all).

    Raises: ``ValueError`` that names the file, the key and the rule it broke.

    >>> all(record.as_accelerator().ridge("fp32") > 0 for record in load_records())
    True
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        if path.name == SCHEMA_FILE.name:
            continue
        try:
            record = Record.from_json(path.read_text(encoding="utf-8"))
            if record.name != path.stem:
                raise ValueError(f"the file of this record must be called {record.name}.json")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path.name}: {error}") from error
        records.append(record)
    return tuple(record for record in records if subject in (None, record.subject))


def fastest(records: Sequence[Record]) -> Record:
    """Return the first record with, of each measurement, the series of the smallest median in all.

    Other programs on a machine only ever add time, so the fastest series is the least disturbed.
    Raises: ``ValueError`` where there is no record, or not all are of one device.
    """
    if len({record.device for record in records}) != 1:
        raise ValueError(f"records must be of one device, got {[r.name for r in records]}")
    best: dict[tuple[object, ...], Measurement] = {}
    for measurement in (m for record in records for m in record.measurements):
        key = (measurement.quantity, measurement.dtype, measurement.model, measurement.shape)
        if key not in best or measurement.median_seconds < best[key].median_seconds:
            best[key] = measurement
    workloads: dict[str, Workload] = {}
    for work in (work for record in records for work in record.workloads):
        kept = workloads.get(work.model)
        if kept is None or _ends(work) < _ends(kept):
            workloads[work.model] = work
    return replace(
        records[0], measurements=tuple(best.values()), workloads=tuple(workloads.values())
    )


def _ends(work: Workload) -> float:
    """Return the mean second of the last token of a workload's runs."""
    return statistics.mean(max(last for _, last in run) for run in work.runs)


def _one_line(match: re.Match[str]) -> str:
    return "[" + re.sub(r"\s+", " ", match.group(1)) + "]"


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object, got {value!r}")
    return value


def _same_keys(raw: dict[str, Any], wanted: set[str], where: str) -> None:
    for key in sorted(wanted ^ raw.keys()):
        raise ValueError(f"{where}{key}: {'is missing' if key in wanted else 'is not a known key'}")


_T = TypeVar("_T", Device, Measurement, Workload)


def _build(cls: type[_T], raw: object, where: str) -> _T:
    """Return the dataclass that an object of the same keys describes."""
    values = _mapping(raw, where)
    _same_keys(values, {field.name for field in fields(cls)}, f"{where}.")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _measurement(raw: object, where: str) -> Measurement:
    values = dict(_mapping(raw, where))
    stated = {key: values.pop(key, None) for key in ("unit", "median_seconds")}
    measurement = _build(Measurement, values, where)
    if stated["unit"] != measurement.unit:
        raise ValueError(f"{where}.unit: must be {measurement.unit!r}, got {stated['unit']!r}")
    median = stated["median_seconds"]
    if not isinstance(median, float | int) or not math.isclose(median, measurement.median_seconds):
        raise ValueError(
            f"{where}.median_seconds: the samples give {measurement.median_seconds}, got {median!r}"
        )
    return measurement
