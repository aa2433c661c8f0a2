"""The figures of chapter 3 show what the calculators say, and chapter 3's laws hold."""

from __future__ import annotations

import itertools

import matplotlib.pyplot as plt
import pytest

from servelab import hardware, memory, models
from servelab.plots import phases
from servelab.roofline import attention, step_cost, time_bound

H100, QWEN = hardware.get("h100-sxm-80gb"), models.get("qwen3-8b")


def decode(sequences: int, context: int) -> list[tuple[int, int]]:
    return [(1, context - 1)] * sequences


def fits(context: int) -> int:
    return memory.max_sequences(QWEN, memory.budget(QWEN, H100).available_bytes, context)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def test_intensity_lines_are_step_costs_and_turn_dotted_where_memory_is_full() -> None:
    (axes,) = phases.intensity_over_rows(QWEN, H100, [8192], most_rows=256).axes
    prefill, everything, solid, mark, ridge = axes.lines
    for rows, intensity in zip(*prefill.get_data(), strict=True):
        assert intensity == step_cost(QWEN, [(int(rows), 0)]).intensity
    for rows, intensity in zip(*everything.get_data(), strict=True):
        assert intensity == step_cost(QWEN, decode(int(rows), 8192)).intensity
    assert everything.get_linestyle() == ":"
    assert solid.get_linestyle() == "-"
    assert solid.get_xdata()[-1] == mark.get_xdata()[0] == fits(8192) < 256
    assert set(ridge.get_ydata()) == {H100.ridge("bf16")}


def test_a_line_whose_caches_all_fit_stays_solid_to_its_end() -> None:
    (axes,) = phases.intensity_over_rows(QWEN, H100, [128], most_rows=256).axes
    assert axes.lines[2].get_xdata()[-1] == 256 < fits(128)


def test_the_stack_of_a_decode_step_is_its_memory_time() -> None:
    axes = phases.decode_step_time(QWEN, H100, [2048], most_sequences=64).axes[0]
    top = axes.collections[2].get_paths()[0].vertices[:, 1].max()  # milliseconds
    assert top == pytest.approx(
        1e3 * time_bound(step_cost(QWEN, decode(64, 2048)), H100, "bf16").memory_seconds
    )
    batches, compute = axes.lines[0].get_data()
    bound = time_bound(step_cost(QWEN, decode(int(batches[-1]), 2048)), H100, "bf16")
    assert compute[-1] == pytest.approx(1e3 * bound.compute_seconds)


def test_each_speed_line_ends_where_memory_is_full() -> None:
    (axes,) = phases.speed_over_latency(QWEN, H100, [2048, 8192]).axes
    lines = [line for line in axes.lines if len(line.get_xdata()) > 1]
    assert len(lines) == 2
    for line, context in zip(lines, (2048, 8192), strict=True):
        seconds = time_bound(step_cost(QWEN, decode(fits(context), context)), H100, "bf16").seconds
        assert line.get_xdata()[-1] == pytest.approx(1e3 * seconds)
        assert line.get_ydata()[-1] == pytest.approx(fits(context) / seconds)


@pytest.mark.parametrize("name", models.names())
def test_attention_of_a_decode_step_does_not_gain_by_batching(name: str) -> None:
    heads = models.get(name).layers[0].attention
    alone, together = (attention(heads, decode(b, 4096)).intensity for b in (1, 100))
    assert alone == together < heads.queries_per_kv_head  # bf16: 2 g / 2 bytes


def test_a_decode_step_gains_by_batching_but_less_and_less() -> None:
    found = [step_cost(QWEN, decode(2**i, 4096)).intensity for i in range(11)]
    gains = [after / before for before, after in itertools.pairwise(found)]
    assert all(1 < later < earlier for earlier, later in itertools.pairwise(gains))


def test_one_step_and_many_do_the_same_work_for_the_same_tokens() -> None:
    whole = step_cost(QWEN, [(40, 0)], logits="all")
    parts = [step_cost(QWEN, [(8, c)], logits="all") for c in range(0, 40, 8)]
    assert whole.flop == sum(part.flop for part in parts)
    assert whole.bytes < sum(part.bytes for part in parts)
