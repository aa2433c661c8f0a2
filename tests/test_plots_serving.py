"""Figures of an engine under load: they draw the values they are given."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest

from servelab import hardware, models
from servelab.plots import serving
from servelab.serving import Engine, RooflineRunner
from servelab.simulation import Simulation, percentile, poisson, simulate


def test_a_budget_has_a_gap_on_the_left_and_a_ttft_on_the_right_in_milliseconds() -> None:
    figure = serving.budget_trade([256, 512, 1024], [0.008, 0.011, 0.02], [0.3, 0.2, 0.15])
    gap, ttft = figure.axes
    assert list(gap.lines[0].get_ydata()) == pytest.approx([8, 11, 20])
    assert list(ttft.lines[0].get_ydata()) == pytest.approx([300, 200, 150])
    assert [label.get_text() for label in gap.get_xticklabels()] == ["256", "512", "1,024"]
    assert gap.get_ylim()[0] == ttft.get_ylim()[0] == 0, "both axes begin at zero"
    plt.close(figure)
    with pytest.raises(ValueError, match="needs 2 points"):
        serving.budget_trade([256, 512], [0.008], [0.3, 0.2])


def test_ways_to_bring_a_sequence_back_differ_in_marker_and_the_break_even_is_marked() -> None:
    figure = serving.preemption_costs([64, 128], {"a": [1e-4, 4e-4], "b": [2e-4, 3e-4]}, 100)
    (axes,) = figure.axes
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0.1, 0.4])
    assert axes.lines[0].get_marker() != axes.lines[1].get_marker()
    assert list(axes.lines[2].get_xdata()) == [100, 100]
    assert [text.get_text() for text in axes.texts] == ["100 tokens"]
    plt.close(figure)
    with pytest.raises(ValueError, match="needs 2 points"):
        serving.preemption_costs([64, 128], {"a": [1e-4]}, 100)


def test_a_sweep_draws_the_percentiles_of_each_run_and_the_capacity_in_every_panel() -> None:
    def run(rate: float) -> Simulation:
        runner = RooflineRunner(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
        return simulate(Engine(runner, max_num_seqs=2), poisson(rate, [(500, 20)] * 12))

    runs = {rate: run(rate) for rate in (1.0, 50.0)}
    figure = serving.load_sweep(runs, capacity=16.0)
    first, further, speed = figure.axes
    for line, percent in zip(first.lines[:2], (50, 99), strict=True):
        wanted = [percentile(each.ttft_seconds, percent) for each in runs.values()]
        assert list(line.get_ydata()) == wanted
    wanted = [1e3 * percentile(each.tpot_seconds, 99) for each in runs.values()]
    assert list(further.lines[1].get_ydata()) == wanted
    assert list(speed.lines[0].get_ydata()) == [r.output_tokens_per_second for r in runs.values()]
    for axes in figure.axes:
        assert list(axes.lines[-1].get_xdata()) == [16.0, 16.0]
    assert figure.get_facecolor() == (1, 1, 1, 1), "the figure must be opaque on a dark page"
    plt.close(figure)
    with pytest.raises(ValueError, match="no run to draw"):
        serving.load_sweep({}, capacity=1.0)
