"""The machine you run on: what it is, and what its roofs are when measured."""

from servelab.measure.device import Device, device_line, probe
from servelab.measure.records import Measurement, Record, fastest, load_records
from servelab.measure.timing import linears, roofs, sample_seconds

__all__ = [
    "Device",
    "Measurement",
    "Record",
    "device_line",
    "fastest",
    "linears",
    "load_records",
    "probe",
    "roofs",
    "sample_seconds",
]
