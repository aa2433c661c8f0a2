"""Figures of a service that is being sized: what its users see against what its chips yield.

Models: nothing of its own. Points come from `servelab.simulation.service`; this only draws them.

Assumes: seconds in, milliseconds on the axis.

Ignores: which setting made a point: labels and the caption say it.
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from servelab.plots.style import COLORS, CYCLE, MARKERS, new_figure, styled
from servelab.simulation import Point, pareto_front


def latency_throughput(points: Mapping[str, Sequence[Point]]) -> Figure:
    """Draw operating points, and the front of those that no other beats.

    Parameters: ``points`` by label, drawn hollow where the pool was full.
    Returns: the figure. Raises: ``ValueError`` for no points.

    >>> from servelab import hardware, models
    >>> from servelab.simulation import Replica
    >>> one = Replica(models.get("qwen3-8b"), hardware.get("l4"))
    >>> figure = latency_throughput({"a": [Point(one, 0.05, 20.0, False)]})
    >>> [float(x) for x in figure.axes[0].lines[0].get_xdata()]
    [50.0]
    """
    every = [point for series in points.values() for point in series]
    if not every:
        raise ValueError("there is no point to draw")
    with styled():
        figure, (axes,) = new_figure(height_inches=4.4)
        front = pareto_front(every)
        axes.step(
            [1e3 * point.tpot_seconds for point in front],
            [point.tokens_per_second for point in front],
            where="post", color=COLORS["light"], linewidth=6, zorder=1, label="front",
        )  # fmt: skip
        for place, (label, series) in enumerate(points.items()):
            color, marker = CYCLE[place], MARKERS[place]
            for full in (False, True):
                chosen = [point for point in series if point.is_full == full]
                if not chosen:
                    continue
                axes.plot(
                    [1e3 * point.tpot_seconds for point in chosen],
                    [point.tokens_per_second for point in chosen],
                    linestyle="none", marker=marker, color=color,
                    markerfacecolor="white" if full else color,
                    label=f"{label}, memory full" if full else label,
                )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axis.set_minor_locator(NullLocator())
        axes.set_xlabel("TPOT, median, ms (log scale)")
        axes.set_ylabel("output tokens/s per chip (log scale)")
        axes.legend(loc="lower left")
    return figure
