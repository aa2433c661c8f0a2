"""The tool behind ``make notebooks``: same bytes twice, measurements kept, failures reported."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tools import notebooks

PAGE = """---
kernelspec: {{display_name: Python 3, language: python, name: python3}}
---

# A page

```{{code-cell}} ipython3
print(1 + 1)
```

```{{code-cell}} ipython3
:tags: [nbval-ignore-output]
import time
print(time.perf_counter_ns()){comment}
```
"""


def page(root: Path, text: str) -> str:
    (root / "chapters").mkdir(exist_ok=True)
    (root / "chapters" / "page.md").write_text(text)
    return "chapters/page"


@pytest.fixture
def run_once(tmp_path: Path) -> notebooks.Run:
    run = notebooks.execute(page(tmp_path, PAGE.format(comment="")), root=tmp_path)
    assert not run.error
    (tmp_path / "chapters" / "page.ipynb").write_text(run.text)
    return run


def test_a_second_run_gives_the_same_bytes(tmp_path: Path, run_once: notebooks.Run) -> None:
    assert notebooks.execute("chapters/page", root=tmp_path).text == run_once.text


def test_refresh_measures_anew(tmp_path: Path, run_once: notebooks.Run) -> None:
    assert notebooks.execute("chapters/page", refresh=True, root=tmp_path).text != run_once.text


def test_a_changed_measurement_cell_is_measured_anew(
    tmp_path: Path, run_once: notebooks.Run
) -> None:
    stem = page(tmp_path, PAGE.format(comment="  # changed"))
    changed = nbformat.reads(notebooks.execute(stem, root=tmp_path).text, as_version=4)
    before = nbformat.reads(run_once.text, as_version=4)
    assert changed.cells[1].outputs == before.cells[1].outputs
    assert changed.cells[2].outputs != before.cells[2].outputs


@pytest.mark.parametrize(
    ("line", "message"),
    [("1 / 0", "ZeroDivisionError"), ("import sys; print('x', file=sys.stderr)", "stderr")],
)
def test_an_error_or_a_warning_names_its_cell(tmp_path: Path, line: str, message: str) -> None:
    run = notebooks.execute(page(tmp_path, PAGE.format(comment=f"\n{line}")), root=tmp_path)
    assert not run.text
    assert message in run.error
    assert line in run.error
