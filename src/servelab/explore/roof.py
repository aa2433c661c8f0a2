"""The roofline as a picture: how fast a chip can work at most, and where pieces of work stand.

Models: two logarithmic axes, the slope of the bandwidth, the roof of the peak rate, the ridge where
they meet; each piece of work as a mark on the highest rate that its intensity allows.

Assumes: costs and peaks are those of `servelab.roofline`: dense rates, every operand moved once.

Ignores: what was measured: a mark is a bound, not a forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from servelab.explore.axes import Box, Labels, LogAxes, decades, line, mark
from servelab.explore.svg import WIDTH, Drawing, Svg, picture, rule, text, wrapped
from servelab.hardware import Accelerator
from servelab.roofline import Cost, attainable, time_bound
from servelab.units import format_bandwidth, format_flop_rate

_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, WIDTH - 18, 8.0, 190.0
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class Mark:
    """A piece of work on a roofline: ``name`` in a word or two, and what it costs."""

    name: str
    cost: Cost


def said_intensity(value: float) -> str:
    """Return an intensity with its unit, as pictures and tables say it.

    >>> said_intensity(62.06), said_intensity(1365.3)
    ('62.1 FLOP/byte', '1,365 FLOP/byte')
    """
    return f"{value:,.{1 if value < 1000 else 0}f} FLOP/byte"


def said_chip(chip: Accelerator, dtype: str) -> str:
    """Return a chip's roof, slope and ridge, as a sentence.

    >>> from servelab import hardware
    >>> said_chip(hardware.get("h100-sxm-80gb"), "bf16")
    'H100 SXM 80 GB in bf16: 989 TFLOP/s over 3.35 TB/s, ridge 295 FLOP/byte.'
    """
    return (
        f"{chip.label} in {dtype}: {format_flop_rate(chip.peak(dtype))} over "
        f"{format_bandwidth(chip.bandwidth_bytes_per_second)}, "
        f"ridge {chip.ridge(dtype):,.0f} FLOP/byte."
    )


def said_mark(one: Mark, chip: Accelerator, dtype: str) -> str:
    """Return where a mark stands, as a sentence.

    >>> from servelab import hardware, roofline
    >>> said_mark(Mark("q", roofline.matmul(64, 4096, 4096)), hardware.get("h100-sxm-80gb"), "bf16")
    'q: 62.1 FLOP/byte, at most 208 TFLOP/s, 21.0% of the roof, limited by memory.'
    """
    best = attainable(one.cost.intensity, chip, dtype)
    limiter = time_bound(one.cost, chip, dtype).limiter
    return (
        f"{one.name}: {said_intensity(one.cost.intensity)}, at most {format_flop_rate(best)}, "
        f"{best / chip.peak(dtype):.1%} of the roof, limited by {limiter}."
    )


def draw_roofline(
    chip: Accelerator, dtype: str, marks: Sequence[Mark], title: str | None = None
) -> Svg:
    """Return the roofline of a chip that calculates in ``dtype``, with marks on it.

    Parameters: ``marks`` with some work and some traffic each; ``title`` None for the chip's name.
    Raises: ``ValueError`` where the chip has no rate for ``dtype``, or a mark has no work.

    >>> from servelab import hardware, roofline
    >>> chip = hardware.get("h100-sxm-80gb")
    >>> draw_roofline(chip, "bf16", [Mark("q_proj", roofline.matmul(64, 4096, 4096))])
    Roofline of one H100 SXM 80 GB in bf16. Slope 3.35 TB/s, roof 989 TFLOP/s, ridge ...
    """
    peak, ridge = chip.peak(dtype), chip.ridge(dtype)
    for one in marks:
        if not one.cost.flop or not one.cost.bytes:
            raise ValueError(f"{one.name}: a mark needs FLOP and bytes, got {one.cost}")
    intensities = [one.cost.intensity for one in marks]
    x_low = 10.0 ** math.floor(math.log10(min([1.0, *intensities]) * 0.9))
    x_high = 10.0 ** math.ceil(math.log10(max([ridge * 2, *intensities]) * 1.1))
    y_low = 10.0 ** math.floor(math.log10(attainable(x_low, chip, dtype)))
    axes = LogAxes(_LEFT, _RIGHT, _TOP, _BOTTOM, x_low, x_high, y_low, peak * 6)
    body = axes.frame(
        [(value, f"{value:,g}") for value in decades(x_low, x_high)],
        [(value, _rate(value)) for value in decades(y_low, peak * 3)],
    )
    slope = [(axes.x(x_low), axes.y(attainable(x_low, chip, dtype)))]
    roof = [*slope, (axes.x(ridge), axes.y(peak)), (axes.right, axes.y(peak))]
    body += line(roof) + rule(axes.x(ridge), axes.y(peak), axes.x(ridge), _BOTTOM, dashed=True)

    def clear(box: Box) -> bool:
        return _off_the_roof(box, axes, chip, dtype)

    labels = Labels((_LEFT, _TOP, _RIGHT, _BOTTOM), clear)
    labels.lines.append((axes.x(ridge) - 1, axes.y(peak), axes.x(ridge) + 1, _BOTTOM))
    said_ridge = f"ridge {ridge:,.0f}"
    near_edge = axes.x(ridge) + 60 > _RIGHT
    at = axes.x(ridge) + (-3 if near_edge else 3)
    body += labels.take(_LEFT + 4, _TOP + 10, f"slope {format_bandwidth(_bandwidth(chip))}")
    body += labels.take(_RIGHT - 4, _TOP + 10, f"roof {format_flop_rate(peak)}", "end")
    body += labels.take(at, _BOTTOM - 4, said_ridge, "end" if near_edge else None)
    places = [(axes.x(i), axes.y(attainable(i, chip, dtype))) for i in intensities]
    labels.taken += [(x - 7, y - 7, x + 7, y + 7) for x, y in places]
    for place, (one, (x, y)) in enumerate(zip(marks, places, strict=True)):
        body += mark(place, x, y) + labels.put(x, y, one.name)
    body += text(_LEFT, _BOTTOM + 26, "FLOP per byte of device memory; upwards FLOP/s", 9)
    said = [said_mark(one, chip, dtype) for one in marks]
    words = (
        f"Slope {format_bandwidth(_bandwidth(chip))}, roof {format_flop_rate(peak)}, "
        f"ridge {ridge:,.0f} FLOP/byte. " + " ".join(said)
    )
    chart = Drawing(body, _BOTTOM + 30, words.strip())
    name = f"Roofline of one {chip.label} in {dtype}"
    return picture(title or name, [chart, *map(_key, range(len(said)), said)])


def _bandwidth(chip: Accelerator) -> float:
    return chip.bandwidth_bytes_per_second


def _rate(value: float) -> str:
    """Return a power of ten with the prefix of its thousand: 100 T."""
    exponent = round(math.log10(value))
    return f"{10 ** (exponent % 3)} {_PREFIXES[exponent // 3]}"


def _off_the_roof(box: Box, axes: LogAxes, chip: Accelerator, dtype: str) -> bool:
    """Return whether a box lies on one side of the roof, which never falls to the right."""
    left, top, right, bottom = box
    share = math.log(axes.x_high / axes.x_low) / (axes.right - axes.left)

    def height(x: float) -> float:
        intensity = axes.x_low * math.exp(share * (x - axes.left))
        return axes.y(attainable(intensity, chip, dtype))

    return height(left) < top - 1 or height(right) > bottom + 1


def _key(place: int, said: str) -> Drawing:
    """Return the mark and the sentence of one piece of work."""
    lines = wrapped(said, WIDTH - 24, 9.5)
    body = mark(place, 10, 6)
    body += "".join(text(20, 9 + 12 * i, part, 9.5) for i, part in enumerate(lines))
    return Drawing(body, 12.0 * len(lines), "")
