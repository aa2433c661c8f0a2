"""The figure of operating points draws them where they are, and the front through the best."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest

from servelab import hardware, models
from servelab.plots import sizing
from servelab.simulation import Point, Replica

ONE = Replica(models.get("qwen3-8b"), hardware.get("l4"))


def test_points_are_drawn_full_and_hollow_and_the_front_leaves_the_beaten_out() -> None:
    best, beaten, full = Point(ONE, 0.01, 50.0, False), Point(ONE, 0.02, 40.0, False), Point(
        ONE, 0.03, 90.0, True
    )  # fmt: skip
    figure = sizing.latency_throughput({"a": [best, full], "b": [beaten]})
    (axes,) = figure.axes
    front, *drawn = axes.lines
    assert list(front.get_xdata()) == pytest.approx([10, 30])
    assert list(front.get_ydata()) == pytest.approx([50, 90])
    labels = {line.get_label(): line for line in drawn}
    assert set(labels) == {"a", "a, memory full", "b"}
    assert labels["a, memory full"].get_markerfacecolor() == "white"
    assert labels["a"].get_markerfacecolor() != "white"
    assert labels["a"].get_marker() != labels["b"].get_marker()
    assert list(labels["b"].get_xdata()) == pytest.approx([20])
    assert figure.get_facecolor() == (1, 1, 1, 1)
    plt.close(figure)
    with pytest.raises(ValueError, match="no point to draw"):
        sizing.latency_throughput({})
