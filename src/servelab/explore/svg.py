"""SVG as text: the few primitives, the colours and the frame that every picture shares.

Models: a picture as a column of drawings, each ``WIDTH`` units wide, under one title. It scales
with its box: on a screen of 390 pixels a unit is about 0.9 pixels, on a wide page 1.4, so that text
of 9 to 11 units is read on both.

Assumes: the page's text colour contrasts with its background. Lines and text take that colour
(``currentColor``) and never stand on a fill; every fill contrasts at 3:1 with white and with the
book's dark background, so one picture serves both themes and print. No identifiers are defined, so
pictures on one page cannot disturb each other.

Ignores: fonts. Widths of texts are estimates, on the generous side.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from servelab.markup import clean, element, escaped, number

#: Width of every picture, in units of its own.
WIDTH = 400.0
#: Colours of owners, in this order; each readable on white and on a dark page.
OWNERS = ("#0072B2", "#D55E00", "#008F68", "#BA6595", "#8A63D2", "#9A7400")
#: What belongs to nobody at present.
NEUTRAL = "#7D838A"
#: Parts of a step.
PARTS = {"prefill": "#D55E00", "decode": "#0072B2", "padding": NEUTRAL}

_FAINT = 0.45  # opacity of outlines and rules


class Svg(str):
    """A picture: SVG text that a notebook shows in the page, with its words.

    Parameters: ``text`` of the SVG element; ``heading``; ``description`` of all that it shows.
    """

    heading: str
    description: str

    def __new__(cls, text: str, heading: str, description: str) -> Svg:
        """Return ``text`` with its heading and description attached."""
        svg = super().__new__(cls, text)
        svg.heading, svg.description = heading, description
        return svg

    def __reduce__(self) -> tuple[type[Svg], tuple[str, str, str]]:
        return Svg, (str(self), self.heading, self.description)  # so that it can be copied

    def __repr__(self) -> str:
        return f"{self.heading}. {self.description}".rstrip()

    def _repr_html_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Drawing:
    """A part of a picture: ``body`` of elements, ``height`` in units, ``words`` that say it."""

    body: str
    height: float
    words: str


def text_width(value: str, size: float = 11) -> float:
    """Return about how many units ``value`` takes at a font size."""
    if value.isascii():  # nearly always
        return 0.58 * len(value) * size
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in value)
    return (0.58 * (len(value) - wide) + 1.05 * wide) * size


def clip(value: str, width: float, size: float = 11) -> str:
    """Return as much of ``value`` as ``width`` holds, with an ellipsis if that is not all.

    >>> clip("a name", 60), clip("a name far too long", 60)
    ('a name', 'a name f…')
    """
    value = " ".join(clean(value).split())[: 4 + int(2 * width / size)]
    if text_width(value, size) <= width:
        return value
    while value and text_width(value + "…", size) > width:
        value = value[:-1]
    return value.rstrip() + "…"


def text(
    x: float,
    y: float,
    value: str,
    size: float = 11,
    anchor: str | None = None,
    weight: str | None = None,
) -> str:
    """Return a line of text in the page's colour, its baseline at ``y``."""
    return element(
        "text", escaped(value), x=x, y=y, font_size=size, text_anchor=anchor, font_weight=weight
    )


def box(
    x: float, y: float, width: float, height: float, dashed: bool = False, heavy: bool = False
) -> str:
    """Return an outline in the page's colour."""
    return element(
        "rect",
        x=x or None,
        y=y or None,
        width=width,
        height=height,
        rx=min(2.0, height / 4),
        fill="none",
        stroke="currentColor",
        stroke_opacity=None if heavy else _FAINT,
        stroke_width=1.4 if heavy else 0.8,
        stroke_dasharray="2.5 2" if dashed else None,
    )


def fill(x: float, y: float, width: float, height: float, colours: Iterable[str]) -> str:
    """Return a filled bar; of several colours, upright stripes of 3 units or more take turns."""
    first, *others = colours
    body = element("rect", x=x or None, y=y or None, width=width, height=height, fill=first)
    stripes = max(2 * (len(others) + 1), round(width / 4))
    each = width / stripes
    for turn, colour in enumerate(others, start=1):
        path = "".join(
            f"M{number(x + i * each)} {number(y)}h{number(each)}v{number(height)}h{number(-each)}z"
            for i in range(turn, stripes, len(others) + 1)
        )
        body += element("path", d=path, fill=colour)
    return body


def rule(
    x: float, y: float, x2: float, y2: float, dashed: bool = False, opacity: float = _FAINT
) -> str:
    """Return a thin line in the page's colour."""
    return element(
        "line",
        x1=x,
        y1=y,
        x2=x2,
        y2=y2,
        stroke="currentColor",
        stroke_opacity=opacity,
        stroke_width=0.8,
        stroke_dasharray="3 2" if dashed else None,
    )


def hover(words: str) -> str:
    """Return the text that a pointer over the enclosing group shows."""
    return element("title", escaped(words))


def wrapped(value: str, width: float, size: float = 9) -> list[str]:
    """Return the lines into which ``value`` breaks at spaces; a word that is too long is clipped.

    >>> wrapped("one two three", width=50)
    ['one two', 'three']
    """
    lines: list[str] = []
    for word in value.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(joined, size) <= width:
            lines[-1] = joined
        else:
            lines.append(clip(word, width, size))
    return lines


def paragraph(value: str, size: float = 9) -> Drawing:
    """Return text over the width of the picture."""
    lines = wrapped(value, WIDTH - 8, size)
    step = size * 1.35
    body = "".join(text(4, step * (i + 1) - 2, line, size) for i, line in enumerate(lines))
    return Drawing(body, step * len(lines) + 2, "")


def picture(title: str, drawings: Iterable[Drawing]) -> Svg:
    """Return ``drawings`` below each other under a title, as one accessible picture.

    Raises: ``ValueError`` without a title, which is the picture's name to a screen reader.

    >>> picture("Nothing", [])
    Nothing.
    >>> picture("A < B", [paragraph("words")])[:38]
    '<svg xmlns="http://www.w3.org/2000/svg'
    """
    if not title.strip():
        raise ValueError("a picture needs a title")
    drawings = list(drawings)
    heading = wrapped(clean(title), WIDTH - 8, 12)
    body = [text(4, 13 + 15 * i, line, 12, weight="bold") for i, line in enumerate(heading)]
    y = 15.0 * len(heading) + 4
    for drawing in drawings:
        body.append(element("g", drawing.body, transform=f"translate(0 {number(y)})"))
        y += drawing.height + 4
    description = " ".join(drawing.words for drawing in drawings if drawing.words)
    said = element("title", escaped(title))
    if description:
        said += element("desc", escaped(description))
    svg = element(
        "svg",
        said + "".join(body),
        xmlns="http://www.w3.org/2000/svg",
        class_="servelab-picture",
        role="img",
        viewBox=f"0 0 {number(WIDTH)} {number(y)}",
        # The height follows from the width; 36 rem keep a wide page's letters at text size.
        style="display:block;width:100%;max-width:36rem;height:auto",
        font_family="system-ui,sans-serif",
        fill="currentColor",
    )
    return Svg(svg, clean(title), clean(description))
