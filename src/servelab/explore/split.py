"""Where the time of a step goes: weights, KV cache and arithmetic as bars.

Models: for each step two bars that can overlap, one of the traffic with device memory, stacked by
what is moved, and one of the arithmetic; the longer is the least time of the step.

Assumes: times are those of `servelab.roofline.phases`. Each step has a scale of its own, because a
prompt can take a thousand times as long as a step of decoding; the scale is written below it.

Ignores: what a bound ignores: launches, sampling, waiting.
"""

from __future__ import annotations

from collections.abc import Mapping

from servelab.explore.svg import (
    NEUTRAL,
    OWNERS,
    WIDTH,
    Drawing,
    Svg,
    fill,
    hover,
    paragraph,
    picture,
    rule,
    text,
    text_width,
    wrapped,
)
from servelab.markup import element
from servelab.roofline import Time
from servelab.units import format_seconds

_LEFT, _RIGHT = 66.0, WIDTH - 8
_BAR = 15.0
COLOURS = {
    "weights": OWNERS[0],
    "KV cache": OWNERS[1],
    "activations": NEUTRAL,
    "state": OWNERS[3],
    "math": OWNERS[2],
    "link": OWNERS[4],
}


def parts_of(time: Time) -> dict[str, dict[str, float]]:
    """Return the seconds of each bar by what they are spent on; what takes no time is left out.

    >>> parts_of(Time(1, 3.0, 2.0, 1.0, 2.0, 0.0, 0.0, 0.0))
    {'memory': {'weights': 1.0, 'KV cache': 2.0}, 'math': {'math': 2.0}}
    """
    memory = {
        "weights": time.weight_seconds,
        "KV cache": time.kv_seconds,
        "activations": time.activation_seconds,
        "state": time.state_seconds,
    }
    bars = {"memory": memory, "math": {"math": time.math_seconds}, "links": {}}
    bars["links"] = {"link": time.link_seconds}
    found = {bar: {k: v for k, v in parts.items() if v > 0} for bar, parts in bars.items()}
    return {bar: parts for bar, parts in found.items() if parts}


def said_time(name: str, time: Time) -> str:
    """Return the least time of a step and its terms, as a sentence.

    >>> said_time("Decode", Time(1, 3.0, 2.0, 1.0, 2.0, 0.0, 0.0, 0.0))
    'Decode: at least 3.00 s, limited by memory; weights 1.00 s, KV cache 2.00 s; math 2.00 s.'
    """
    terms = "; ".join(
        ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in parts.items())
        for parts in parts_of(time).values()
    )
    least = format_seconds(time.seconds)
    return f"{name}: at least {least}, limited by {time.limiter}; {terms}."


def draw_split(times: Mapping[str, Time], title: str = "Least time of a step") -> Svg:
    """Return the bars of one step or several, by name.

    Returns: the picture; its description says every time in it.

    >>> draw_split({"Decode": Time(1, 3.0, 2.0, 1.0, 2.0, 0.0, 0.0, 0.0)})
    Least time of a step. Decode: at least 3.00 s, limited by memory; weights 1.00 s, ...
    """
    drawings = [drawing for name, time in times.items() for drawing in _step(name, time)]
    shown = {what for time in times.values() for parts in parts_of(time).values() for what in parts}
    return picture(title, [*drawings, _legend([what for what in COLOURS if what in shown])])


def _step(name: str, time: Time) -> list[Drawing]:
    said = said_time(name, time)
    lines = wrapped(said, WIDTH - 8, 10)
    head = "".join(text(4, 11 + 13 * i, line, 10) for i, line in enumerate(lines))
    bars = parts_of(time)
    end = max((sum(parts.values()) for parts in bars.values()), default=0.0) or 1.0
    scale = (_RIGHT - _LEFT) / end
    body, y = "", 2.0
    for bar, parts in bars.items():
        body += text(_LEFT - 6, y + 11, bar, 10, anchor="end")
        x = _LEFT
        for what, seconds in parts.items():
            width = seconds * scale
            body += element(
                "g",
                hover(f"{name}, {what}: {format_seconds(seconds)}")
                + fill(x, y, width, _BAR, [COLOURS[what]]),
            )
            x += width
        y += _BAR + 5
    body += rule(_LEFT, 0, _LEFT, y) + rule(_RIGHT, 0, _RIGHT, y, dashed=True)
    body += text(_LEFT, y + 9, "0", 9, anchor="middle")
    body += text(_RIGHT, y + 9, format_seconds(end), 9, anchor="end")
    return [Drawing(head, 13.0 * len(lines) + 2, said), Drawing(body, y + 16, "")]


def _legend(shown: list[str]) -> Drawing:
    body, x, y = "", 4.0, 2.0
    for what in shown:
        width = 18 + text_width(what, 10)
        if x + width > WIDTH:
            x, y = 4.0, y + 15
        body += fill(x, y, 10, 10, [COLOURS[what]]) + text(x + 14, y + 9, what, 10)
        x += width + 8
    note = paragraph("Each step has a scale of its own. Memory and math can overlap.")
    body += element("g", note.body, transform=f"translate(0 {y + 14:g})")
    return Drawing(body, y + 14 + note.height, "")
