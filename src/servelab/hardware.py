"""Accelerators: how fast they calculate, how fast they move bytes, how much they hold.

Models: dense peak rate per number format, peak bandwidth of the device memory, its capacity, and
the link to other chips, each with the source it was read from.

Assumes: rates are *dense* (without 2:4 sparsity) and count a multiply-add as two FLOP; one chip,
not a pair or a tray; bandwidth and link rates are decimal, per direction for links.

Ignores: what a kernel can reach (measure it: `servelab.measure`), clocks and power limits.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from servelab.units import ReadOnly, check_fields, check_positive, dtype_bits, near_names


@dataclass(frozen=True)
class Source:
    """Where a value was read, and whether the source was seen (``verified``) or recalled."""

    text: str
    verified: bool


@dataclass(frozen=True)
class Accelerator(ReadOnly):
    """One chip and the peaks of its data sheet.

    Parameters: ``dense_flop_per_second`` peak rate by dtype, in FLOP/s; ``memory_bytes`` capacity
    of the device memory; ``bandwidth_bytes_per_second`` its peak rate; ``visible_memory_bytes``
    what the driver leaves to programs, where known; ``link_bytes_per_second`` to other chips, per
    direction; ``sources`` by field (``dense_flop_per_second.bf16``); ``trap`` and ``note`` for
    readers of data sheets.
    Raises: ``TypeError`` or ``ValueError`` where a value is not a positive number, a dtype unknown.

    >>> mine = Accelerator("mine", {"fp32": 200e9}, 24 * 2**30, 50e9)
    >>> mine.ridge("fp32")
    4.0
    """

    name: str
    dense_flop_per_second: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    bandwidth_bytes_per_second: float
    visible_memory_bytes: int | None = None
    link_bytes_per_second: float | None = None
    label: str = ""
    sources: Mapping[str, Source] = field(default_factory=dict, hash=False, repr=False)
    interconnect: str = field(default="", repr=False)
    trap: str = field(default="", repr=False)
    note: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.dense_flop_per_second, Mapping) or not self.dense_flop_per_second:
            raise ValueError(
                f"{self.name}: dense_flop_per_second must give a rate for at least one dtype, "
                f"got {self.dense_flop_per_second!r}"
            )
        for dtype, rate in self.dense_flop_per_second.items():
            dtype_bits(dtype)
            check_positive(f"{self.name}: dense_flop_per_second[{dtype}]", rate)
        check_fields(self, "memory_bytes")
        check_positive(f"{self.name}: bandwidth_bytes_per_second", self.bandwidth_bytes_per_second)
        if self.visible_memory_bytes is not None:
            check_fields(self, "visible_memory_bytes")
        if self.link_bytes_per_second is not None:
            check_positive(f"{self.name}: link_bytes_per_second", self.link_bytes_per_second)
        rates = MappingProxyType(dict(self.dense_flop_per_second))
        object.__setattr__(self, "dense_flop_per_second", rates)
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        object.__setattr__(self, "label", self.label or self.name)

    def peak(self, dtype: str) -> float:
        """Return the dense peak rate for ``dtype``, in FLOP/s.

        Raises: ``ValueError`` where the chip has no rate for it.

        >>> get("h100-sxm-80gb").peak("bf16")
        989000000000000
        >>> get("v100-sxm2-32gb").peak("bf16")
        Traceback (most recent call last):
        ...
        ValueError: v100-sxm2-32gb has no peak rate for 'bf16'; it has fp16
        """
        dtype_bits(dtype)
        if dtype not in self.dense_flop_per_second:
            has = ", ".join(self.dense_flop_per_second)
            raise ValueError(f"{self.name} has no peak rate for {dtype!r}; it has {has}")
        return self.dense_flop_per_second[dtype]

    def ridge(self, dtype: str) -> float:
        """Return the intensity at which compute and memory take equally long, in FLOP per byte.

        Source: Williams, Waterman and Patterson (2009), "ridge point".
        Raises: ``ValueError`` where the chip has no rate for ``dtype``.

        >>> round(get("h100-sxm-80gb").ridge("bf16"))
        295
        """
        return self.peak(dtype) / self.bandwidth_bytes_per_second

    def verified(self, field_name: str) -> bool:
        """Return whether the source of a field was seen; a value without a source was not.

        >>> get("h100-sxm-80gb").verified("bandwidth_bytes_per_second")
        True
        """
        return field_name in self.sources and self.sources[field_name].verified

    def mark(self, *field_names: str) -> str:
        """Return what tables print behind a figure: "?" if a source was not seen, else a space.

        >>> get("rtx-5090").mark("dense_flop_per_second.bf16", "bandwidth_bytes_per_second")
        '?'
        """
        return " " if all(self.verified(name) for name in field_names) else "?"


def names() -> list[str]:
    """Return the names in the catalogue, in its order.

    >>> "a100-sxm-80gb" in names()
    True
    """
    return list(_catalogue())


def get(name: str) -> Accelerator:
    """Return the accelerator of that name.

    Raises: ``KeyError`` for an unknown name; the message lists near ones.

    >>> get("h100-sxm-80gb").bandwidth_bytes_per_second
    3350000000000
    >>> get("h100")
    Traceback (most recent call last):
    ...
    KeyError: "no accelerator 'h100'; near: h100-sxm-80gb, h100-pcie-80gb, h100-nvl-94gb"
    """
    catalogue = _catalogue()
    if isinstance(name, str) and name in catalogue:
        return catalogue[name]
    raise KeyError(f"no accelerator {name!r}; near: {near_names(name, catalogue)}")


@cache
def _catalogue() -> Mapping[str, Accelerator]:
    text = (resources.files("servelab") / "data/hardware/accelerators.json").read_text(
        encoding="utf-8"
    )
    return MappingProxyType({record["name"]: _from_record(record) for record in json.loads(text)})


def _from_record(record: dict[str, Any]) -> Accelerator:
    """Return the accelerator of a catalogue record, whose figures are value, source, verified."""
    rates = record["dense_flop_per_second"]
    figures = {key: value for key, value in record.items() if isinstance(value, dict)}
    del figures["dense_flop_per_second"]
    sourced = figures | {f"dense_flop_per_second.{dtype}": rate for dtype, rate in rates.items()}
    fields: dict[str, Any] = {key: value for key, value in record.items() if isinstance(value, str)}
    fields |= {key: figure["value"] for key, figure in figures.items()}
    fields["dense_flop_per_second"] = {dtype: rate["value"] for dtype, rate in rates.items()}
    fields["sources"] = {key: Source(f["source"], f["verified"]) for key, f in sourced.items()}
    return Accelerator(**fields)
