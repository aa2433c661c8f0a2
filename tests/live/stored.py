"""What a page stores of its live cells, and whether the browser's Python shows the same."""

from __future__ import annotations

from typing import Any

import nbformat

from tools import live_cells, notebooks


def stored_cells(stem: str) -> list[Any]:
    cells = nbformat.read(notebooks.ROOT / f"{stem}.ipynb", as_version=4).cells
    return [cell for cell in cells if notebooks.has_tag(cell, live_cells.LIVE)]


def stored_outputs(cell: Any) -> list[dict[str, str]]:
    """A notebook's outputs of a cell as `servelab.live.cells` would say them."""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append({"kind": "text", "content": output.text})
        elif output.output_type == "error":
            found.append({"kind": "error", "content": f"{output.ename}: {output.evalue}"})
        elif "text/html" in output.data:
            found.append({"kind": "html", "content": output.data["text/html"]})
        else:
            found.append({"kind": "text", "content": output.data["text/plain"]})
    return found


def assert_as_stored(stem: str, answered: list[list[dict[str, str]]]) -> None:
    """Hold the outputs of all live cells of a page, in order, to what its notebook stores."""
    tagged = [cell for cell in live_cells.of_page(stem) if cell.is_live]
    assert len(answered) == len(tagged), f"run make notebooks NB={stem}"
    for cell, outputs in zip(stored_cells(stem), answered, strict=True):
        if notebooks.has_tag(cell, notebooks.IGNORED):
            assert not [o for o in outputs if o["kind"] == "error"], cell.source
        elif notebooks.has_tag(cell, notebooks.RAISES):
            assert outputs[-1]["kind"] == "error", cell.source
            last = outputs[-1]["content"].splitlines()[-1]
            assert last == stored_outputs(cell)[-1]["content"].splitlines()[-1]
        else:
            assert outputs == stored_outputs(cell), cell.source
