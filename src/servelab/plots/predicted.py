"""Figures of predictions held against measurements: on a line of equals, and taken apart.

Models: nothing of its own. Times come from `servelab.measure` and `servelab.serving`; these
functions only draw them.

Assumes: seconds, all of them positive.

Ignores: where a prediction comes from; titles and labels say it.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from servelab.plots.style import COLORS, CYCLE, MARKERS, new_figure, styled
from servelab.units import format_seconds

Points = Sequence[tuple[float, float]]  # predicted and measured seconds

_CAUSES = {
    "bound of the matrices": COLORS["weights"],
    "bound of attention": COLORS["kv"],
    "matrices above it": "#8CC3E8",
    "gathered copy": COLORS["attention"],
    "attention, besides": "#9BD8C2",
    "norms, rotation, gates": COLORS["activations"],
    "sampling": COLORS["black"],
    "staging, bookkeeping": COLORS["neutral"],
    "not accounted for": "#E3E6EA",
}


def one_to_one(
    panels: Mapping[str, Mapping[str, Points]],
    predicted: str = "predicted",
    measured: str = "measured",
) -> Figure:
    """Draw (predicted, measured) times on logarithmic axes with the line of equals, a panel each.

    Parameters: ``panels`` groups of points by title and name; ``predicted``, ``measured`` words for
    the axes.
    Returns: the figure. Raises: ``ValueError`` for no panel, a panel without points, or a time that
    is not positive.

    >>> figure = one_to_one({"steps": {"decode": [(1e-3, 2e-3)], "prefill": [(1e-2, 1.2e-2)]}})
    >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    ['as predicted', 'decode', 'prefill']
    """
    everything = [time for groups in panels.values() for points in groups.values()
                  for pair in points for time in pair]  # fmt: skip
    if not panels or not all(any(groups.values()) for groups in panels.values()):
        raise ValueError("every panel needs a point")
    if min(everything) <= 0:
        raise ValueError(f"times must be positive, got {min(everything)}")
    ends = [min(everything) / 2, max(everything) * 2]
    with styled():
        height = 4.3 if len(panels) > 1 else 4.8
        figure, axes = new_figure(len(panels), height, 7.2 if len(panels) > 1 else 5.6)
        for panel, (title, groups) in zip(axes, panels.items(), strict=True):
            _panel(panel, groups, ends)
            panel.set_title(title, loc="left")
            panel.set_xlabel(predicted)
            panel.legend(loc="lower right")  # nothing is faster than its bound
        axes[0].set_ylabel(measured)
    return figure


def _panel(axes: Axes, groups: Mapping[str, Points], ends: list[float]) -> None:
    axes.plot(ends, ends, color=COLORS["neutral"], linewidth=1.2, label="as predicted", zorder=1)
    for number, (name, points) in enumerate(groups.items()):
        hollow = name.startswith("published")
        color = CYCLE[number % len(CYCLE)]
        axes.plot(
            [x for x, _ in points], [y for _, y in points], MARKERS[number % len(MARKERS)],
            color=color, label=name, markersize=7,
            markerfacecolor="white" if hollow else color,
            markeredgecolor=color if hollow else "white",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: format_seconds(value, digits=1))


def attribution(steps: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the shares of each step's time by cause, a bar per step, bounds first.

    Parameters: ``steps`` seconds by cause (`servelab.measure.causes`), by label. A negative share,
    of parts that take longer alone than together, is drawn as none.
    Returns: the figure. Raises: ``ValueError`` where there is no step, or a cause is unknown.

    >>> figure = attribution({"one": {"bound of the matrices": 1e-3, "sampling": 1e-3}})
    >>> [round(bar.get_width()) for bar in figure.axes[0].patches]
    [50, 50]
    """
    named = {cause for took in steps.values() for cause in took}
    if not steps or not named <= set(_CAUSES):
        raise ValueError(f"steps must be of known causes, got {sorted(named - set(_CAUSES))}")
    with styled():
        figure, (axes,) = new_figure(height_inches=2.0 + 0.5 * len(steps))
        for row, took in enumerate(steps.values()):
            left, whole = 0.0, sum(took.values())
            for cause, seconds in took.items():
                share = 100 * max(0.0, seconds) / whole
                axes.barh(
                    row, share, left=left, height=0.62, color=_CAUSES[cause],
                    edgecolor="white", hatch="///" if cause.startswith("bound") else None,
                    label=cause if row == 0 else None,
                )  # fmt: skip
                left += share
        labels = [f"{name}\n{format_seconds(sum(took.values()))}" for name, took in steps.items()]
        axes.set_yticks(range(len(steps)), labels)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("per cent of the step")
        axes.set_xlim(left=0)
        figure.legend(loc="outside upper center", ncols=3)
    return figure
