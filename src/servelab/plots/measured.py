"""Figures of calculators against the world: fractions of the bound, figures of engines' logs.

Models: nothing of its own. Fractions come from `servelab.roofline`, recomputed figures from
`servelab.logs`; these functions only draw them.

Assumes: the records are few enough to draw each one.

Ignores: records that stand apart; the caller leaves them out.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from servelab.logs import Published
from servelab.plots.style import COLORS, new_figure, styled
from servelab.units import GiB

_SPREAD = 0.26  # of a row's height, so that equal fractions do not hide each other


def achieved_strip(groups: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the fractions of the bound that were reached, a row per group, a bar at each median.

    Parameters: ``groups`` fractions by label, drawn from the top; none may be empty.
    Returns: the figure. Raises: ``ValueError`` where there is no group, or an empty one.

    >>> figure = achieved_strip({"one device": [0.5, 0.7], "eight devices": [0.3]})
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['one device', 'eight devices']
    """
    if not groups or not all(groups.values()):
        raise ValueError(f"each group needs a fraction, got {dict(groups)!r}")
    with styled():
        figure, (axes,) = new_figure(height_inches=1.1 + 0.46 * len(groups), width_inches=6.4)
        for row, fractions in enumerate(groups.values()):
            # neighbours in value lie on different lines, in the same order on any machine
            heights = [row + _SPREAD * (i % 3 - 1) for i in range(len(fractions))]
            heights = heights if len(fractions) > 1 else [row]
            axes.plot(
                sorted(fractions), heights, "o", color=COLORS["memory"], markeredgecolor="white",
                markersize=8,
            )  # fmt: skip
            middle = median(fractions)
            axes.plot([middle, middle], [row - 0.36, row + 0.36], color=COLORS["black"])
        axes.axvline(1, color=COLORS["accent"], linestyle="--")
        axes.annotate(
            "the bound", (1, -0.6), xytext=(-5, 0), textcoords="offset points", ha="right",
            va="center", color=COLORS["accent"],
        )  # fmt: skip
        axes.set_yticks(range(len(groups)), list(groups))
        axes.set_ylim(len(groups) - 0.5, -0.9)
        axes.set_xlim(0, 1.06)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("speed reached, as a fraction of the bound")
    return figure


def computed_against_reported(figures: Sequence[Published]) -> Figure:
    """Draw computed against reported figures on a line of equals: tokens left, bytes right.

    Figures that follow are dots, those that do not are crosses with a number, their place among
    the figures that do not follow.

    Parameters: ``figures`` at least one in tokens and one in bytes.
    Returns: the figure. Raises: ``ValueError`` where a panel would be empty.

    >>> from servelab.logs import published
    >>> panels = computed_against_reported(published()).axes
    >>> [panel.get_title(loc="left") for panel in panels]
    ['tokens that fit', 'bytes of a cache, GiB']
    """
    wrong = [figure for figure in figures if not figure.agrees]
    with styled():
        figure, panels = new_figure(columns=2, height_inches=3.6, width_inches=6.4)
        for axes, unit, scale, title in (
            (panels[0], "tokens", 1, "tokens that fit"),
            (panels[1], "bytes", GiB, "bytes of a cache, GiB"),
        ):
            shown = [f for f in figures if f.unit == unit]
            if not shown:
                raise ValueError(f"no figure in {unit} among {len(figures)}")
            axes.set_title(title, loc="left")
            _scatter(axes, shown, wrong, scale)
        panels[0].legend(loc="upper left")
    return figure


def _scatter(
    axes: Axes, shown: Sequence[Published], wrong: Sequence[Published], scale: int
) -> None:
    values = [v / scale for f in shown for v in (f.reported, f.computed)]
    ends = [min(values) / 3, max(values) * 3]
    axes.plot(ends, ends, color=COLORS["neutral"], linewidth=1.2, zorder=1)
    for agrees, marker, color, label in (
        (True, "o", COLORS["memory"], "follows"),
        (False, "X", COLORS["accent"], "does not"),
    ):
        points = [(f.reported / scale, f.computed / scale) for f in shown if f.agrees is agrees]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, marker, color=color, label=label, markeredgecolor="white", markersize=8)
    for number, figure in enumerate(wrong, start=1):
        if figure in shown:
            above = figure.computed > figure.reported
            axes.annotate(
                str(number), (figure.reported / scale, figure.computed / scale),
                xytext=(0, 7 if above else -8), textcoords="offset points",
                ha="center", va="bottom" if above else "top",
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set_xlabel("reported by the engine")
    axes.set_ylabel("computed")
