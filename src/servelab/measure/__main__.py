"""``python -m servelab.measure``: measure this device and keep the record."""

import argparse
import sys
from pathlib import Path

from servelab.measure.device import probe
from servelab.measure.records import FOLDER, Record
from servelab.measure.timing import roofs
from servelab.units import format_bandwidth, format_flop_rate, format_seconds, table


def report(record: Record) -> str:
    """Return the measurements as a table."""
    rows: list[list[object]] = [
        [
            m.quantity,
            m.dtype,
            "x".join(map(str, m.shape)),
            len(m.seconds),
            format_seconds(m.median_seconds),
            f"{m.spread:.0%}",
            (format_bandwidth if m.unit == "B/s" else format_flop_rate)(m.rate),
        ]
        for m in record.measurements
    ]
    header = ["quantity", "dtype", "shape", "n", "median", "quartiles apart", "rate"]
    return table(rows, header)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, store; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m servelab.measure",
        description="Measure the roofs of this device (memory and matrix products) and store a "
        "record: date, device, versions, raw samples. Nothing in it names the host or the user.",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder; default: package data")
    parser.add_argument("--quick", action="store_true", help="fewer samples, smaller matrices")
    parser.add_argument("--note", default="", help="what a reader of the record should know")
    parser.add_argument("--replace", action="store_true", help="overwrite a record of this name")
    options = parser.parse_args(arguments)
    print(probe().report(), flush=True)
    record = roofs(
        options.quick, options.note, lambda line: print(f"  measuring {line}", flush=True)
    )
    print(report(record))
    try:
        print(f"stored {record.save(options.out, options.replace)}")
    except FileExistsError as error:
        print(f"not stored: {error} (--replace, or another --out)", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
