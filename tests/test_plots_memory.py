"""The figures of KV-cache memory show the bytes that the calculators give, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import pytest

from servelab import models
from servelab.models import Attention
from servelab.roofline import attention
from servelab.units import GB, parse_bytes

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # after the choice of backend
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from servelab.plots import memory


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def arrow_bytes(figure: Figure, panel: int, verb: str) -> int:
    """The sum of the sizes written on the arrows of one direction, as a reader would add them."""
    texts = [text.get_text() for text in figure.axes[panel].texts]
    return sum(parse_bytes(text.split("\n")[-1]) for text in texts if text.startswith(verb))


@pytest.mark.parametrize("tokens", [512, 2048])
@pytest.mark.parametrize(("panel", "fused"), [(0, False), (1, True)])
def test_arrows_of_the_schematic_add_up(tokens: int, panel: int, fused: bool) -> None:
    head = Attention(num_q_heads=1, num_kv_heads=1, head_dim=128)
    cost = attention(head, [(tokens, 0)], fused=fused)
    figure = memory.attention_schematic(head, tokens)
    assert arrow_bytes(figure, panel, "read") == cost.read_bytes
    assert arrow_bytes(figure, panel, "write") == cost.written_bytes


def test_growth_lines_are_solid_up_to_the_longest_legal_context() -> None:
    spec, tokens = models.get("llama-3-8b"), [4096, 8192, 16384]
    lines = memory.kv_growth([spec], tokens, 10**11, "limit").axes[0].lines
    dotted, solid = (list(line.get_ydata()) for line in lines[:2])
    assert dotted == [spec.sequence_bytes(t) / GB for t in tokens]
    assert solid == dotted[:2]


def test_growth_shows_a_window_as_a_level_line() -> None:
    figure = memory.kv_growth([models.get("mistral-7b")], [4096, 8192], 10**11, "limit")
    first, last = figure.axes[0].lines[0].get_ydata()
    assert first == last


@pytest.mark.parametrize(("available_bytes", "hatched"), [(10**9, 0), (600_000_000, 1), (10**8, 4)])
def test_map_hatches_exactly_what_does_not_fit(available_bytes: int, hatched: int) -> None:
    spec = models.get("qwen3-8b")  # 0.15, 0.30, 0.30 and 0.60 GB
    axes = memory.batch_context_map(spec, [1, 2], [1024, 2048], available_bytes).axes[0]
    cells = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert len(cells) == hatched


def test_map_draws_its_edge_between_what_fits_and_what_does_not() -> None:
    spec = models.get("qwen3-8b")
    axes = memory.batch_context_map(spec, [1, 2], [1024, 2048], 600_000_000).axes[0]
    edges = {(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axes.lines}
    assert edges == {((0.5, 0.5), (0.5, 1.5)), ((0.5, 1.5), (0.5, 0.5))}


def test_attention_lines_carry_both_costs() -> None:
    layer = Attention(num_q_heads=32, num_kv_heads=8, head_dim=128)
    unfused, fused = memory.attention_bytes(layer, [256, 512]).axes[0].lines
    for line, how in ((unfused, False), (fused, True)):
        wanted = [attention(layer, [(n, 0)], fused=how).bytes / GB for n in (256, 512)]
        assert list(line.get_ydata()) == wanted
