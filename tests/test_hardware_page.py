"""The hardware page lists the whole catalogue, its sources, and a mark on each unseen figure."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from servelab import hardware

ROOT = Path(__file__).resolve().parents[1]
CHIPS = [hardware.get(name) for name in hardware.names()]


def outputs() -> list[str]:
    notebook = nbformat.read(ROOT / "chapters/93_hardware.ipynb", as_version=4)
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    return ["".join(o.get("text", "") for o in cell.outputs) for cell in cells]


def table_of(title: str) -> dict[str, str]:
    [text] = [text for text in outputs() if text.startswith(title)]
    return {line.split()[0]: line for line in text.splitlines()[2:]}


@pytest.mark.parametrize(
    ("title", "fields"),
    [
        ("TFLOP/s", ["dense_flop_per_second"]),
        ("memory", ["memory_bytes", "visible_memory_bytes", "bandwidth_", "link_"]),
    ],
)
def test_each_unseen_figure_is_marked(title: str, fields: list[str]) -> None:
    rows = table_of(title)
    assert list(rows) == hardware.names()
    for chip in CHIPS:
        shown = [f for f in chip.sources if f.startswith(tuple(fields))]
        shown += ["memory_bytes"] * (title == "memory")  # in GB and in GiB
        assert rows[chip.name].count("?") == sum(not chip.verified(f) for f in shown), chip.name


def test_the_last_table_gives_every_source() -> None:
    text = outputs()[-1]
    assert text.count("\n  ? ") == sum(
        not source.verified for chip in CHIPS for source in chip.sources.values()
    )
    assert len(re.findall(r"^  [ ?] \w+: ", text, re.MULTILINE)) == sum(
        len(chip.sources) for chip in CHIPS
    )
    for chip in CHIPS:
        assert f"{chip.label}\n" in text
