"""Write the student folder: the exercises of each chapter as a notebook, without solutions.

``python tools/exercises.py [FOLDER]`` (default ``_build/exercises``) takes the section "Exercises"
of each chapter's Markdown and makes a notebook of it that stands by itself: directives become
headings, and what points into the book says so in words.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from servelab import check
from tools.notebooks import METADATA, ROOT

README = """\
# Exercises

One notebook for each chapter of *The Physics of LLM Serving*. They need the package `servelab`
and what the decoder of chapter 6 needs: `pip install -e '.[all]'` in a clone of the book.

Read the chapter first: "this chapter" in an exercise is the book's, and so are its symbols.
Open a notebook, put your answers in the place of the dots, and run the cell: it says at once
whether the answer is right and, if not, which mistake it looks like. A number is in the unit that
the cell names, a choice is a text of letters such as "ab", and a function is tried on random inputs
beside the package. An exercise that you leave as it is counts as not attempted.

For a score of the whole notebook:

    servelab check NOTEBOOK
    servelab check NOTEBOOK --json

| notebook | exercises | minutes |
|---|---|---|
"""
FIRST = """\
try:
    from servelab import hardware, memory, models, roofline, units
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "servelab is missing: run `pip install -e '.[all]'` in a clone of the book"
    ) from error"""
ROLES = (
    (r"\s*\{cite:[pt]+\}`[^`]*`", ""),
    (r"\{eq\}`[^`]*`", "the formula below"),
    (r"\{doc\}`([^`<]*?)\s*<[^>`]*>`", r"\1"),
    (r"\{doc\}`90_numbers`", "the book's page of numbers"),
    (r"\{doc\}`[^`]*`", "the book"),
    (r"\{\w+(?::\w+)?\}`~?([^`<]*?)(?:\s*<[^>`]*>)?`", r"`\1`"),
    (r"^The answers are in .*$", ""),
)


INTRODUCTION = (
    "Each exercise has a cell. Put your answer in the place of the dots and run it; it says at "
    "once whether the answer is right and, if not, which mistake it looks like."
)


def section(text: str) -> str:
    """Return the exercises of a chapter's Markdown, nothing if it has none."""
    _, found, rest = text.partition("\n## Exercises\n")
    return rest.split("\n## ")[0] if found else ""


def plain(text: str, chapter: int) -> str:
    """Return a chapter's exercises without directives and roles.

    They are numbered as the checkers know them, and equations of the chapter stand below the text
    that names them.
    """
    equations = {
        label: body for body, label in re.findall(r"\$\$\n([^$]*)\n\$\$ \((eq-[\w-]+)\)", text)
    }

    def heading(found: re.Match[str]) -> str:
        named = dict.fromkeys(re.findall(r"\{eq\}`([\w-]+)`", found[3]))
        below = "".join(f"\n$$\n{equations[label]}\n$$\n" for label in named)
        return f"## {chapter}.{found[2]} {found[1]}\n\n{found[3].strip()}\n{below}"

    text = re.sub(
        rf":::+\{{exercise\}} ?(.*)\n:label: ex-c{chapter}-(\d+)\n((?:.|\n)*?)\n:::+\n",
        heading,
        section(text),
    )
    for pattern, said in ROLES:
        text = re.sub(pattern, said, text, flags=re.MULTILINE)
    # What the chapter says of its page has no place in a notebook.
    return re.sub(r"(?s)^\s*Each exercise has a cell\..*?\n\n", f"\n{INTRODUCTION}\n\n", text)


def student_notebook(page: Path) -> Any:
    """Return the notebook of a chapter's exercises, not executed."""
    text, chapter = page.read_text(encoding="utf-8"), int(page.name[:2])
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    assert title is not None, page
    head = (
        f"# Exercises of chapter {chapter}: {title[1]}\n\n```{{code-cell}} ipython3\n{FIRST}\n```\n"
    )
    notebook = jupytext.reads(head + plain(text, chapter), fmt="md:myst")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
    return notebook


def pages() -> list[Path]:
    """Return the chapters that have exercises."""
    found = []
    for chapter in check.chapters():
        found += sorted((ROOT / "chapters").glob(f"{chapter:02d}_*.md"))
    return found


def write(folder: Path) -> list[Path]:
    """Write the student folder and return its notebooks.

    Raises: ``FileExistsError`` where something else stands there: it may be somebody's answers.
    """
    texts, readme = {}, README
    for page in pages():
        path = folder / f"{page.stem}.ipynb"
        texts[path] = nbformat.writes(student_notebook(page), version=4) + "\n"
        found = check.exercises(int(page.name[:2]))
        readme += f"| {path.name} | {len(found)} | {sum(one.minutes for one in found)} |\n"
    written = list(texts)
    texts[folder / "README.md"] = readme
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise FileExistsError(
                f"{path} is there and differs, it may hold answers: move {folder} away, or name "
                "another folder"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return written


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the exercises without their solutions.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "_build" / "exercises")
    folder = parser.parse_args(arguments).folder
    try:
        written = write(folder)
    except OSError as error:
        print(f"exercises: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(f"  {path.name}")
    print(f"Written to {folder}: hand it out, and check a notebook with: servelab check NOTEBOOK")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
