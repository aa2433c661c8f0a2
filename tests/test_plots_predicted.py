"""The figures of predictions show every point and every cause, where it belongs."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # after the choice of backend

from servelab.plots import predicted


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def test_points_stand_over_their_predictions_beside_the_line_of_equals() -> None:
    panels = {
        "bound": {"decode": [(1e-3, 2e-3), (4e-3, 5e-3)], "published": [(2e-2, 3e-2)]},
        "calibrated": {"decode": [(2.1e-3, 2e-3)]},
    }
    figure = predicted.one_to_one(panels, "bound", "measured")
    for axes, (title, groups) in zip(figure.axes, panels.items(), strict=True):
        line, *series = axes.lines
        assert list(line.get_xdata()) == list(line.get_ydata())
        for points, own in zip(series, groups.values(), strict=True):
            assert list(zip(points.get_xdata(), points.get_ydata(), strict=True)) == own
        assert axes.get_title(loc="left") == title
        assert axes.get_xlim() == axes.get_ylim() == figure.axes[0].get_xlim()
    published = figure.axes[0].lines[2]
    assert published.get_markerfacecolor() == "white"  # not by colour alone: also a marker


@pytest.mark.parametrize("panels", [{}, {"one": {}}, {"one": {"a": []}}, {"one": {"a": [(0, 1)]}}])
def test_what_cannot_be_drawn_is_refused(panels: dict[str, dict[str, list[tuple[float, float]]]]):
    with pytest.raises(ValueError, match=r"needs a point|must be positive"):
        predicted.one_to_one(panels)


def test_bars_are_shares_that_add_up() -> None:
    causes = dict.fromkeys(predicted._CAUSES, 1e-3)
    figure = predicted.attribution({"a": causes, "b": {**causes, "sampling": 2e-3}})
    bars = figure.axes[0].patches
    assert len(bars) == 2 * len(causes)
    for row, own in enumerate((causes, {**causes, "sampling": 2e-3})):
        mine = [bar for bar in bars if round(bar.get_y() + bar.get_height() / 2) == row]
        assert sum(bar.get_width() for bar in mine) == pytest.approx(100)
        wanted = [100 * seconds / sum(own.values()) for seconds in own.values()]
        assert [bar.get_width() for bar in mine] == pytest.approx(wanted)
    assert len({bar.get_facecolor() for bar in bars}) == len(causes)
    with pytest.raises(ValueError, match="known causes"):
        predicted.attribution({"a": {"the moon": 1.0}})
    with pytest.raises(ValueError, match="known causes"):
        predicted.attribution({})
