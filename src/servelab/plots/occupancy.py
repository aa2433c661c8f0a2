"""Figures of a cache's memory: what its slots are for, over time and on average.

Models: nothing of its own. Parts come from `servelab.allocation.layouts` and what
`servelab.allocation.fragmentation` measured; these functions only draw them.

Assumes: the parts of a bar add up to the whole, or are fewer because the source gives no more.

Ignores: parts too thin to write a number into; they are drawn without one.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from servelab.plots.style import COLORS, new_figure, styled

#: The parts in the order in which they are stacked, with colour, hatch and label.
_PARTS = {
    "held": (COLORS["kv"], "", "holds a token"),
    "reserved": (COLORS["attention"], "//", "reserved: its token will come"),
    "internal": (COLORS["activations"], "..", "internal: allocated, never used"),
    "rounding": ("#8C929B", "\\\\", "external: rest of a power of two"),
    "free": ("#E3E6EA", "", "external: free"),
    "external": ("#B8BDC4", "", "external and other"),
}
_THIN = 4.0  # percent: below it no number fits into a bar


def memory_maps(maps: Mapping[str, Sequence[Sequence[str]]], steps: int, slots: int) -> Figure:
    """Draw what each place of several caches is for, over time, a panel per cache.

    Parameters: ``maps`` by label, each a sequence of samples in time, a sample the part of every
    unit in order of address; ``steps`` between two samples; ``slots`` of a unit.
    Returns: the figure. Raises: ``ValueError`` where there is no cache or no sample.

    >>> figure = memory_maps({"paged": [["held", "free"], ["held", "held"]]}, steps=1, slots=16)
    >>> figure.axes[0].images[0].get_array().tolist()
    [[0, 0], [4, 0]]
    """
    if not maps or not all(maps.values()):
        raise ValueError("a map needs at least one cache and one sample of each")
    order = list(_PARTS)
    colors = ListedColormap([color for color, _, _ in _PARTS.values()])
    shown: set[str] = set()
    with styled():
        figure, panels = new_figure(columns=len(maps), height_inches=4.6)
        for axes, (label, samples) in zip(panels, maps.items(), strict=True):
            columns = [[order.index(part) for part in sample] for sample in samples]
            shown.update(part for sample in samples for part in sample)
            axes.imshow(
                list(zip(*columns, strict=True)),  # [units, samples]
                cmap=colors, vmin=-0.5, vmax=len(order) - 0.5, interpolation="nearest",
                origin="lower", aspect="auto",
                extent=(0, steps * len(samples), 0, slots * len(samples[0])),
            )  # fmt: skip
            axes.set_title(label)
            axes.set_xlabel("step")
            axes.grid(False)
            axes.label_outer()
        panels[0].set_ylabel("slot of the cache, by address")
        _legend(figure, [part for part in order if part in shown], hatched=False)
    return figure


def waste_bars(
    measured: Mapping[str, Mapping[str, float]], paper: Mapping[str, Mapping[str, float]]
) -> Figure:
    """Draw the parts of each cache as stacked bars, beside those of the paper where it has them.

    Parameters: ``measured`` and ``paper``: percent by part, by allocator. Parts that are not given
    are not drawn.
    Returns: the figure. Raises: ``ValueError`` where nothing was measured.

    >>> figure = waste_bars({"max": {"held": 20.0, "external": 80.0}}, {"max": {"held": 20.4}})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['20.0', '80.0', '20.4']
    """
    if not measured:
        raise ValueError("there is no allocator to draw")
    ticks, labels = [], []
    with styled():
        figure, (axes,) = new_figure(height_inches=4.6, width_inches=6.8)
        for place, (allocator, parts) in enumerate(measured.items()):
            for shift, name, source in (
                (-0.21, "here", parts),
                (0.21, "paper", paper.get(allocator, {})),
            ):
                if source:
                    _stack(axes, place + shift, source)
                    ticks.append(place + shift)
                    labels.append(name)
        axes.set_xticks(ticks, labels, minor=True)
        axes.set_xticks(range(len(measured)), [f"\n{allocator}" for allocator in measured])
        axes.tick_params(axis="x", which="both", length=0)
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, 100)
        axes.set_ylabel("share of the cache, %")
        used = {part for parts in (*measured.values(), *paper.values()) for part in parts}
        _legend(figure, [part for part in _PARTS if part in used])
    return figure


def _stack(axes: Axes, x: float, parts: Mapping[str, float]) -> None:
    bottom = 0.0
    for part in _PARTS:
        size = parts.get(part, 0.0)
        color, hatch, _ = _PARTS[part]
        if size:
            axes.bar(
                x, size, width=0.38, bottom=bottom, color=color, hatch=hatch, edgecolor="white",
                linewidth=0.6,
            )  # fmt: skip
        if size >= _THIN:
            axes.text(
                x, bottom + size / 2, f"{size:.1f}", ha="center", va="center", fontsize=9,
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
            )  # fmt: skip
        bottom += size


def _legend(figure: Figure, parts: Sequence[str], hatched: bool = True) -> None:
    handles = [
        Patch(
            facecolor=_PARTS[part][0],
            hatch=_PARTS[part][1] if hatched else "",
            edgecolor="white" if part != "free" else COLORS["light"],
            label=_PARTS[part][2],
        )
        for part in parts
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(3, len(handles)))


def block_size_trade(
    sizes: Sequence[int],
    unused: Mapping[str, Sequence[float]],
    entries: Sequence[int],
) -> Figure:
    """Draw what a block size costs: slots that stay empty on the left, table entries on the right.

    Parameters: ``sizes`` in tokens, ascending; ``unused`` percent of the allocated slots by label,
    the first drawn as points, further ones as lines; ``entries`` of a table at each size.
    Returns: the figure. Raises: ``ValueError`` where a series has another number of points.

    >>> figure = block_size_trade([8, 16], {"measured": [0.8, 1.6]}, entries=[128, 64])
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['allocated slots without a token', 'entries in a block table']
    """
    if any(len(series) != len(sizes) for series in (*unused.values(), entries)):
        raise ValueError(f"every series needs {len(sizes)} points")
    with styled():
        figure, (left, right) = new_figure(columns=2, height_inches=3.6)
        for place, (label, values) in enumerate(unused.items()):
            left.plot(
                sizes, values, ("o", "-", "--")[min(place, 2)], label=label,
                color=(COLORS["accent"], COLORS["memory"], COLORS["neutral"])[min(place, 2)],
                zorder=3 - place,
            )  # fmt: skip
        left.set_title("allocated slots without a token", loc="left")
        left.set_ylabel("% of the allocated slots")
        left.legend(loc="upper left")
        right.plot(sizes, entries, "s-", color=COLORS["memory"])
        right.set_title("entries in a block table", loc="left")
        right.set_yscale("log", base=2)
        right.set_yticks(entries, [f"{count:,}" for count in entries])
        right.yaxis.set_minor_locator(NullLocator())
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set_xlabel("block size, tokens (log scale)")
    return figure
