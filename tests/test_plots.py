"""Figures that place costs on roofs: what is drawn is what the calculator says."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest

from servelab import hardware
from servelab import roofline as costs
from servelab.plots.roofline import Point, Roof, roofline

H100, L4 = hardware.get("h100-sxm-80gb"), hardware.get("l4")
DOWN = costs.matmul(64, 12288, 4096)


def test_a_roof_bends_at_the_ridge_and_a_measured_one_is_dashed() -> None:
    figure = roofline([Roof(H100, "bf16"), Roof(L4, "bf16", measured=True)])
    spec, measured = figure.axes[0].get_lines()[:2]
    x, y = spec.get_data()
    assert x[1] == H100.ridge("bf16")
    assert list(y[1:]) == pytest.approx([H100.peak("bf16")] * 2)
    assert y[0] == pytest.approx(x[0] * H100.bandwidth_bytes_per_second)
    assert (spec.get_linestyle(), measured.get_linestyle()) == ("-", "--")
    plt.close(figure)


def test_a_point_stands_on_the_roof_or_at_the_rate_it_reached() -> None:
    seconds = DOWN.flop / 1e14
    points = [Point("down_proj", "bound", DOWN), Point("down_proj", "timed", DOWN, seconds)]
    figure = roofline([Roof(H100, "bf16")], points)
    (axis,) = figure.axes
    bound, timed = (line for line in axis.get_lines() if len(line.get_xdata()) == 1)
    assert bound.get_xdata()[0] == DOWN.intensity
    assert bound.get_ydata()[0] == costs.attainable(DOWN.intensity, H100, "bf16")
    assert timed.get_ydata()[0] == pytest.approx(1e14)
    assert bound.get_markerfacecolor() == "none"
    assert timed.get_markerfacecolor() == timed.get_markeredgecolor()
    assert {"bound", "timed"} <= {text.get_text() for text in axis.texts}
    plt.close(figure)


def test_every_operator_has_its_row_and_markers_differ_by_step() -> None:
    points = [
        Point(operator, step, costs.matmul(rows, 4096, 4096))
        for step, rows in (("1 row", 1), ("64 rows", 64))
        for operator in ("qkv_proj", "o_proj")
    ]
    figure = roofline([Roof(H100, "bf16")], points)
    rows = figure.axes[1]
    assert [label.get_text() for label in rows.get_yticklabels()] == ["qkv_proj", "o_proj"]
    markers = [line.get_marker() for line in rows.get_lines() if len(line.get_xdata()) == 2]
    assert {"o", "s"} <= set(markers)
    assert figure.get_facecolor() == (1, 1, 1, 1), "the figure must be opaque on a dark page"
    plt.close(figure)


def test_a_figure_needs_a_roof_and_a_dtype_that_the_chip_has() -> None:
    with pytest.raises(ValueError, match="at least one roof"):
        roofline([])
    with pytest.raises(ValueError, match="no peak rate for 'fp4'"):
        roofline([Roof(H100, "fp4")])
