"""The figures of a cache's memory show the parts that were measured, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # after the choice of backend

from servelab.allocation.layouts import ContiguousCache
from servelab.plots import occupancy


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def test_a_map_shows_each_unit_at_each_sample() -> None:
    cache = ContiguousCache(num_units=8, unit_tokens=16, policy="oracle", max_tokens=128)
    number = cache.admit(20, 60)
    assert number is not None
    samples = [cache.unit_parts()]
    cache.grow(number, 30)
    samples.append(cache.unit_parts())
    figure = occupancy.memory_maps({"oracle": samples, "same": samples}, steps=30, slots=16)
    image = figure.axes[0].images[0]
    names = list(occupancy._PARTS)
    shown = [[names[code] for code in column] for column in zip(*image.get_array(), strict=True)]
    assert shown == samples
    assert tuple(image.get_extent()) == (0, 60, 0, 128)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [occupancy._PARTS[part][2] for part in ("held", "reserved", "rounding")]


def test_bars_are_as_high_as_their_parts() -> None:
    measured = {"max": {"held": 20.0, "reserved": 13.0, "internal": 58.0, "external": 9.0}}
    figure = occupancy.waste_bars(measured, {"max": {"held": 20.4}, "other": {"held": 1.0}})
    bars = [(bar.get_y(), bar.get_height()) for bar in figure.axes[0].patches]
    assert bars == [(0, 20), (20, 13), (33, 58), (91, 9), (0, 20.4)]


def test_a_part_too_thin_for_its_number_is_drawn_without() -> None:
    figure = occupancy.waste_bars({"paged": {"held": 96.2, "internal": 1.7}}, {})
    assert [text.get_text() for text in figure.axes[0].texts] == ["96.2"]
    assert len(figure.axes[0].patches) == 2


def test_what_the_figures_refuse() -> None:
    with pytest.raises(ValueError, match="at least one cache"):
        occupancy.memory_maps({}, steps=1, slots=16)
    with pytest.raises(ValueError, match="no allocator"):
        occupancy.waste_bars({}, {})
    with pytest.raises(ValueError, match="needs 2 points"):
        occupancy.block_size_trade([8, 16], {"measured": [1.0]}, [4, 2])
