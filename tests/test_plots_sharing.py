"""The figures on sharing show the chapter's savings, and times that the roofline computes."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import pytest

from servelab import hardware, models, roofline

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # after the choice of backend

from servelab.plots import sharing


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def test_savings_are_drawn_as_given() -> None:
    savings = {2: [0.5, 0.3, 0.1], 4: [0.7, 0.4, 0.2]}
    [axes] = sharing.saving_over_output([16, 64, 256], savings).axes
    for line, fractions in zip(axes.lines, savings.values(), strict=True):
        assert list(line.get_xdata()) == [16, 64, 256]
        assert list(line.get_ydata()) == fractions
    assert [text.get_text() for text in axes.texts] == ["S = 2", "S = 4"]


def test_a_line_needs_a_saving_per_output() -> None:
    with pytest.raises(ValueError, match="2 outputs need as many savings"):
        sharing.saving_over_output([16, 64], {2: [0.5]})


@pytest.mark.parametrize("block_size", [16, 256])
def test_first_token_times_are_those_of_the_step_behind_whole_blocks(block_size: int) -> None:
    spec, chip = models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")
    [axes] = sharing.first_token_over_cached(spec, chip, [1000, 4096], block_size).axes
    for line, prompt in zip(axes.lines, (1000, 4096), strict=False):
        hits = [round(share * prompt) for share in line.get_xdata()]
        assert hits[0] == 0
        assert hits == sorted(set(hits))
        assert all(hit % block_size == 0 for hit in hits)
        assert 0 < prompt - hits[-1] <= block_size
        for hit, milliseconds in zip(hits, line.get_ydata(), strict=True):
            cost = roofline.step_cost(spec, [(prompt - hit, hit)])
            bound = roofline.time_bound(cost, chip, "bf16")
            assert milliseconds == pytest.approx(1e3 * bound.seconds)
    floor = axes.lines[-1].get_ydata()[0]
    assert all(min(line.get_ydata()) > floor for line in axes.lines[:-1])


def test_a_prompt_must_be_longer_than_a_block() -> None:
    with pytest.raises(ValueError, match="prompt must be at least 17"):
        sharing.first_token_over_cached(
            models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"), [16], block_size=16
        )
