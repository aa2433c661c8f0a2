"""Student notebooks: made without solutions, run with errors and all, and scored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from servelab import check
from servelab.check.grade import Grade, grade
from servelab.cli import main
from tools import exercises, notebooks

IMPORT = "from servelab.check import check"


def notebook(tmp_path: Path, *cells: str, name: str = "mine.ipynb") -> Path:
    path = tmp_path / name
    made = new_notebook(cells=[new_markdown_cell("# Mine"), *map(new_code_cell, cells)])
    nbformat.write(made, path)
    return path


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Grade, list[tuple[int, int]]]:
    """One notebook with everything that can go wrong, run once."""
    told: list[tuple[int, int]] = []
    path = notebook(
        tmp_path_factory.mktemp("mine"),
        IMPORT,
        "check('4.1', 800 * 1024)",
        "raise RuntimeError('first line\\nsecond')",
        "answer = 64\ncheck('4.3', answer)",
        "while True:\n    pass\ncheck('4.2', 96)",
        "check('4.1', ...)",
        "import os\nos._exit(1)\ncheck('4.4', ...)",
        "check('4.5', ...)",
    )
    return path, grade(path, 4, lambda place, total: told.append((place, total))), told


def test_every_exercise_of_the_chapter_has_a_verdict(
    graded: tuple[Path, Grade, list[tuple[int, int]]],
) -> None:
    _, found, told = graded
    states = {verdict.exercise: verdict.state for verdict in found.verdicts}
    assert list(states) == [one.id for one in check.exercises(4)]
    assert states["4.1"] == "passed"  # the stub after it does not take it back
    assert states["4.3"] == "failed"
    assert {states["4.2"], states["4.4"], states["4.5"]} == {"not attempted"}
    assert told == [(place, 8) for place in range(1, 8)]


def test_cells_that_raise_stall_or_kill_the_kernel_are_said(
    graded: tuple[Path, Grade, list[tuple[int, int]]],
) -> None:
    _, found, _ = graded
    assert [(error.number, error.words) for error in found.errors] == [
        (3, "RuntimeError: first line"),
        (5, "it took longer than 4 s"),
        (7, "the kernel died"),
    ]
    words = {verdict.exercise: verdict.words for verdict in found.verdicts}
    assert words["4.2"] == "Its cell gave no verdict: it took longer than 4 s."
    assert words["4.4"] == "Its cell gave no verdict: the kernel died."
    assert words["4.5"] == "Its cell was not reached."


def test_functions_that_never_end_one_after_the_other_do_not_end_the_grade(tmp_path: Path) -> None:
    endless = "def f(*given):\n    while True:\n        print('x' * 1000)\ncheck('{}', f)"
    stubborn = (
        "while True:\n    try:\n        __import__('time').sleep(1)\n"
        "    except BaseException:\n        pass"
    )
    path = notebook(
        tmp_path, IMPORT, endless.format("4.4"), endless.format("4.5"), "check('4.1', 819200)",
        stubborn, "check('4.2', 96)",
    )  # fmt: skip
    found = grade(path, 3)
    states = {verdict.exercise: verdict.state for verdict in found.verdicts}
    assert states["4.1"] == "passed"
    assert states["4.2"] == "not attempted"  # the kernel did not heed the interrupt
    assert [error.number for error in found.errors] == [2, 3, 5]


def test_what_a_cell_makes_up_or_writes_past_the_notebook_does_no_harm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    forged = (
        "from IPython.display import display\n"
        "for data in ({'exercise': [], 'state': 'passed', 'words': 3}, [], 3,\n"
        "             {'exercise': '4.2', 'state': ['passed'], 'words': 'x'},\n"
        "             {'exercise': 4, 'state': 'passed', 'words': 'x'},\n"
        "             {'exercise': '4.2', 'state': 'passed', 'words': 3}):\n"
        "    display({'application/vnd.servelab.verdict+json': data}, raw=True)"
    )
    past = (
        "import os, sys\nos.system('echo past')\nos.write(1, b'past')\nos.write(2, b'past')\n"
        "print('past', file=sys.__stdout__, flush=True)"
    )
    path = notebook(
        tmp_path, IMPORT, forged, past, "check('4a', 3)", "check('\u00b2', 3)", "check('99.1', 3)",
        "for number, answer in [('4.1', 819200), ('4.3', 16)]:\n"
        "    display(check(number, answer))",
        "check(number='4.2', answer=3)",
    )  # fmt: skip
    assert main(["check", str(path), "--json"]) == 0
    out, err = capfd.readouterr()
    data = json.loads(out)
    assert err == ""
    states = [one["state"] for one in data["exercises"]]
    assert states == ["passed", "failed", "passed", "not attempted", "not attempted"]
    assert [error["cell"] for error in data["errors"]] == [4, 5, 6]
    assert "'4a'" in data["errors"][0]["words"]


def test_a_notebook_in_another_language_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = notebook(tmp_path, "x <- check('4.1', 819200)")
    made = nbformat.read(path, as_version=4)
    made.metadata.kernelspec = {"name": "ir", "display_name": "R", "language": "R"}
    nbformat.write(made, path)
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.endswith("is a notebook in R, not in Python\n")


def test_the_file_is_not_changed_and_stored_outputs_do_not_count(tmp_path: Path) -> None:
    path = notebook(tmp_path, IMPORT, "check('4.3', 64)")
    stored = nbformat.read(path, as_version=4)
    forged = {"application/vnd.servelab.verdict+json": check.check("4.3", 16).data()}
    output = nbformat.v4.new_output("display_data", data=forged)
    stored.cells[2].outputs = [output]
    nbformat.write(stored, path)
    before = path.read_bytes()
    found = {verdict.exercise: verdict.state for verdict in grade(path).verdicts}
    assert found["4.3"] == "failed"
    assert path.read_bytes() == before


def test_the_command_prints_a_score_and_json_with_stable_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = notebook(tmp_path, IMPORT, "check('4.1', 819200)", "print(1)\ncheck('4.3', 64);", "1/0")
    assert main(["check", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == "+ 4.1   passed"
    assert "code cell 4: ZeroDivisionError: division by zero" in out
    assert out.splitlines()[-1] == "1 of 5 passed"
    assert max(map(len, out.splitlines())) <= 80
    assert main(["check", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    keys = ["notebook", "exercises", "errors", "passed", "failed", "not_attempted", "total"]
    assert list(data) == keys
    assert (data["passed"], data["total"]) == (1, 5)
    assert all(list(one) == ["exercise", "state", "words"] for one in data["exercises"])
    assert data["errors"] == [{"cell": 4, "words": "ZeroDivisionError: division by zero"}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.ipynb", "no notebook", "a.ipynb is no notebook: "),
        ("a.ipynb", "[]", "a.ipynb is no notebook: "),
        ("a.ipynb", '{"cells": 3}', "a.ipynb is no notebook: "),
        ("a.ipynb", "", "a.ipynb is no notebook: "),
        ("a.ipynb", '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "no exer"),
        ("b.ipynb", None, "no file"),
        ("", None, "is a folder"),
    ],
)
def test_what_is_no_notebook_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, words: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert main(["check", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("students") / "exercises"
    exercises.write(path)
    return path


def test_the_student_folder_has_every_exercise_and_no_solution(folder: Path) -> None:
    readme = (folder / "README.md").read_text()
    assert sorted(path.name for path in folder.glob("*.ipynb")) == [
        f"{page.stem}.ipynb" for page in exercises.pages()
    ]
    for chapter in check.chapters():
        (path,) = folder.glob(f"{chapter:02d}_*.ipynb")
        made = nbformat.read(path, as_version=4)
        nbformat.validate(made)
        text = "\n".join(cell.source for cell in made.cells)
        for one in check.exercises(chapter):
            assert f"\n## {one.id} " in text
            assert f'check("{one.id}"' in text
        assert f"| {path.name} | {len(check.exercises(chapter))} |" in readme
        assert not re.search(r"\{\w+(:\w+)?\}`|:::|:label:|solution|\.\./", text), path.name
        assert not any(cell.get("outputs") for cell in made.cells)


def test_what_a_student_wrote_is_never_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exercises.main([str(tmp_path)]) == exercises.main([str(tmp_path)]) == 0
    (tmp_path / "mine.txt").write_text("mine")
    answered = next(tmp_path.glob("04_*.ipynb"))
    text = answered.read_text().replace("answer = ...", "answer = 819200")
    answered.write_text(text)
    capsys.readouterr()
    assert exercises.main([str(tmp_path)]) == 1
    assert "may hold answers" in capsys.readouterr().err
    assert answered.read_text() == text
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_student_notebook_as_handed_out_scores_nothing_and_raises_nothing(folder: Path) -> None:
    (path,) = folder.glob("04_*.ipynb")
    found = grade(path)
    assert not found.errors
    assert found.count("not attempted") == len(found.verdicts) == len(check.exercises(4))
    words = {verdict.words for verdict in found.verdicts}
    assert all(word.endswith("put your answer in the place of the dots.") for word in words)


def test_the_folder_is_written_from_the_chapters_that_the_book_has() -> None:
    stems = {f"chapters/{page.stem}" for page in exercises.pages()}
    assert stems <= set(notebooks.stems())
    assert len(stems) == len(check.chapters())
