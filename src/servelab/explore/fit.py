"""What fits into a device: its memory as one bar, and the growth of a cache as lines.

Models: `draw_fit`: weights, reserve, the caches of a number of users, what is left or missing, what
may not be used. `draw_growth`: the bytes of batches of equal sequences over their length.

Assumes: budgets and sizes are those of `servelab.memory`; one device, or one rank of several that
hold the same.

Ignores: blocks and what engines add; tables beside the picture can say it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from servelab.explore.axes import LogAxes, decades, line
from servelab.explore.svg import (
    OWNERS,
    WIDTH,
    Drawing,
    Svg,
    box,
    fill,
    hover,
    picture,
    rule,
    text,
    wrapped,
)
from servelab.markup import element
from servelab.memory import Budget
from servelab.units import check_count, format_bytes, format_tokens, parse_bytes

_LEFT, _RIGHT = 4.0, WIDTH - 4
_BAR = 26.0
_MOST_SHOWN = 1.5  # a demand beyond this many devices is cut off, which is said
WEIGHTS, RESERVE, CACHE, MISSING = OWNERS[0], OWNERS[3], OWNERS[2], OWNERS[1]


def said_size(value: int, unit: str = "GiB") -> str:
    """Return a size in a unit, with more digits where it is less than one of it.

    >>> said_size(3 * 2**29), said_size(147456 * 128)
    ('1.50 GiB', '0.0176 GiB')
    """
    return format_bytes(value, unit, 2 if abs(value) >= _unit_bytes(unit) else 4)


def said_fit(left: Budget, sequence_bytes: int, users: int, unit: str = "GiB") -> list[str]:
    """Return the terms of a device's memory with ``users`` on it, each as a phrase.

    >>> said_fit(Budget(80, 72, 16, 2), sequence_bytes=10, users=3, unit="B")
    ['weights 16 B', 'reserve 2 B', 'caches 3 x 10 B = 30 B', 'left 24 B', 'not to be used 8 B']
    """
    need, room = users * sequence_bytes, left.available_bytes

    def size(value: int) -> str:
        return said_size(value, unit)

    rest = f"left {size(room - need)}" if need <= room else f"missing {size(need - room)}"
    return [
        f"weights {size(left.weight_bytes)}",
        f"reserve {size(left.reserve_bytes)}",
        f"caches {users:,} x {size(sequence_bytes)} = {size(need)}",
        rest,
        f"not to be used {size(left.device_bytes - left.usable_bytes)}",
    ]


def draw_fit(
    left: Budget,
    sequence_bytes: int,
    users: int,
    unit: str = "GiB",
    title: str = "Memory of the device",
) -> Svg:
    """Return the memory of a device with the caches of ``users`` on it.

    Parameters: ``left`` the device's budget, its terms weights and reserve; ``sequence_bytes`` of
    one user's cache on this device; ``unit`` as in ``format_bytes``.
    Returns: the picture; what does not fit stands beyond the dashed line, in a colour of its own.
    Raises: ``TypeError``, ``ValueError`` for bad counts or an unknown unit.

    >>> draw_fit(Budget(80, 72, 16, 2), sequence_bytes=10, users=3, unit="B")
    Memory of the device. Device 80 B, usable 72 B: weights 16 B, reserve 2 B, caches 3 x 10 ...
    """
    check_count("sequence_bytes", sequence_bytes, minimum=0)
    check_count("users", users, minimum=0)
    phrases = said_fit(left, sequence_bytes, users, unit)
    need = left.weight_bytes + left.reserve_bytes + users * sequence_bytes
    end = max(left.device_bytes, min(need, int(_MOST_SHOWN * left.device_bytes)))
    scale = (_RIGHT - _LEFT) / end
    # The caches are cut where the usable memory ends.
    edges = [0, left.weight_bytes, left.weight_bytes + left.reserve_bytes, need]
    body = ""
    for what, colour, start, stop in zip(
        phrases, (WEIGHTS, RESERVE, CACHE), edges, edges[1:], strict=False
    ):
        inside = min(stop, max(start, left.usable_bytes))
        for shade, a, b in ((colour, start, inside), (MISSING, inside, min(stop, end))):
            if b > a:
                bar = fill(_LEFT + a * scale, 12, (b - a) * scale, _BAR, [shade])
                body += element("g", hover(what) + bar)
    device, usable = _LEFT + left.device_bytes * scale, _LEFT + left.usable_bytes * scale
    body += box(_LEFT, 12, device - _LEFT, _BAR, heavy=True)
    body += rule(usable, 6, usable, 44, dashed=True)
    body += text(usable - 2, 9, f"usable {said_size(left.usable_bytes, unit)}", 9, anchor="end")
    body += text(device, 50, f"device {said_size(left.device_bytes, unit)}", 9, anchor="end")
    if need > end:
        body += text(_RIGHT, 9, "goes on", 9, anchor="end")
    words = (
        f"Device {said_size(left.device_bytes, unit)}, "
        f"usable {said_size(left.usable_bytes, unit)}: {', '.join(phrases)}."
    )
    missing = users * sequence_bytes > left.available_bytes
    colours = (WEIGHTS, RESERVE, CACHE, MISSING if missing else None, None)
    return picture(title, [Drawing(body, 54, words), _key(phrases, colours)])


def _key(phrases: Sequence[str], colours: Sequence[str | None]) -> Drawing:
    """Return the terms below each other, each with its colour."""
    body, y = "", 0.0
    for said, colour in zip(phrases, colours, strict=True):
        body += fill(5, y + 2, 10, 10, [colour]) if colour else box(5, y + 2, 10, 10)
        for part in wrapped(said, WIDTH - 30, 10):
            body += text(21, y + 11, part, 10)
            y += 14
    return Drawing(body, y, "")


def draw_growth(
    size_bytes: Callable[[int], int],
    lengths: Sequence[int],
    batches: Sequence[int],
    unit: str = "GiB",
    room_bytes: int | None = None,
    title: str = "KV cache of a batch",
) -> Svg:
    """Return the bytes that batches of equal sequences hold over the sequences' length.

    Parameters: ``size_bytes`` of one sequence of that many tokens; ``lengths`` in tokens,
    ``batches`` in sequences, from 1; ``unit`` as in ``format_bytes``; ``room_bytes`` that a cache
    may take (None: no line for it).
    Returns: the picture; its description says every size in it.
    Raises: ``TypeError``, ``ValueError`` for bad counts, an empty row, a cache without bytes, or an
    unknown unit.

    >>> draw_growth(lambda tokens: 2048 * tokens, [1024, 2048], [1, 4], "MiB")
    KV cache of a batch. Batch 1: 2 MiB at 1K tokens, 4 MiB at 2K tokens. Batch 4: 8 MiB at ...
    """
    lengths = sorted({check_count("length", tokens) for tokens in lengths})
    batches = sorted({check_count("batch", batch) for batch in batches})
    if not lengths or not batches:
        raise ValueError(f"a chart needs lengths and batches, got {lengths} and {batches}")
    sizes = {(b, t): b * size_bytes(t) for b in batches for t in lengths}
    least, most = min(sizes.values()), max(sizes.values())
    if least < 1:
        raise ValueError("there is nothing to draw: a sequence caches no bytes")
    if room_bytes is not None and room_bytes > 0:
        least, most = min(least, room_bytes), max(most, room_bytes)
    one = _unit_bytes(unit)
    y_low = 10.0 ** math.floor(math.log10(least / one * 0.99))
    y_high = 10.0 ** math.ceil(math.log10(most / one * 1.2))
    single = len(lengths) == 1  # a point needs room on both sides
    x_low, x_high = lengths[0] / (1 + single), lengths[-1] * (1 + single)
    axes = LogAxes(52, WIDTH - 72, 8, 190, x_low, x_high, y_low, y_high)
    body = axes.frame(
        [(t, format_tokens(t)) for t in lengths],
        [(value, f"{value:,g}") for value in decades(y_low, y_high)],
    )
    ends = []
    for place, batch in enumerate(batches):
        points = [(axes.x(t), axes.y(sizes[batch, t] / one)) for t in lengths]
        body += line(points, OWNERS[place % len(OWNERS)])
        body += "".join(fill(x - 2, y - 2, 4, 4, [OWNERS[place % len(OWNERS)]]) for x, y in points)
        ends.append((points[-1], f"batch {batch:,}"))
    said = _sizes(sizes, lengths, batches, unit)
    if room_bytes is not None and room_bytes > 0:
        y = axes.y(room_bytes / one)
        body += rule(axes.left, y, axes.right, y, dashed=True)
        ends.append(((axes.right, y), "room"))
        said += f" Room for the cache: {said_size(room_bytes, unit)}."
    body += _at_the_ends(ends, axes)
    body += text(4, 216, f"{unit} over tokens per sequence; both scales logarithmic", 9)
    return picture(title, [Drawing(body, 220, said)])


def _unit_bytes(unit: str) -> int:
    """Return the bytes of a unit that ``format_bytes`` knows."""
    format_bytes(0, unit)  # refuses an unknown one
    return parse_bytes(f"1 {unit}")


def _sizes(
    sizes: dict[tuple[int, int], int], lengths: list[int], batches: list[int], unit: str
) -> str:
    return " ".join(
        f"Batch {b:,}: "
        + ", ".join(f"{said_size(sizes[b, t], unit)} at {format_tokens(t)} tokens" for t in lengths)
        + "."
        for b in batches
    )


def _at_the_ends(ends: list[tuple[tuple[float, float], str]], axes: LogAxes) -> str:
    """Return the names of lines at their right ends, moved apart where they would touch.

    The lowest name stands beside its line and pushes the others up; if that leads out of the frame,
    all are set from its top downwards, and those that the frame cannot hold are left out.
    """
    ends = sorted(ends, key=lambda end: -end[0][1])
    places, taken = [], math.inf
    for (_, y), _said in ends:
        taken = min(y + 3, taken - 10)
        places.append(taken)
    if places[-1] < axes.top:
        above = axes.top - 3.0
        for turn in reversed(range(len(ends))):
            above = max(min(places[turn], ends[turn][0][1] + 3), above + 10)
            places[turn] = above
    body = ""
    for ((x, y), said), place in zip(ends, places, strict=True):
        if place <= axes.bottom + 12:
            body += text(axes.right + 5, place, said, 9)
            if abs(place - y - 3) > 1 or x < axes.right - 1:
                body += rule(x, y, axes.right + 4, place - 3)
    return body
