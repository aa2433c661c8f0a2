"""The figures of measurements show every record, where it belongs, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import matplotlib
import pytest

from servelab.logs import published
from servelab.units import GiB

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # after the choice of backend

from servelab.plots import measured


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


GROUPS = {"first": [0.7, 0.2, 0.5, 0.5], "second": [0.9]}


def test_strip_shows_each_fraction_and_the_median_in_its_row() -> None:
    [axes] = measured.achieved_strip(GROUPS).axes
    dots, bars = axes.lines[0:4:2], axes.lines[1:4:2]
    for row, (dot, bar, fractions) in enumerate(zip(dots, bars, GROUPS.values(), strict=True)):
        assert list(dot.get_xdata()) == sorted(fractions)
        assert all(abs(y - row) < 0.5 for y in dot.get_ydata())
        places = list(zip(dot.get_xdata(), dot.get_ydata(), strict=True))
        assert all(a != b for a, b in pairwise(places))  # equal fractions do not hide each other
        assert list(bar.get_xdata()) == ([0.5, 0.5] if row == 0 else [0.9, 0.9])
    assert axes.get_xlim()[1] > 1
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # from the top


@pytest.mark.parametrize("groups", [{}, {"empty": []}])
def test_strip_needs_fractions(groups: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="each group needs a fraction"):
        measured.achieved_strip(groups)


def test_scatter_shows_every_figure_on_the_side_of_its_verdict() -> None:
    panels = measured.computed_against_reported(published()).axes
    for axes, unit, scale in zip(panels, ("tokens", "bytes"), (1, GiB), strict=True):
        figures = [f for f in published() if f.unit == unit]
        line, follow, fail = axes.lines
        assert list(line.get_xdata()) == list(line.get_ydata())
        for points, agrees in ((follow, True), (fail, False)):
            wanted = [
                (f.reported / scale, f.computed / scale) for f in figures if f.agrees is agrees
            ]
            assert list(zip(points.get_xdata(), points.get_ydata(), strict=True)) == wanted
            assert wanted


def test_scatter_numbers_those_that_do_not_follow_over_both_panels() -> None:
    panels = measured.computed_against_reported(published()).axes
    wrong = [f for f in published() if not f.agrees]
    numbers = sorted(int(text.get_text()) for axes in panels for text in axes.texts)
    assert numbers == list(range(1, len(wrong) + 1))
    for axes, scale in zip(panels, (1, GiB), strict=True):
        for text in axes.texts:
            assert text.xy[0] == wrong[int(text.get_text()) - 1].reported / scale


def test_scatter_needs_both_units() -> None:
    with pytest.raises(ValueError, match="no figure in bytes"):
        measured.computed_against_reported([f for f in published() if f.unit == "tokens"])
