"""``python -m servelab.measure``: measure this device and keep the record."""

import argparse
import datetime
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from servelab import models
from servelab.measure.device import probe
from servelab.measure.records import FOLDER, Record, Subject, fastest, record_name
from servelab.measure.sweeps import sweep
from servelab.measure.timing import linears, roofs
from servelab.units import format_bandwidth, format_flop_rate, format_seconds, table

MODEL = models.get("qwen3-8b")  # the book's running example
RATES: dict[str, Callable[[float], str]] = {"B/s": format_bandwidth, "FLOP/s": format_flop_rate}


def measured(quick: bool, note: str) -> Record:
    """Return a record of the roofs and of a real matrix below them, with few rows and with many."""
    record = roofs(quick, note, progress)
    matrix = MODEL.layers[0].plain()[1].linears(MODEL.hidden_size)[-1]  # down_proj
    dtype = "bf16" if record.device.kind == "cuda" else "fp32"
    rows = (1, 16) if quick else (1, 4, 16, 64, 256, 1024)
    samples, budget_seconds = (5, 1.0) if quick else (15, 4.0)
    points = linears(
        rows, matrix.d_in, matrix.d_out, dtype, samples, budget_seconds, progress=progress
    )
    return replace(record, measurements=record.measurements + points)


def progress(line: str) -> None:
    """Show what is being measured."""
    print(f"  measuring {line}", flush=True)


def report(record: Record) -> str:
    """Return the measurements as a table."""
    rows: list[list[object]] = [
        [
            f"{m.model} {m.quantity}" if m.model else m.quantity,
            m.dtype,
            "x".join(map(str, m.shape)),
            len(m.seconds),
            format_seconds(m.median_seconds),
            f"{m.spread:.0%}",
            RATES[m.unit](m.rate) if m.unit in RATES else f"{m.rate:,.0f}/s",
        ]
        for m in record.measurements
    ]
    header = ["quantity", "dtype", "shape", "n", "median", "quartiles apart", "rate"]
    return table(rows, header)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, store; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m servelab.measure",
        description="Measure this device and store two records: its roofs (memory and matrix "
        "products) with a matrix of Qwen3-8B below them; and a sweep of whole steps of small "
        "models, of their parts, and of a workload, with roofs of its own. A record has date, "
        "device, versions, raw samples. Nothing in it names the host or the user.",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder; default: package data")
    parser.add_argument("--quick", action="store_true", help="fewer samples, smaller shapes")
    parser.add_argument("--only", choices=get_args(Subject), help="one of the two records")
    parser.add_argument("--note", default="", help="what a reader of the record should know")
    parser.add_argument("--replace", action="store_true", help="overwrite a record of this name")
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="measure all N times, keep the fastest series of each (for a machine with other work)",
    )
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {options.repeat}")
    device = probe()
    print(device.report(), flush=True)
    subjects: tuple[Subject, ...] = (options.only,) if options.only else get_args(Subject)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for subject in subjects:
        path = options.out / f"{record_name(today, device, subject)}.json"
        if path.exists() and not options.replace:  # said now, not after a minute of measuring
            print(
                f"{path} exists: nothing measured. To measure again: --replace, or another --out",
                file=sys.stderr,
            )
            return 2
    ways: dict[Subject, Callable[[], Record]] = {
        "roofs": partial(measured, options.quick, options.note),
        "sweep": partial(sweep, not options.quick, options.note, progress),
    }
    return max(store(subject, ways[subject], options) for subject in subjects)


def store(subject: Subject, way: Callable[[], Record], options: argparse.Namespace) -> int:
    """Measure one record as often as asked for, print it, store it; return the exit code."""
    print(f"the {subject}:", flush=True)
    series = [way() for _ in range(options.repeat)]
    record = fastest(series)
    if len(series) > 1:  # a selection belongs into the record, whoever writes the note
        selected = f"Of each measurement the fastest of {len(series)} series."
        record = replace(record, note=f"{selected} {record.note}".strip())
    print(report(record))
    try:
        print(f"stored {record.save(options.out, options.replace)}")
    except FileExistsError as error:
        print(f"not stored: {error} (--replace, or another --out)", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
