"""The machine you run on: what it is, and what its roofs are when measured."""

from servelab.measure.attribution import causes, parts_of, taken_apart
from servelab.measure.calibration import Calibration, cross_checked, fit, typical
from servelab.measure.device import Device, device_line, probe
from servelab.measure.records import Measurement, Record, fastest, load_records
from servelab.measure.sweeps import bound_of, cost_of, sweep
from servelab.measure.timing import linears, roofs, sample_seconds
from servelab.measure.workload import Workload, serve

__all__ = [
    "Calibration",
    "Device",
    "Measurement",
    "Record",
    "Workload",
    "bound_of",
    "causes",
    "cost_of",
    "cross_checked",
    "device_line",
    "fastest",
    "fit",
    "linears",
    "load_records",
    "parts_of",
    "probe",
    "roofs",
    "sample_seconds",
    "serve",
    "sweep",
    "taken_apart",
    "typical",
]
