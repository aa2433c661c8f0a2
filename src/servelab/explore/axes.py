"""Axes of a chart with two logarithmic scales, marks on it, and labels that find a free place.

Models: a frame with ticks; marks that differ in shape and not only in colour; a label takes the
nearest free place around its point, tied to it by a thin line where that is not beside it.

Assumes: ticks are given from low to high; labels have one line.

Ignores: curves: a line that must not be written on is given as boxes that are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from servelab.explore.svg import OWNERS, rule, text, text_width
from servelab.markup import element, number

Box = tuple[float, float, float, float]  # left, top, right, bottom
Ticks = Sequence[tuple[float, str]]

_SIZE = 9.0  # of ticks and labels


@dataclass(frozen=True)
class LogAxes:
    """A frame from ``left`` to ``right`` and ``top`` to ``bottom``, in units of the picture.

    Parameters: the frame; the values at its ends, all greater than 0.

    >>> axes = LogAxes(0, 100, 0, 50, x_low=1, x_high=100, y_low=1, y_high=10)
    >>> axes.x(10), axes.y(10), axes.y(1)
    (50.0, 0.0, 50.0)
    """

    left: float
    right: float
    top: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        """Return where a value of the horizontal axis stands."""
        share = math.log(value / self.x_low) / math.log(self.x_high / self.x_low)
        return self.left + (self.right - self.left) * share

    def y(self, value: float) -> float:
        """Return where a value of the vertical axis stands."""
        share = math.log(value / self.y_low) / math.log(self.y_high / self.y_low)
        return self.bottom - (self.bottom - self.top) * share

    def frame(self, x_ticks: Ticks, y_ticks: Ticks) -> str:
        """Return rules and texts of the ticks; a text that would touch its neighbour is left out.

        >>> LogAxes(0, 9, 0, 9, 1, 9, 1, 9).frame([(1, "one")], []).count("<text ")
        1
        """
        body, taken = [], -math.inf
        for value, said in x_ticks:
            x, half = self.x(value), text_width(said, _SIZE) / 2
            body.append(_grid(x, self.top, x, self.bottom))
            if x - half > taken:
                body.append(text(x, self.bottom + 13, said, _SIZE, anchor="middle"))
                taken = x + half + 3
        taken = math.inf
        for value, said in y_ticks:
            y = self.y(value)
            body.append(_grid(self.left, y, self.right, y))
            if y + 3 < taken:
                body.append(text(self.left - 3, y + 3, said, _SIZE, anchor="end"))
                taken = y - 7
        return "".join(body)


def _grid(x: float, y: float, x2: float, y2: float) -> str:
    """Return a line that may pass behind text."""
    return rule(x, y, x2, y2, opacity=0.18)


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten from ``low`` to ``high``.

    >>> decades(0.2, 2000)
    [1.0, 10.0, 100.0, 1000.0]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**exponent for exponent in range(first, last + 1)]


def line(points: Iterable[tuple[float, float]], colour: str = "currentColor") -> str:
    """Return a line through points of the picture."""
    path = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return element("path", d=f"M{path}", fill="none", stroke=colour, stroke_width=1.6)


def mark(place: int, x: float, y: float) -> str:
    """Return the mark of the ``place``-th thing: disc, diamond, square, triangle, in its colour.

    Each is smaller than the one before, so that marks at one point are all seen.
    """
    r = max(6.0 - 1.2 * place, 2.4)
    n = [number(value) for value in (r, 2 * r, -r, -2 * r)]
    start = f"{number(x)} "
    shapes = (
        f"M{number(x - r)} {number(y)}a{n[0]} {n[0]} 0 1 0 {n[1]} 0a{n[0]} {n[0]} 0 1 0 {n[3]} 0z",
        f"M{start}{number(y - r)}l{n[0]} {n[0]}l{n[2]} {n[0]}l{n[2]} {n[2]}z",
        f"M{number(x - r)} {number(y - r)}h{n[1]}v{n[1]}h{n[3]}z",
        f"M{start}{number(y - r)}l{n[0]} {n[1]}h{n[3]}z",
    )
    return element("path", d=shapes[place % len(shapes)], fill=OWNERS[place % len(OWNERS)])


@dataclass
class Labels:
    """Places for labels within a frame.

    Parameters: ``frame``; ``clear`` says whether a box keeps off what the others do not describe;
    ``taken`` boxes that no label may touch; ``lines`` those that it keeps off where it can.
    """

    frame: Box
    clear: Callable[[Box], bool]
    taken: list[Box] = field(default_factory=list)
    lines: list[Box] = field(default_factory=list)

    def take(self, x: float, y: float, said: str, anchor: str | None = None) -> str:
        """Return text at a fixed place, which other labels then keep off."""
        width = text_width(said, _SIZE)
        left = x - width if anchor == "end" else x
        self.taken.append((left, y - _SIZE, left + width, y + 2))
        return text(x, y, said, _SIZE, anchor)

    def put(self, x: float, y: float, said: str) -> str:
        """Return text near a point, or nothing where there is no free place around it.

        >>> labels = Labels((0, 0, 200, 100), clear=lambda box: True)
        >>> [labels.put(50, 50, name).count("<text ") for name in ("a", "b")]
        [1, 1]
        """
        width = text_width(said, _SIZE)
        for taken in (self.taken + self.lines, self.taken):  # over a line rather than nowhere
            for box in _around(x, y, width):
                if self._free(box, taken):
                    self.taken.append(box)
                    middle, near = (box[1] + box[3]) / 2, min(max(x, box[0]), box[2])
                    tie = rule(x, y, near, middle) if abs(middle - y) > 16 else ""
                    return tie + text(box[0] + 2, box[3] - 3, said, _SIZE)
        return ""

    def _free(self, box: Box, taken: list[Box]) -> bool:
        left, top, right, bottom = self.frame
        inside = left <= box[0] and top <= box[1] and box[2] <= right and box[3] <= bottom
        return inside and self.clear(box) and not any(_touch(box, other) for other in taken)


def _around(x: float, y: float, width: float) -> Iterator[Box]:
    """Yield places around a point, near ones first: right below, left above, and so on."""
    for turn in range(16):
        off = 2 + 11 * turn
        for left, top in (
            (x + 7, y + off),
            (x - 11 - width, y - off - 12),
            (x - 11 - width, y + off),
            (x + 7, y - off - 12),
            (x - width + 3, y + off + 7),
        ):
            yield left, top, left + width + 4, top + 12


def _touch(one: Box, other: Box) -> bool:
    apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    return not apart
