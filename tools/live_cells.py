"""Which cells a reader can run in the browser: ``python tools/live_cells.py [CHAPTER ...]``.

A cell *can* be live if it is shown, imports nothing but the standard library and the rooms that
need no more, and takes every name from cells above it that can be live too, bound by no other cell
in between. A live cell carries the tag ``live``; imports stand in cells of their own. Prints each
code cell of the chapters (numbers such as 04; all by default) with its state, and why it cannot be
live if it cannot. The exit code is 1 if a tag is missing or wrong.
"""

from __future__ import annotations

import ast
import builtins
import functools
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import live_assets, notebooks  # noqa: E402

LIVE = "live"
HIDDEN = {"remove-cell", "remove-input"}
# Of the standard library, but not in a browser.
ABSENT = {
    "asyncio",
    "ctypes",
    "multiprocessing",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "threading",
    "tkinter",
}
ONE_LINE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Assert, ast.Delete)


@dataclass
class Cell:
    """A code cell, and what keeps it from being live (nothing if ``why`` is empty)."""

    number: int
    source: str
    tags: frozenset[str]
    why: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        """Whether it carries the tag."""
        return LIVE in self.tags


def modules(tree: ast.Module) -> Iterator[str]:
    """The modules that a cell imports, at any depth; for the package, down to its rooms."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "servelab":
                yield from (f"servelab.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)


def is_stocked(module: str) -> bool:
    """Whether a page's Python has a module."""
    top, *rest = module.split(".")
    if top == "servelab":
        return not rest or rest[0] in live_assets.ROOMS
    return top in sys.stdlib_module_names and top not in ABSENT


def bound_and_needed(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The global names that a statement binds, and those that it needs from elsewhere."""
    source = ast.unparse(statement)
    top = symtable.symtable(source, "<cell>", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    needed = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    tables = list(top.get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        needed |= {s.get_name() for s in table.get_symbols() if s.is_global()}
    for node in ast.walk(statement):
        if isinstance(node, ast.NamedExpr):
            needed.discard(node.target.id)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        needed.add(statement.target.id)
    needed -= set(dir(builtins))
    # In `x = x + 1` the x is an older one; a loop or a function may use what it binds itself.
    return bound, needed if isinstance(statement, ONE_LINE) else needed - bound


def names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The global names that a cell binds, and those that it needs from cells above."""
    bound: set[str] = set()
    missing: set[str] = set()
    for statement in tree.body:
        binds, needs = bound_and_needed(statement)
        missing |= needs - bound
        bound |= binds
    return bound, missing


def examine(code_cells: list[Any]) -> list[Cell]:
    """Examine the code cells of one page, in order."""
    available: set[str] = set()  # names of cells that can be live
    tagged: set[str] = set()  # names of cells that are
    found = []
    for number, code_cell in enumerate(code_cells, start=1):
        cell = Cell(number, code_cell.source, frozenset(code_cell.metadata.get("tags", [])))
        tree = ast.parse(cell.source)
        bound, missing = names(tree)
        imported = sorted({module for module in modules(tree) if not is_stocked(module)})
        if hidden := sorted(cell.tags & HIDDEN):
            cell.why = f"not shown ({', '.join(hidden)})"
        elif imported:
            cell.why = f"imports {', '.join(imported)}"
        elif absent := sorted(missing - available):
            cell.why = f"needs {', '.join(absent)} from cells that cannot be live"
        if cell.is_live:
            cell.faults = faults(cell, tree, missing - tagged)
        available = available - bound if cell.why else available | bound
        tagged = tagged | bound if cell.is_live else tagged - bound
        found.append(cell)
    return found


def faults(cell: Cell, tree: ast.Module, missing: set[str]) -> list[str]:
    """What is wrong with a cell that carries the tag."""
    said = [cell.why] if cell.why else []
    if missing and not cell.why:
        said.append(f"needs {', '.join(sorted(missing))}, which no live cell above it makes")
    kinds = {isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body}
    if kinds == {True, False}:
        said.append("imports beside other code: they stand in a cell of their own")
    return said


@functools.cache
def of_page(stem: str) -> list[Cell]:
    """The code cells of a page, by its stem such as ``chapters/04_kv_cache_memory``."""
    page = notebooks.from_markdown(ROOT / f"{stem}.md")
    return examine([cell for cell in page.cells if cell.cell_type == "code"])


def state(cell: Cell) -> str:
    """One line on a cell."""
    if cell.faults:
        return f"LIVE, BUT {'; '.join(cell.faults)}"
    if cell.is_live:
        return "live"
    return f"- {cell.why}" if cell.why else "CAN BE LIVE, tag missing"


def main(arguments: list[str]) -> int:
    """Print the cells of the chapters asked for."""
    stems = [stem for stem in notebooks.stems() if stem.startswith("chapters/")]
    asked = [s for s in stems if not arguments or s.split("/")[1].startswith(tuple(arguments))]
    if not asked:
        print(f"no such chapter: {', '.join(arguments)}", file=sys.stderr)
        return 2
    wrong = 0
    for stem in asked:
        print(stem)
        for cell in of_page(stem):
            first = cell.source.strip().splitlines()[0] if cell.source.strip() else ""
            print(f"  {cell.number:3d}  {first[:48]:48s}  {state(cell)}")
            wrong += bool(cell.faults) or not (cell.is_live or cell.why)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
