"""Timelines as pictures: a lane per sequence, below them the tokens of each step.

Models: spans differ in shape and not only in colour: prefill fills its lane, decode half of it,
padding is hollow, waiting a dashed line, pre-empted a dashed box, swapped out a box with a line
through it; a tick marks the end. Several timelines stand below each other on one scale, so that
their lengths can be compared.

Assumes: nothing but the timelines' order.

Ignores: lanes beyond the first 200 of a timeline; how many are left out is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from servelab.explore.pool import MOST_SAID, counted
from servelab.explore.svg import (
    PARTS,
    WIDTH,
    Drawing,
    Svg,
    box,
    clip,
    fill,
    hover,
    paragraph,
    picture,
    rule,
    text,
    text_width,
    wrapped,
)
from servelab.explore.timeline import Bar, Kind, Lane, Span, Timeline
from servelab.markup import element, number
from servelab.units import format_seconds

_LEFT, _RIGHT = 74.0, WIDTH - 6  # of the plot
_MOST_LANES = 200
_BARS = 40.0  # height of the token bars
_NAMES: dict[Kind, str] = {
    "waiting": "waiting",
    "prefill": "prefill",
    "decode": "decode",
    "preempted": "pre-empted",
    "swapped": "swapped out",
    "padding": "padding",
}


def draw_timeline(timelines: Timeline | Mapping[str, Timeline], title: str = "Timeline") -> Svg:
    """Return a picture of one timeline, or of several by name, on one scale.

    Parameters: ``timelines`` of one unit.
    Returns: the picture; its description says what happened to each sequence.
    Raises: ``TypeError`` for anything else, events among it; ``ValueError`` for timelines of
    different units.

    >>> draw_timeline(Timeline("steps", (), ()))
    Timeline. 0 sequences, 0 steps, 0 tokens computed.
    """
    named = timelines if isinstance(timelines, Mapping) else {"": timelines}
    for each in named.values():
        if not isinstance(each, Timeline):
            raise TypeError(
                f"a timeline is drawn, got {each!r:.80}: make one with timeline(events)"
            )
    units = sorted({each.unit for each in named.values()})
    if len(units) > 1:
        raise ValueError(f"timelines share one unit, these have {' and '.join(units)}")
    end = max((each.end for each in named.values()), default=0) or 1
    drawings = []
    for name, each in named.items():
        said = [words(lane, each) for lane in each.lanes[:_MOST_LANES]]
        drawings += [_heading(name, each, said), _lanes(each, end, said)]
        drawings += [_bars(each, end), _axis(each, end)]
    return picture(title, [*drawings, _legend(list(named.values()))])


def _x(time: float, end: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * time / end


_seconds = lru_cache(maxsize=1024)(format_seconds)  # lanes share their ends


def _time(value: float, run: Timeline) -> str:
    return _seconds(value) if run.unit == "seconds" else f"{value:,.0f}"


def summary(run: Timeline) -> str:
    """Return the numbers of a timeline, as a sentence.

    >>> summary(Timeline("steps", (), (Bar(0, 1, 6, 2, 0),), budget=16))
    '0 sequences, 1 step, 8 tokens computed (6 prefill, 2 decode) of 16 that the budget allows.'
    """
    parts = [f"{count:,} {part}" for part, count in run.tokens.items() if count]
    said = f"{counted(len(run.lanes), 'sequence')}, {counted(len(run.bars), 'step')}"
    said += f" in {format_seconds(run.end)}" if run.unit == "seconds" else ""
    said += f", {counted(sum(run.tokens.values()), 'token')} computed"
    said += f" ({', '.join(parts)})" if parts else ""
    if run.budget is not None:
        said += f" of {run.budget * len(run.bars):,} that the budget allows"
    preempted, swapped = (
        sum(lane.preempted for lane in run.lanes),
        sum(lane.swapped for lane in run.lanes),
    )
    for name, times in (("pre-empted", preempted), ("swapped out", swapped)):
        if times:
            said += f"; {name} {'once' if times == 1 else f'{times:,} times'}"
    return said + "."


def words(lane: Lane, run: Timeline) -> str:
    """Return what happened to a sequence, in words."""
    said = []
    for kind, name in _NAMES.items():
        if spans := [span for span in lane.spans if span.kind == kind]:
            unit = "" if run.unit == "seconds" else " step" + "s" * (lane.length(kind) != 1)
            tokens = sum(span.tokens for span in spans)
            said.append(
                f"{name} {_time(lane.length(kind), run)}{unit}"
                + (f" ({counted(tokens, 'token')})" if tokens else "")
            )
    if lane.finished is not None:
        at = "at " if run.unit == "seconds" else "after step "
        said.append(f"finished {at}{_time(lane.finished, run)} ({lane.reason})")
    return f"{lane.name}: {', '.join(said) or 'nothing yet'}"


def _heading(name: str, run: Timeline, words_of_lanes: list[str]) -> Drawing:
    numbers = summary(run)
    lines = paragraph(numbers)
    said = f"{name}: {numbers}" if name else numbers
    lanes = words_of_lanes[:MOST_SAID]
    if (more := len(run.lanes) - MOST_SAID) > 0:
        lanes.append(f"and {counted(more, 'sequence')} more")
    if lanes:
        said += " " + "; ".join(lanes) + "."
    if not name:
        return Drawing(lines.body, lines.height, said)
    names = wrapped(name, WIDTH - 8, 10.5)
    body = "".join(text(4, 12 + 14 * i, line, 10.5, weight="bold") for i, line in enumerate(names))
    top = 14 * len(names) + 2
    body += element("g", lines.body, transform=f"translate(0 {top})")
    return Drawing(body, lines.height + top, said)


def _lanes(run: Timeline, end: float, words_of_lanes: list[str]) -> Drawing:
    lanes = run.lanes[:_MOST_LANES]
    pitch = 15.0 if len(lanes) <= 24 else max(2.5, min(11.0, 500 / max(1, len(lanes))))
    label_every = math.ceil(10.5 / pitch)
    height = pitch - min(3.0, pitch / 4)
    body = []
    for place, (lane, said) in enumerate(zip(lanes, words_of_lanes, strict=True)):
        inside = hover(said)
        if place % label_every == 0:
            inside += text(4, height / 2 + 3.3, clip(lane.name, _LEFT - 8, 9), 9)
        inside += "".join(_span(span, height, end) for span in lane.spans)
        if lane.finished is not None:
            x = _x(lane.finished, end)
            tick = f"M{number(x)} 0v{number(height)}"
            inside += element("path", d=tick, stroke="currentColor", stroke_width=1.6)
        place_at = f"translate(0 {number(place * pitch)})"
        body.append(element("g", inside, class_="lane", transform=place_at))
    bottom = pitch * len(lanes)
    if (more := len(run.lanes) - len(lanes)) > 0:
        body.append(text(4, bottom + 10, f"and {counted(more, 'sequence')} more", 9))
        bottom += 14
    return Drawing("".join(body), bottom, "")


def _span(span: Span, height: float, end: float) -> str:
    x, x2 = _x(span.start, end), _x(span.stop, end)
    return _shape(span.kind, x, x2 - x, height)


def _shape(kind: Kind, x: float, width: float, height: float) -> str:
    middle = height / 2
    if kind == "prefill":
        return fill(x, 0, width, height, [PARTS["prefill"]])
    if kind == "decode":
        return fill(x, height / 4, width, middle, [PARTS["decode"]])
    if kind == "padding":
        return box(x, height / 4, width, middle)
    if kind == "waiting":
        return rule(x, middle, x + width, middle, dashed=True)
    if kind == "preempted":
        return box(x, 0.5, width, height - 1, dashed=True)
    return box(x, 0.5, width, height - 1) + rule(x, middle, x + width, middle)


def _bars(run: Timeline, end: float) -> Drawing:
    """Return the tokens of each step as areas: decode, on it prefill, on it padding."""
    if not run.bars:
        return Drawing("", 0, "")
    top = max(run.budget or 0, *(bar.tokens for bar in run.bars))
    floor = _BARS + 6
    body = [hover("tokens computed in each step"), text(4, floor, "per step", 9)]
    body.append(text(4, floor - 11, "tokens", 9))
    layers = [
        ("padding", [bar.tokens for bar in run.bars]),
        ("prefill", [bar.decode + bar.prefill for bar in run.bars]),
        ("decode", [bar.decode for bar in run.bars]),
    ]
    for part, heights in layers:
        if run.tokens[part]:
            path = "".join(_area(run.bars, heights, top, floor, end))
            body.append(element("path", d=path, fill=PARTS[part]))
    level = floor - _BARS * (run.budget or top) / top
    body.append(rule(_LEFT, level, _RIGHT, level, dashed=True))
    limit = f"budget {run.budget:,}" if run.budget else f"most {top:,}"
    body.append(text(4, level + 3.2, clip(limit, _LEFT - 8, 9), 9))
    return Drawing("".join(body), floor + 1, "")


def _area(
    bars: Sequence[Bar], heights: Sequence[int], top: float, floor: float, end: float
) -> Iterator[str]:
    """Yield the outline of an area that has a height for each bar."""
    yield f"M{number(_x(bars[0].start, end))} {number(floor)}"
    time, level = bars[0].start, 0
    for bar, height in zip(bars, heights, strict=True):
        if bar.start > time:  # the engine was idle
            yield f"H{number(_x(time, end))}V{number(floor)}"
            level = 0
        if height != level:
            yield f"H{number(_x(bar.start, end))}V{number(floor - _BARS * height / top)}"
        time, level = bar.stop, height
    yield f"H{number(_x(time, end))}V{number(floor)}z"


def _axis(run: Timeline, end: float) -> Drawing:
    body = [rule(_LEFT, 1, _RIGHT, 1), text(4, 13, run.unit, 9)]
    for tick in _ticks(end, run):
        x = _x(tick, end)
        label = _time(tick, run)
        half = text_width(label, 9) / 2
        body.append(rule(x, 1, x, 4) + text(min(x, WIDTH - half), 13, label, 9, anchor="middle"))
    return Drawing("".join(body), 18, "")


def _ticks(end: float, run: Timeline) -> list[float]:
    """Return four to eight round times from 0 to ``end``."""
    rough = end / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    if run.unit == "steps":
        step = max(1.0, step)
    return [i * step for i in range(math.floor(end / step + 1e-9) + 1)]


def _legend(runs: Sequence[Timeline]) -> Drawing:
    """Return what the shapes mean, those that are drawn."""
    present = {span.kind for run in runs for lane in run.lanes for span in lane.spans}
    x, y, body = 4.0, 0.0, []
    for kind, name in _NAMES.items():
        if kind not in present:
            continue
        width = 22 + text_width(name, 9) + 10
        if x + width > WIDTH:
            x, y = 4.0, y + 16
        swatch = _shape(kind, 0, 18, 10) + text(22, 8.5, name, 9)
        body.append(element("g", swatch, transform=f"translate({number(x)} {number(y)})"))
        x += width
    if any(lane.finished is not None for run in runs for lane in run.lanes):
        if x + 70 > WIDTH:
            x, y = 4.0, y + 16
        tick = element("path", d="M4 0v10", stroke="currentColor", stroke_width=1.6)
        swatch = tick + text(10, 8.5, "finished", 9)
        body.append(element("g", swatch, transform=f"translate({number(x)} {number(y)})"))
    return Drawing("".join(body), y + 14 if body else 0, "")
