"""Run the code of a cell in the namespace of its page, and keep what it shows.

Models: a cell shows what a notebook would: what it prints, then the value of a last expression, as
HTML where the value offers it, else as its repr. An error shows its message and the lines of the
reader's own code that led to it; lines of this package and of the standard library are left out.

Assumes: whoever runs a cell may run any code there; this is no sandbox, the browser is.

Ignores: magics, top-level await, and displays other than the last value. What is more than
``TEXT_LIMIT`` characters of text or ``HTML_LIMIT`` of HTML is cut, and said to be.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import traceback
from dataclasses import dataclass
from typing import Any, Literal

#: Characters of text, and of HTML, that one cell may show.
TEXT_LIMIT = 64 * 1024
HTML_LIMIT = 1_000_000

_MESSAGE_LIMIT = 2_000
_LINE_LIMIT = 200
_FRAMES = 6  # of the reader's code: the last ones say where it happened
_NAME = "<cell"  # begins the file name of each cell


@dataclass(frozen=True)
class Output:
    """Something that a cell shows: text, HTML, an error, or a note of ours about the others."""

    kind: Literal["text", "html", "error", "note"]
    content: str


class _Printed(io.TextIOBase):
    """Keeps the first characters that are printed, and knows whether there were more."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.room = TEXT_LIMIT
        self.cut = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.cut = self.cut or len(text) > self.room
        if self.room and text:
            self.kept.append(text[: self.room])
            self.room -= len(self.kept[-1])
        return len(text)


def run(source: str, namespace: dict[str, Any], number: int = 1) -> list[Output]:
    """Run ``source`` in ``namespace`` and return what it shows, in order.

    Parameters: ``number`` of the cell, in the messages of its errors.

    >>> page = {}
    >>> run("n = 4\\nprint('n is', n)\\nn * 2", page)
    [Output(kind='text', content='n is 4\\n'), Output(kind='text', content='8')]
    >>> [error] = run("n / 0", page)
    >>> print(error.content)
    Line 1: n / 0
    ZeroDivisionError: division by zero
    """
    name = f"{_NAME} {number}>"
    printed = _Printed()
    last: list[Output] = []
    try:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            value = _execute(source, name, namespace)
            if value is not None:
                last = _shown(value)
    except BaseException as error:  # the reader's code may raise anything, SystemExit too
        last = [Output("error", _said(error, name))]
    outputs = [Output("text", "".join(printed.kept))] if printed.kept else []
    if printed.cut:
        outputs.append(Output("note", f"Cut here: a cell may print {TEXT_LIMIT:,} characters."))
    return outputs + last


def _execute(source: str, name: str, namespace: dict[str, Any]) -> object:
    """Run the statements; return the value of the last one if it is an expression."""
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec"), namespace)
        return None
    tree.body.pop()
    exec(compile(tree, name, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace)


def _shown(value: object) -> list[Output]:
    make_html = None if isinstance(value, type) else getattr(value, "_repr_html_", None)
    # Some objects answer to every name, with anything: only text is HTML.
    if callable(make_html) and isinstance(html := make_html(), str):
        if len(html) <= HTML_LIMIT:
            return [Output("html", html)]
        return [
            Output("note", f"Not shown: {len(html):,} characters of HTML; {HTML_LIMIT:,} may be.")
        ]
    text = repr(value)
    if len(text) <= TEXT_LIMIT:
        return [Output("text", text)]
    note = Output("note", f"Cut here: the value has {len(text):,} characters.")
    return [Output("text", text[:TEXT_LIMIT]), note]


def _said(error: BaseException, name: str) -> str:
    """Return the lines of the reader's code that led to an error, then its message."""
    try:
        return "\n".join([*_places(error, name), _cut(_message(error), _MESSAGE_LIMIT)])
    except BaseException:  # the error is the reader's own: its attributes and texts may fail
        return "an error that cannot be shown"


def _places(error: BaseException, name: str) -> list[str]:
    if isinstance(error, SyntaxError) and str(error.filename).startswith(_NAME):
        return [_place(f"Line {error.lineno}", str(error.text or ""))]
    # Not extract_tb: it searches the line for the place of the error, for long ones very long.
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith(_NAME)
    ]
    places = []
    for code, line in frames[-_FRAMES:]:
        inside = "" if code.co_name == "<module>" else f" in {code.co_name}"
        cell = "" if code.co_filename == name else f" of cell {code.co_filename[6:-1]}"
        text = linecache.getline(code.co_filename, line)
        places.append(_place(f"Line {line}{cell}{inside}", text))
    if len(frames) > _FRAMES:
        places.insert(0, f"({len(frames) - _FRAMES} earlier lines left out)")
    return places


def _place(where: str, line: str) -> str:
    return f"{where}: {_cut(line.strip(), _LINE_LIMIT)}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + " …"


def _message(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            f"ModuleNotFoundError: no module {error.name!r} here; a page has the standard library "
            "and the calculators of servelab"
        )
    if isinstance(error, SyntaxError) and str(error.filename).startswith(_NAME):
        return f"{type(error).__name__}: {error.msg}"
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # the error's own __str__ may fail
        return type(error).__name__
