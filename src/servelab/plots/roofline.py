"""The roofline figure: what a chip allows at each intensity, and where operators stand.

Models: roofs from data sheets (solid) and from measurements (dashed); operators, each placed by
its `Cost`: open on the roof, where it may come at best, or filled at the rate it reached. Several
operators get a row each below the roofs, by step; of a single one the steps are named on the spot.

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
    """Return the figure: roofs, operators on or below them, and a row for each operator.

    Raises: ``ValueError`` without a roof, or for a dtype that a chip lacks.

    >>> from servelab import hardware, roofline as costs
    >>> up, down = costs.matmul(64, 4096, 12288), costs.matmul(64, 12288, 4096)
    >>> points = [Point("up_proj", "64 rows", up), Point("down_proj", "64 rows", down)]
    >>> len(roofline([Roof(hardware.get("l4"), "bf16")], points).axes)
    2
    """
    if not roofs:
        raise ValueError("a roofline needs at least one roof, got none")
    intensities = [point.cost.intensity for point in points]
    ridges = [roof.chip.ridge(roof.dtype) for roof in roofs]
    limits = (min([1.0, *intensities]) / 3, max([*ridges, *intensities]) * 5)
    operators = list(dict.fromkeys(point.operator for point in points))
    heights = [3.6, 0.3 + 0.36 * len(operators)] if len(operators) > 1 else [3.6]
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
        axes[0].set(xscale="log", yscale="log", xlim=limits, ylabel="rate (FLOP/s)")
        axes[-1].set_xlabel("intensity (FLOP per byte)")
        axes[0].margins(y=0.09)
        for index, roof in enumerate(roofs):
            _draw_roof(axes[0], roof, index, limits, alone=len(roofs) == 1)
        if len(operators) > 1:
            _draw_steps(axes, points, operators, roofs[0])
        elif points:
            _draw_series(axes[0], points, roofs[0])
        _mark_ridge(axes, roofs[0])
        if len(roofs) > 1:  # roofs may lie too close together for words along them
            figure.legend(loc="outside upper left")
        else:
            figure.draw_without_rendering()  # only the layout tells how steep a slope is on paper
            _label_slope(axes[0], roofs[0], limits)
    return figure


def _roof_color(index: int) -> str:
    """Return black for the roof that points stand on, and colours of their own for the others."""
    return [COLORS["black"], *CYCLE][index % (len(CYCLE) + 1)]


def _draw_roof(
    axis: Axes, roof: Roof, index: int, limits: tuple[float, float], alone: bool
) -> None:
    knee = roof.chip.ridge(roof.dtype)
    x = [limits[0], knee, limits[1]]
    y = [attainable(intensity, roof.chip, roof.dtype) for intensity in x]
    dash, color = "--" if roof.measured else "-", _roof_color(index)
    peak, bandwidth = format_flop_rate(y[-1]), roof.chip.bandwidth_bytes_per_second
    if not alone:
        name = f"{roof.chip.label}, {roof.dtype}: {peak}, {format_bandwidth(bandwidth)}"
        axis.plot(x, y, linestyle=dash, color=color, label=name)
        return
    axis.plot(x, y, linestyle=dash, color=color)
    axis.annotate(
        f"{roof.chip.label}, {roof.dtype}: {peak}",
        (limits[1], y[-1]),
        xytext=(-2, 4 if roof.measured else 8),  # open points may stand on a data sheet's roof
        textcoords="offset points",
        ha="right",
        color=color,
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


def _label_slope(axis: Axes, roof: Roof, limits: tuple[float, float]) -> None:
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
        color=_roof_color(0),
        fontsize=9.5,
    )


def _draw_series(axis: Axes, points: Sequence[Point], roof: Roof) -> None:
    """Draw the steps of one operator, each with its name beside it."""
    for point in points:
        x, y = point.cost.intensity, point.rate(roof)
        axis.plot(x, y, "o", clip_on=False, zorder=3, **_marker(point, CYCLE[2]))
        axis.annotate(
            point.step,
            (x, y),
            xytext=(5, -13),
            textcoords="offset points",
            color=CYCLE[2],
            fontsize=9.5,
        )


def _draw_steps(
    axes: Sequence[Axes], points: Sequence[Point], operators: list[str], roof: Roof
) -> None:
    """Draw the operators of each step above, at their rate, and below, each in its row."""
    for index, step in enumerate(dict.fromkeys(point.step for point in points)):
        here = [point for point in points if point.step == step]
        color = CYCLE[(index + 1) % len(CYCLE)]
        dodge = 0.2 * (index - 1)  # where steps coincide, all of them show
        size = max(12 - 2.5 * index, 5)  # the same: later ones stand inside earlier ones
        x = [point.cost.intensity for point in here]
        for axis, y in (
            (axes[0], [point.rate(roof) for point in here]),
            (axes[1], [operators.index(point.operator) + dodge for point in here]),
        ):
            axis.plot(
                x,
                y,
                MARKERS[index % len(MARKERS)],
                markersize=size,
                label=step,
                clip_on=False,
                zorder=3,
                **_marker(here[0], color),
            )
    axes[0].legend(loc="upper left", handletextpad=0.2, labelspacing=0.7)
    axes[1].set_yticks(range(len(operators)), operators)
    axes[1].set_ylim(len(operators) - 0.4, -0.6)  # the first operator on top


def _marker(point: Point, color: str) -> dict[str, Any]:
    """Return the look of a marker: filled where the point was timed, open where it is a bound."""
    face = "none" if point.seconds is None else color
    return {"markeredgecolor": color, "markerfacecolor": face, "markeredgewidth": 1.8}
