"""The roofline figure: what a chip allows at each intensity, and where operators stand.

Models: roofs from data sheets (solid) and from measurements (dashed); below them operators, each
placed by its `Cost`: open on the roof, where it may come at best, or filled at the rate it reached.

Assumes: intensity over the device memory, reads and writes; the first roof is the one that open
points stand on and whose ridge is marked.

Ignores: roofs of caches and of other number formats than those asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from servelab.hardware import Accelerator
from servelab.plots.style import COLORS, CYCLE, MARKERS, styled
from servelab.roofline import Cost, attainable
from servelab.units import format_bandwidth, format_flop_rate


@dataclass(frozen=True)
class Roof:
    """A chip at one dtype; ``measured`` draws it dashed."""

    chip: Accelerator
    dtype: str
    measured: bool = False


@dataclass(frozen=True)
class Point:
    """An operator of a step; ``seconds`` where it was timed, None for the most the roof allows."""

    operator: str
    step: str
    cost: Cost
    seconds: float | None = None

    def rate(self, roof: Roof) -> float:
        """Return the FLOP/s reached, or the most that ``roof`` allows."""
        if self.seconds is not None:
            return self.cost.flop / self.seconds
        return attainable(self.cost.intensity, roof.chip, roof.dtype)


def roofline(roofs: Sequence[Roof], points: Sequence[Point] = ()) -> Figure:
    """Return the figure: roofs above, and below them one row per operator on the same axis.

    Raises: ``ValueError`` without a roof, or for a dtype that a chip lacks.

    >>> from servelab import hardware, roofline as costs
    >>> down = Point("down_proj", "64 rows", costs.matmul(64, 12288, 4096))
    >>> len(roofline([Roof(hardware.get("l4"), "bf16")], [down]).axes)
    2
    """
    if not roofs:
        raise ValueError("a roofline needs at least one roof, got none")
    intensities = [point.cost.intensity for point in points]
    ridges = [roof.chip.ridge(roof.dtype) for roof in roofs]
    limits = (min([1.0, *intensities]) / 3, max([*ridges, *intensities]) * 5)
    operators = list(dict.fromkeys(point.operator for point in points))
    heights = [3.6, 0.3 + 0.36 * len(operators)] if points else [3.6]
    with styled():
        figure, grid = plt.subplots(
            len(heights),
            figsize=(6.2, 0.6 + sum(heights)),
            height_ratios=heights,
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        axes = list(grid[:, 0])
        axes[0].set(xscale="log", yscale="log", xlim=limits, ylabel="attainable rate (FLOP/s)")
        axes[-1].set_xlabel("intensity (FLOP per byte)")
        axes[0].margins(y=0.09)
        for index, roof in enumerate(roofs):
            _draw_roof(axes[0], roof, index, limits)
        for index, step in enumerate(dict.fromkeys(point.step for point in points)):
            here = [point for point in points if point.step == step]
            _draw_step(axes, here, operators, index, roofs[0])
        if points:
            axes[0].legend(loc="upper left", handletextpad=0.2, labelspacing=0.7)
            axes[1].set_yticks(range(len(operators)), operators)
            axes[1].set_ylim(len(operators) - 0.4, -0.6)  # the first operator on top
        _mark_ridge(axes, roofs[0])
        figure.draw_without_rendering()  # only the layout tells how steep a slope is on paper
        for index, roof in enumerate(roofs):
            if roof.chip not in [earlier.chip for earlier in roofs[:index]]:  # one slope a chip
                _label_slope(axes[0], roof, index, limits)
    return figure


def _roof_color(index: int) -> str:
    """Return black for the roof that points stand on, and colours of their own for the others."""
    return [COLORS["black"], *CYCLE][index % (len(CYCLE) + 1)]


def _draw_roof(axis: Axes, roof: Roof, index: int, limits: tuple[float, float]) -> None:
    knee = roof.chip.ridge(roof.dtype)
    x = [limits[0], knee, limits[1]]
    y = [attainable(intensity, roof.chip, roof.dtype) for intensity in x]
    axis.plot(x, y, linestyle="--" if roof.measured else "-", color=_roof_color(index))
    axis.annotate(
        f"{roof.chip.label}, {roof.dtype}: {format_flop_rate(y[-1])}",
        (limits[1], y[-1]),
        xytext=(-2, 4 if roof.measured else 8),  # open points may stand on a data sheet's roof
        textcoords="offset points",
        ha="right",
        color=_roof_color(index),
        fontsize=9.5,
    )


def _mark_ridge(axes: Sequence[Axes], roof: Roof) -> None:
    """Draw the ridge from its roof down through the rows of operators."""
    ridge = roof.chip.ridge(roof.dtype)
    low, high = axes[0].get_ylim()
    line: dict[str, Any] = {"color": COLORS["neutral"], "linestyle": ":", "linewidth": 1.4}
    axes[0].vlines(ridge, low, roof.chip.peak(roof.dtype), **line)
    for axis in axes[1:]:
        axis.axvline(ridge, **line)
    axes[0].set_ylim(low, high)
    axes[0].annotate(
        f"ridge {ridge:.3g}",
        (ridge, low),
        xytext=(4, 5),
        textcoords="offset points",
        color=COLORS["neutral"],
    )


def _label_slope(axis: Axes, roof: Roof, index: int, limits: tuple[float, float]) -> None:
    """Write the bandwidth along the slope, just below it."""
    x = math.sqrt(limits[0] * roof.chip.ridge(roof.dtype))  # the middle of the slope
    y = attainable(x, roof.chip, roof.dtype)
    here, further = axis.transData.transform([(x, y), (2 * x, 2 * y)])
    axis.annotate(
        format_bandwidth(roof.chip.bandwidth_bytes_per_second),
        (x, y),
        xytext=(4, -11),
        textcoords="offset points",
        rotation=math.degrees(math.atan2(further[1] - here[1], further[0] - here[0])),
        rotation_mode="anchor",
        color=_roof_color(index),
        fontsize=9.5,
    )


def _draw_step(
    axes: Sequence[Axes], points: Sequence[Point], operators: list[str], index: int, roof: Roof
) -> None:
    """Draw the operators of one step above, at their rate, and below, each in its row."""
    color = CYCLE[(index + 1) % len(CYCLE)]
    dodge = 0.2 * (index - 1)  # where steps coincide, all of them show
    timed = all(point.seconds is not None for point in points)
    x = [point.cost.intensity for point in points]
    for axis, y in (
        (axes[0], [point.rate(roof) for point in points]),
        (axes[1], [operators.index(point.operator) + dodge for point in points]),
    ):
        axis.plot(
            x,
            y,
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            markersize=max(12 - 2.5 * index, 5),  # the same: later ones stand inside earlier ones
            markeredgewidth=1.8,
            markeredgecolor=color,
            markerfacecolor=color if timed else "none",
            label=points[0].step,
            clip_on=False,
            zorder=3,
        )
