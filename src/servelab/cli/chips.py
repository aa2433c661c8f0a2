"""`servelab hardware`: the catalogue of accelerators, or one of them with its sources."""

import textwrap
from collections.abc import Iterator

import click

from servelab import hardware
from servelab.cli import options
from servelab.cli.output import answer, gb, gib, wrapped
from servelab.hardware import Accelerator
from servelab.units import format_bandwidth, format_bytes, format_flop_rate, table

_MARK = "*"
_LEGEND = f"{_MARK} not read from a source: recalled, derived, or given without one"


@click.command(epilog=options.examples("hardware", "hardware h100-sxm-80gb"))
@click.argument("chip", metavar="[NAME]", type=options.CHIP, required=False)
@options.json_option
def command(chip: Accelerator | None, as_json: bool) -> None:
    """Accelerators: dense peak rates, memory, bandwidth.

    Rates are dense, without 2:4 sparsity, and count a multiply-add as two FLOP. The ridge is the
    intensity, in FLOP per byte, from which compute limits and not memory. With a NAME: every
    figure of that chip with its source.
    """
    if chip is None:
        chips = [hardware.get(name) for name in hardware.names()]
        answer(as_json, {"accelerators": [_values(one) for one in chips]}, _catalogue(chips))
    else:
        answer(as_json, _values(chip), _figures(chip))


def _values(chip: Accelerator) -> dict[str, object]:
    return {
        "name": chip.name,
        "label": chip.label,
        "dense_flop_per_second": dict(chip.dense_flop_per_second),
        "ridge_flop_per_byte": {dtype: chip.ridge(dtype) for dtype in chip.dense_flop_per_second},
        "memory_bytes": chip.memory_bytes,
        "visible_memory_bytes": chip.visible_memory_bytes,
        "bandwidth_bytes_per_second": chip.bandwidth_bytes_per_second,
        "link_bytes_per_second": chip.link_bytes_per_second,
        "interconnect": chip.interconnect,
        "trap": chip.trap,
        "note": chip.note,
        "sources": {
            field: {"source": source.text, "verified": source.verified}
            for field, source in chip.sources.items()
        },
    }


def _marked(chip: Accelerator, field: str, text: str) -> str:
    return text if chip.verified(field) else text + _MARK


def _rate(chip: Accelerator, dtype: str) -> str:
    if dtype not in chip.dense_flop_per_second:
        return ""
    return _marked(
        chip, f"dense_flop_per_second.{dtype}", format_flop_rate(chip.peak(dtype))
    ).replace("FLOP/s", "")


def _catalogue(chips: list[Accelerator]) -> Iterator[str]:
    rows: list[list[object]] = []
    for chip in chips:
        wide = next((d for d in ("bf16", "fp16") if d in chip.dense_flop_per_second), "fp32")
        rows.append(
            [
                chip.name,
                _marked(chip, "memory_bytes", format_bytes(chip.memory_bytes, "GiB", 0)),
                _marked(
                    chip,
                    "bandwidth_bytes_per_second",
                    format_bandwidth(chip.bandwidth_bytes_per_second),
                ),
                wide,
                _rate(chip, wide),
                _rate(chip, "fp8"),
                f"{chip.ridge(wide):,.0f}",
            ]
        )
    yield table(rows, ["name", "memory", "bandwidth", "type", "FLOP/s", "fp8", "ridge"])
    yield ""
    yield "FLOP/s dense at that type, and at fp8 where the chip has it; ridge in FLOP/byte"
    yield _LEGEND


def _figures(chip: Accelerator) -> Iterator[str]:
    sizes = {
        "memory_bytes": chip.memory_bytes,
        "visible_memory_bytes": chip.visible_memory_bytes,
    }
    rates = {
        "bandwidth_bytes_per_second": chip.bandwidth_bytes_per_second,
        "link_bytes_per_second": chip.link_bytes_per_second,
    }
    shown = {
        f"dense_flop_per_second.{dtype}": (
            f"{dtype} dense, ridge {chip.ridge(dtype):,.0f} FLOP/byte",
            format_flop_rate(rate),
        )
        for dtype, rate in chip.dense_flop_per_second.items()
    }
    shown |= {
        field: (field.removesuffix("_bytes").replace("_", " "), f"{gib(size)} GiB = {gb(size)} GB")
        for field, size in sizes.items()
        if size is not None
    }
    shown |= {
        field: (field.removesuffix("_bytes_per_second"), format_bandwidth(rate))
        for field, rate in rates.items()
        if rate is not None
    }
    yield f"{chip.name}: {chip.label}"
    yield ""
    yield table(
        [[what, _marked(chip, field, value)] for field, (what, value) in shown.items()],
        ["figure", "value"],
    )
    if not all(chip.verified(field) for field in shown):
        yield _LEGEND
    for title, words in (
        ("interconnect", chip.interconnect),
        ("trap", chip.trap),
        ("note", chip.note),
    ):
        if words:
            yield ""
            yield from textwrap.wrap(f"{title}: {words}", 80, subsequent_indent="  ")
    yield ""
    yield "Sources"
    by_source: dict[str, list[str]] = {}
    for field in shown:
        if field in chip.sources:
            by_source.setdefault(chip.sources[field].text, []).append(_marked(chip, field, field))
    for source, fields in by_source.items():
        yield wrapped(f"{', '.join(fields)}: {source}")
