"""Each page with cells is a pair: Markdown that is edited, and the notebook executed from it."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

from tools import notebooks

ROOT = notebooks.ROOT
STEMS = notebooks.stems()
MAX_CELL_LINES = 60
MAX_NOTEBOOK_BYTES = 5_000_000
KNOWN_TAGS = {
    notebooks.IGNORED,
    notebooks.STDERR_ALLOWED,
    notebooks.RAISES,
    "live",  # the reader can run it in the page
    "exercise",  # it runs there without the cells above it, but for the first such cell
    "hide-input",
    "hide-output",
    "hide-cell",
    "remove-input",
    "remove-output",
    "remove-cell",
}
# A notebook made elsewhere still shows a home folder, a temporary one or an installed program's.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])(/(home|root|Users|tmp|usr|opt|var|mnt)/|[A-Z]:\\\\?\w)")

each_pair = pytest.mark.parametrize("stem", STEMS)


def stored(stem: str) -> Any:
    path = ROOT / f"{stem}.ipynb"
    assert path.exists(), f"{stem}.ipynb is missing: run make notebooks NB={stem}"
    return nbformat.read(path, as_version=4)


def code_cells(stem: str) -> list[Any]:
    return [cell for cell in stored(stem).cells if cell.cell_type == "code"]


def files_of_toc() -> list[str]:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    chapters = [chapter for part in toc["parts"] for chapter in part["chapters"]]
    sections = [section for chapter in chapters for section in chapter.get("sections", [])]
    return [entry["file"] for entry in chapters + sections]


def test_a_sizing_problem_takes_at_most_five_lines_and_proves_its_number() -> None:
    solutions = [
        cell.source.splitlines()
        for cell in code_cells("chapters/94_sizing_problems")
        if "hide-cell" in cell.metadata.get("tags", [])
    ]
    assert len(solutions) == 20
    for lines in solutions:
        assert len(lines) <= 5, lines
        assert lines[-1].lstrip().startswith("assert "), lines


def test_the_table_of_contents_has_every_pair_and_no_missing_file() -> None:
    listed = files_of_toc()
    assert len(listed) == len(set(listed))
    assert set(STEMS) <= set(listed)
    assert not [name for name in listed if not (ROOT / f"{name}.md").exists()]


def test_the_front_and_the_status_page_count_the_chapters_that_are_written() -> None:
    chapters = [name.split("/")[1] for name in files_of_toc() if re.match(r"chapters/[01]", name)]
    written = [name for name in chapters if not name.startswith("00_")]
    last = len(written)
    assert [int(name[:2]) for name in chapters] == list(range(last + 1))
    front, status = (
        " ".join((ROOT / f"chapters/{name}.md").read_text(encoding="utf-8").split())
        for name in ("00_how_to_read", "92_status")
    )
    assert re.findall(r"\| \{doc\}`(\w+)` \|", front) == written
    assert f"has chapters 0 to {last} and" in status


def test_no_notebook_is_without_its_markdown() -> None:
    found = {
        f"{folder}/{path.stem}"
        for folder in notebooks.FOLDERS
        for path in Path(ROOT, folder).glob("*.ipynb")
    }
    assert found == set(STEMS)


@each_pair
def test_the_notebook_is_the_markdown(stem: str) -> None:
    made = notebooks.from_markdown(ROOT / f"{stem}.md")
    kept = stored(stem)
    keys = ("id", "cell_type", "source", "metadata")
    assert [[cell[key] for key in keys] for cell in kept.cells] == [
        [cell[key] for key in keys] for cell in made.cells
    ], f"run make notebooks NB={stem}"
    assert kept.metadata == made.metadata


@each_pair
def test_every_code_cell_ran_once_in_order(stem: str) -> None:
    counts = [cell.execution_count for cell in code_cells(stem)]
    assert counts == list(range(1, len(counts) + 1))


@each_pair
def test_no_error_and_no_warning_is_stored(stem: str) -> None:
    assert not notebooks.complaint(stored(stem))


@each_pair
def test_no_output_names_a_path_of_the_machine_it_ran_on(stem: str) -> None:
    for cell in code_cells(stem):
        for output in cell.outputs:
            text = output.get("text", "") + "".join(
                str(data)
                for mime, data in output.get("data", {}).items()
                if not mime.startswith("image/") or mime == "image/svg+xml"
            )
            named = [path for path in (str(ROOT), sys.prefix) if path in text]
            assert not named, cell.source
            assert not ABSOLUTE_PATH.search(text), cell.source


@each_pair
def test_every_figure_has_a_text_alternative(stem: str) -> None:
    for cell in code_cells(stem):
        if any(mime.startswith("image/") for out in cell.outputs for mime in out.get("data", {})):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert alt.strip(), f"no mystnb.image.alt on the cell:\n{cell.source}"


def test_the_picture_of_the_readme_is_the_figure_of_the_chapter() -> None:
    stem, name, picture = notebooks.README_FIGURE
    assert picture in (ROOT / "README.md").read_text()
    assert (ROOT / picture).read_bytes() == notebooks.figure(stored(stem), name)


def test_the_chapters_run_one_small_model() -> None:
    loaded: dict[str, set[str]] = {}
    drawn = set()  # with random weights
    for stem in STEMS:
        for cell in code_cells(stem):
            for call in ast.walk(ast.parse(cell.source)):
                if not isinstance(call, ast.Call):
                    continue
                name = ast.unparse(call.func)
                if name.endswith("from_pretrained"):
                    loaded.setdefault(stem, set()).add(ast.unparse(call.args[0]))
                elif name.endswith(("DenseDecoder", "TorchRunner")):
                    drawn.add((stem, ast.unparse(call.args[0])))
    chapters = {stem.split("/")[1][:2] for stem in loaded}
    assert chapters >= {"01", "03", "04", "06", "07", "08"}
    assert set().union(*loaded.values()) == {"BUNDLED_CHECKPOINT"}, loaded
    assert drawn == {("chapters/03_prefill_and_decode", "larger")}  # timed, on purpose not small


@each_pair
def test_cells_are_short_and_their_tags_known(stem: str) -> None:
    for cell in stored(stem).cells:
        assert set(cell.metadata.get("tags", [])) <= KNOWN_TAGS, cell.source
        if cell.cell_type == "code":
            assert cell.source.count("\n") < MAX_CELL_LINES, cell.source
            # nbval would see the value that the semicolon hides here.
            assert not cell.source.rstrip().endswith(";"), cell.source


@each_pair
def test_a_notebook_is_small_enough_to_review(stem: str) -> None:
    assert (ROOT / f"{stem}.ipynb").stat().st_size < MAX_NOTEBOOK_BYTES
