"""A student's notebook, run from its start in a fresh kernel, and what its checkers said.

Models: a grade is the verdict on each exercise that the notebook's chapters have. Cells run in
order; one that raises does not stop those after it, and one that takes too long is interrupted.
Of several verdicts on one exercise the last one counts, an untouched stub apart.

Assumes: the notebook is what it seems. Its code runs here with the rights of whoever runs it, and a
cell that writes a verdict of its own is believed: a grade for marks wants a look at the notebook,
and a notebook of a stranger a machine of its own.

Ignores: outputs stored in the notebook, and everything its cells print.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from servelab.check.registry import chapters, exercise, exercises
from servelab.check.verdict import MIME_TYPE, Verdict
from servelab.units import check_count

_CALL = re.compile(r"""\bcheck\(\s*(?:number\s*=\s*)?["']([^"']+)["']""")
_LATE = "TooLong"


@dataclass(frozen=True)
class CellError:
    """A code cell that raised, or took too long: its ``number`` from 1, and what is to say."""

    number: int
    words: str


@dataclass(frozen=True)
class Grade:
    """What running a notebook gave.

    Parameters: ``verdicts`` on every exercise of the notebook's chapters, in order; ``errors`` of
    cells.
    """

    verdicts: tuple[Verdict, ...]
    errors: tuple[CellError, ...]

    def count(self, state: str) -> int:
        """Return how many exercises have a state."""
        return sum(verdict.state == state for verdict in self.verdicts)


def grade(
    path: Path, cell_seconds: int = 120, progress: Callable[[int, int], None] | None = None
) -> Grade:
    """Return the grade of a notebook.

    Parameters: ``cell_seconds`` after which a cell is interrupted; ``progress`` is told the cell
    that begins, from 1, and how many there are.
    Raises: ``ValueError`` for a file that is no notebook, or one without an exercise;
    ``ImportError`` where what runs notebooks is not installed.
    """
    check_count("cell_seconds", cell_seconds)
    notebook = _read(path)
    asked = {number for cell in notebook.cells for number in _asked(cell)}
    if not any(cell.cell_type == "code" and "check(" in cell.source for cell in notebook.cells):
        raise ValueError(f'{path} has no exercise: no cell calls check("chapter.number", ...)')
    found: dict[str, Verdict] = {}
    silent: dict[str, str] = {}
    errors = []
    for number, cell, reply in _run(notebook, path.parent, cell_seconds, progress):
        for verdict in _verdicts(cell):
            if verdict.state != "not attempted" or verdict.exercise not in found:
                found[verdict.exercise] = verdict
        words = _complaint(cell, reply, cell_seconds)
        if words:
            errors.append(CellError(number, words))
        for name in _asked(cell):
            why = words or "check(...) has to be its last line"
            silent[name] = f"Its cell gave no verdict: {why}."
            try:
                exercise(name)
            except LookupError as error:
                errors.append(CellError(number, str(error)))
    return Grade(tuple(_all(asked, found, silent)), tuple(errors))


def _read(path: Path) -> Any:
    import nbformat

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of older notebooks: they are read all the same
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:
        reason = str(error).strip().splitlines()[:1]
        raise ValueError(f"{path} is no notebook: {(reason or ['it cannot be read'])[0]}") from None
    told = notebook.metadata.get("kernelspec", {}), notebook.metadata.get("language_info", {})
    language = str(told[0].get("language") or told[1].get("name") or "python")
    if "python" not in language.lower():
        raise ValueError(f"{path} is a notebook in {language}, not in Python")
    return notebook


def _run(
    notebook: Any, folder: Path, cell_seconds: int, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[int, Any, str]]:
    """Run the code cells in order; yield each with its number and what stopped it, if anything."""
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError

    class Quiet(NotebookClient):  # type: ignore[misc]  # without types here
        def output(self, outs: Any, msg: Any, display_id: str, cell_index: int) -> Any:
            # What is printed is not kept: a cell may print until it is interrupted.
            if msg["msg_type"] == "stream":
                return None
            return super().output(outs, msg, display_id, cell_index)

    replies: list[Any] = []
    client = Quiet(
        notebook,
        kernel_name="python3",
        timeout=cell_seconds,
        interrupt_on_timeout=True,
        error_on_timeout={"ename": _LATE, "evalue": "", "traceback": []},
        allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
        on_cell_executed=lambda cell, cell_index, execute_reply: replies.append(execute_reply),
    )
    client.log.setLevel(logging.CRITICAL)
    code = [n for n, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    # What a cell writes past the notebook must not stand in the answer, which may be JSON.
    with client.setup_kernel(stdout=DEVNULL, stderr=DEVNULL):
        for place, index in enumerate(code):
            cell = notebook.cells[index]
            if progress is not None:
                progress(place + 1, len(code))
            replies.clear()
            try:
                client.execute_cell(cell, index, execution_count=place + 1)
            except DeadKernelError:
                yield place + 1, cell, "dead"
                return
            name = replies[-1]["content"].get("ename", "") if replies else ""
            yield place + 1, cell, name
            if name == _LATE and not _heeds(client, cell_seconds):
                return


def _heeds(client: Any, seconds: int) -> bool:
    """Return whether a kernel that was interrupted is free for the next cell."""
    from nbclient.util import ensure_async, run_sync

    async def asked() -> None:
        await ensure_async(client.kc.kernel_info(reply=True, timeout=seconds))

    try:
        run_sync(asked)()
    except TimeoutError:
        return False
    return True


def _asked(cell: Any) -> list[str]:
    return _CALL.findall(cell.source) if cell.cell_type == "code" else []


def _verdicts(cell: Any) -> Iterator[Verdict]:
    for output in cell.outputs:
        data = output.get("data", {}).get(MIME_TYPE)
        try:
            verdict = Verdict(data["exercise"], data["state"], data["words"])
        except (TypeError, KeyError):  # no verdict, or one that a cell made up badly
            continue
        texts = all(isinstance(text, str) for text in verdict.data().values())
        if texts and verdict.state in ("passed", "failed", "not attempted"):
            yield verdict


def _complaint(cell: Any, reply: str, cell_seconds: int) -> str:
    """Return what went wrong in a cell, in words; nothing if nothing did."""
    if reply == "dead":
        return "the kernel died"
    if reply == _LATE:
        return f"it took longer than {cell_seconds} s"
    for output in cell.outputs:
        if output.output_type == "error":
            first = output.evalue.splitlines()[:1]
            return f"{output.ename}{': ' if first else ''}{''.join(first)}"
    return ""


def _all(asked: set[str], found: dict[str, Verdict], silent: dict[str, str]) -> Iterator[Verdict]:
    """Yield a verdict on every exercise of the chapters that the notebook is about."""
    known = set(chapters())
    about = {name.partition(".")[0] for name in {*asked, *found}}
    for chapter in sorted(known):
        for one in exercises(chapter) if str(chapter) in about else []:
            words = silent.get(one.id)
            if words is None:
                missing = "its cell was not reached" if one.id in asked else "no cell asks for it"
                words = f"{missing.capitalize()}."
            yield found.get(one.id, Verdict(one.id, "not attempted", words))
