"""`servelab check`: a notebook of exercises, run and scored."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from servelab.cli import options
from servelab.cli.configs import no_file
from servelab.cli.output import answer, wrapped

if TYPE_CHECKING:
    from servelab.check.grade import Grade

_SIGNS = {"passed": "+", "failed": "-", "not attempted": " "}


@click.command(epilog=options.examples("check 04_kv_cache_memory.ipynb"))
@click.argument("notebook", metavar="NOTEBOOK", type=click.Path())
@click.option(
    "--cell-seconds",
    default=120,
    show_default=True,
    type=click.IntRange(1, 3600),
    help="Time after which a cell is interrupted.",
)
@options.json_option
def command(notebook: str, cell_seconds: int, as_json: bool) -> None:
    """A notebook of exercises: run from its start, each answer with its verdict.

    The notebook's code is run on this machine, in a kernel of its own; the file is not changed. A
    cell that raises does not stop the others. The exit code is 0 if the notebook ran, whatever the
    score.
    """
    path = Path(notebook)
    if not path.exists():
        raise ValueError(no_file(path))
    if path.is_dir():
        raise ValueError(f"{notebook} is a folder; name a notebook in it")
    try:
        from servelab.check.grade import grade

        grades = grade(path, cell_seconds, _tell if sys.stderr.isatty() else None)
    except ImportError as error:
        raise ValueError(
            f"running a notebook needs {error.name}: pip install 'servelab[book]'"
        ) from None
    answer(as_json, _values(path, grades), _lines(grades))


def _tell(place: int, total: int) -> None:
    end = "\n" if place == total else ""
    click.echo(f"\rcode cell {place} of {total}{end}", nl=False, err=True)


def _values(path: Path, grades: "Grade") -> dict[str, object]:
    return {
        "notebook": path.name,
        "exercises": [verdict.data() for verdict in grades.verdicts],
        "errors": [{"cell": error.number, "words": error.words} for error in grades.errors],
        "passed": grades.count("passed"),
        "failed": grades.count("failed"),
        "not_attempted": grades.count("not attempted"),
        "total": len(grades.verdicts),
    }


def _lines(grades: "Grade") -> Iterator[str]:
    for verdict in grades.verdicts:
        yield f"{_SIGNS[verdict.state]} {verdict.exercise:5} {verdict.state}"
        if verdict.state == "failed" or verdict.words.startswith(("Its cell", "No cell")):
            yield wrapped(_plain(verdict.words))
    for error in grades.errors:
        yield wrapped(f"code cell {error.number}: {_plain(error.words)}")
    yield f"{grades.count('passed')} of {len(grades.verdicts)} passed"


def _plain(words: str) -> str:
    """Return words on one line, without signs that steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in words).split())
