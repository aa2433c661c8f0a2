"""The machine you run on: what it is, and what its roofs are when measured."""

from servelab.measure.device import Device, device_line, probe

__all__ = ["Device", "device_line", "probe"]
