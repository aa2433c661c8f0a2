"""The figure of a read cache: bars as long as their bytes, a copy two passes longer."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # after the choice of backend

from servelab import hardware, models
from servelab.plots import reading
from servelab.roofline import step_cost

QWEN, H100 = models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def test_bars_are_the_bytes_of_the_step_over_the_bandwidth() -> None:
    (axes,) = reading.memory_time(QWEN, H100, 64, [512, 8192]).axes
    ends: dict[int, float] = {}
    for patch in axes.patches:
        if patch.get_width():
            row = round(patch.get_y() + patch.get_height() / 2)
            ends[row] = max(ends.get(row, 0.0), patch.get_x() + patch.get_width())
    for index, context in enumerate((512, 8192)):
        moved = step_cost(QWEN, [(1, context - 1)] * 64).bytes
        kv = 64 * context * QWEN.kv_bytes_per_token()
        for row, expected in ((2 * index, moved), (2 * index + 1, moved + 2 * kv)):
            milliseconds = 1e3 * expected / H100.bandwidth_bytes_per_second
            assert ends[row] == pytest.approx(milliseconds)
            assert f"{milliseconds:.1f} ms" in axes.texts[row].get_text()


def test_a_batch_is_a_count() -> None:
    with pytest.raises(ValueError, match="sequences must be"):
        reading.memory_time(QWEN, H100, 0, [512])
