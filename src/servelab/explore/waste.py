"""Where the slots of a cache go under several allocators, as bars below each other.

Models: one bar per allocator, its slots split into the parts of an `Occupancy`: held, reserved,
internal and external (rounding and free together). The parts differ in shape and not only in
colour: held fills the bar, reserved half of it, internal a quarter; external is empty.
`occupancies` gives the same sequences to each allocator, one after another into an empty cache.

Assumes: all caches have equally many slots.

Ignores: how an allocator came to its state: regions freed and taken over time lie less well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servelab.allocation.layouts import (
    RESERVATIONS,
    CacheLayout,
    ContiguousCache,
    Occupancy,
    PagedCache,
)
from servelab.explore.pool import counted
from servelab.explore.svg import (
    NEUTRAL,
    PARTS,
    WIDTH,
    Drawing,
    Svg,
    box,
    fill,
    hover,
    picture,
    text,
    text_width,
)
from servelab.markup import element, number
from servelab.units import check_fields, format_count

# Of each part that is drawn: its colour, and the share of the bar's height that it fills.
_DRAWN = {
    "held": (PARTS["decode"], 1.0),
    "reserved": (PARTS["prefill"], 0.5),
    "internal": (NEUTRAL, 0.25),
}
_PARTS = (*_DRAWN, "external")
_BAR, _PITCH = 14.0, 38.0


@dataclass(frozen=True)
class Load:
    """A sequence that runs: its prompt, the output it will have, and its tokens at present.

    Raises: ``TypeError``, ``ValueError`` for counts below 1, and present tokens that are fewer than
    the prompt's or more than it will have.
    """

    prompt_tokens: int
    output_tokens: int
    num_tokens: int

    def __post_init__(self) -> None:
        check_fields(self, "prompt_tokens", "output_tokens", "num_tokens")
        most = self.prompt_tokens + self.output_tokens
        if not self.prompt_tokens <= self.num_tokens <= most:
            raise ValueError(
                f"num_tokens must be from {self.prompt_tokens} to {most}, got {self.num_tokens}"
            )


@dataclass(frozen=True)
class Fit:
    """What an allocator made of some sequences: how many ``fit``, and where its slots are then."""

    fit: int
    occupancy: Occupancy


def occupancies(
    loads: Sequence[Load], num_blocks: int, block_size: int, max_tokens: int
) -> dict[str, Fit]:
    """Return what each allocator makes of the same sequences in a cache of the same size.

    Parameters: ``loads`` in order of arrival; ``num_blocks`` without the null block;
    ``max_tokens`` a sequence may have, which "max" reserves.
    Returns: the three that reserve one region, then "paged" without any sharing, by name.
    Raises: ``TypeError``, ``ValueError`` for counts below 1, and a load beyond ``max_tokens``.

    >>> fits = occupancies([Load(30, 10, 34), Load(5, 9, 8)], 16, 8, max_tokens=64)
    >>> [(name, fit.fit, fit.occupancy.held) for name, fit in fits.items()]
    [('max', 2, 42), ('power-of-two', 2, 42), ('oracle', 2, 42), ('paged', 2, 42)]
    >>> fits["max"].occupancy.internal, fits["paged"].occupancy.internal
    (74, 6)
    """
    caches: dict[str, CacheLayout] = {
        policy: ContiguousCache(num_blocks, block_size, policy, max_tokens)
        for policy in RESERVATIONS
    }
    caches["paged"] = PagedCache(num_blocks, block_size, watermark=0)
    return {name: _filled(cache, loads) for name, cache in caches.items()}


def _filled(cache: CacheLayout, loads: Sequence[Load]) -> Fit:
    fit = 0
    for load in loads:
        if load.prompt_tokens + load.output_tokens > cache.num_slots:
            continue
        sequence = cache.admit(load.prompt_tokens, load.output_tokens)
        if sequence is None:
            continue
        grown = load.num_tokens - load.prompt_tokens
        if grown and not cache.grow(sequence, grown):
            cache.release(sequence)
        else:
            fit += 1
    return Fit(fit, cache.occupancy())


def draw_waste(
    fits: Mapping[str, Fit], wanted: int, title: str = "The same sequences, four ways to hold them"
) -> Svg:
    """Return a picture of caches side by side, each with the same ``wanted`` sequences to hold.

    >>> draw_waste({"paged": Fit(1, Occupancy(6, 0, 2, 0, 8))}, wanted=1)
    The same sequences, four ways to hold them. paged: 6 held, 2 internal, 8 external;
    1 of 1 sequence fits.
    """
    body, said = [], []
    for place, (name, fit) in enumerate(fits.items()):
        fits_of = f"{fit.fit} of {counted(wanted, 'sequence')} fit{'s' * (wanted == 1)}"
        if not wanted:
            fits_of = "no sequence to hold"
        words = f"{name}: {_words(fit)}; {fits_of}"
        row = hover(words) + text(4, 9, name, 10, weight="bold")
        row += text(4 + text_width(name, 10.5) + 8, 9, fits_of, 9)
        row += element("g", _bar(fit.occupancy), transform="translate(4 12)")
        body.append(element("g", row, transform=f"translate(0 {number(place * _PITCH)})"))
        said.append(words)
    bars = Drawing("".join(body), _PITCH * len(fits), "; ".join(said) + ".")
    return picture(title, [bars, _legend()])


def _words(fit: Fit) -> str:
    sizes = ((part, getattr(fit.occupancy, part)) for part in _PARTS)
    return ", ".join(f"{format_count(size)} {part}" for part, size in sizes if size)


def _bar(occupancy: Occupancy) -> str:
    """Return a bar over the width of the picture, its numbers below it where they have room."""
    scale, x, body = (WIDTH - 8) / occupancy.total, 0.0, []
    for part in _PARTS:
        width = getattr(occupancy, part) * scale
        if part in _DRAWN and width:
            body.append(_part(part, x, max(width - 0.8, 0.8)))
        said = format_count(getattr(occupancy, part))
        if width > text_width(said, 9) + 2:
            body.append(text(x + width / 2, _BAR + 8.5, said, 9, anchor="middle"))
        x += width
    return "".join(body) + box(0, 0, WIDTH - 8, _BAR)


def _part(part: str, x: float, width: float) -> str:
    colour, share = _DRAWN[part]
    return fill(x, _BAR * (1 - share), width, _BAR * share, [colour])


def _legend() -> Drawing:
    x, body = 4.0, []
    for part in _PARTS:
        swatch = _part(part, 0, 16) if part in _DRAWN else ""
        swatch += box(0, 0, 16, _BAR) + text(21, 10.5, part, 9)
        body.append(element("g", swatch, transform=f"translate({number(x)} 2)"))
        x += 21 + text_width(part, 9) + 14
    return Drawing("".join(body), _BAR + 4, "")
