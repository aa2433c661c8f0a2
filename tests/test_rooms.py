"""The rooms of the package: each imports only rooms above it, and only the libraries it may."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "servelab"
# From the ground up, with what each may import besides the standard library and the rooms above.
ROOMS: dict[str, set[str]] = {
    "units": set(),
    "markup": set(),
    "hardware": set(),
    "models": set(),
    "roofline": set(),
    "memory": set(),
    "logs": set(),
    "paging": set(),
    "serving": set(),
    "simulation": set(),
    "allocation": set(),
    "explore": set(),
    "live": set(),
    "decoder": {"torch", "numpy", "safetensors", "tokenizers", "triton"},
    "measure": {"torch", "numpy", "vllm"},  # the last in a process of its own
    "plots": {"matplotlib", "numpy"},
    "check": {"torch", "numpy", "nbclient", "nbformat"},
    "cli": {"click"},
}
HEAVY = sorted({"transformers"}.union(*ROOMS.values()))
TOP = {"__init__", "__main__"}  # of the package itself: above no room, so free to import any


def present_rooms() -> list[str]:
    """Rooms that exist: as a module, or as a folder with an __init__."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} - TOP
    return sorted(modules | {path.parent.name for path in PACKAGE.glob("*/__init__.py")})


def files_of(room: str) -> list[Path]:
    module = PACKAGE / f"{room}.py"
    return [module] if module.exists() else sorted((PACKAGE / room).rglob("*.py"))


def imports(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Absolute dotted names a module imports, at any depth, those for type checkers apart."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        yield from imports(node, package)


def imported_by(path: Path) -> set[str]:
    package = ["servelab", *path.relative_to(PACKAGE).parent.parts]
    return set(imports(ast.parse(path.read_text(encoding="utf-8")), package))


def broken_rules(room: str, names: set[str]) -> list[str]:
    """What a room imports and may not."""
    order = list(ROOMS)
    above = set(order[: order.index(room) + 1])
    broken = []
    for name in sorted(names):
        top, *rest = name.split(".")
        if top == "servelab":
            if rest and rest[0] in ROOMS and rest[0] not in above:
                broken.append(f"{name}: {room} stands above {rest[0]}")
        elif top not in sys.stdlib_module_names and top not in ROOMS[room]:
            broken.append(f"{name}: {room} may not import {top}")
    return broken


def test_every_module_is_a_known_room() -> None:
    assert present_rooms(), f"no room in {PACKAGE}"
    assert set(present_rooms()) <= set(ROOMS), "add the room to ROOMS, at its place in the order"


@pytest.mark.parametrize("room", present_rooms())
def test_a_room_imports_only_what_it_may(room: str) -> None:
    broken = {
        str(path.relative_to(PACKAGE)): found
        for path in files_of(room)
        if (found := broken_rules(room, imported_by(path)))
    }
    assert not broken


def test_the_rules_catch_what_they_should() -> None:
    source = "from ..cli import main\nfrom .. import plots\ndef f():\n    import torch\n"
    names = set(imports(ast.parse(source), ["servelab", "roofline"]))
    assert names == {"servelab.cli.main", "servelab.plots", "torch"}
    assert len(broken_rules("roofline", names)) == 3
    assert not broken_rules("decoder", {"torch.nn", "servelab.models.get", "math"})


@pytest.mark.parametrize("room", [r for r in present_rooms() if not ROOMS.get(r, {"unknown"})])
def test_a_calculator_imports_where_only_the_standard_library_is(room: str) -> None:
    script = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ImportError(f"blocked: {{name}}")
sys.meta_path.insert(0, Blocked())
try:
    import numpy
except ImportError:
    import servelab.{room}
else:
    raise SystemExit("the block does not hold")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_page_that_starts_waits_for_no_room_that_its_cells_may_not_need() -> None:
    """In the reader's browser every module that is imported is compiled first."""
    script = "import sys, servelab.live; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    rooms = {name.split(".")[1] for name in done.stdout.split() if name.startswith("servelab.")}
    assert rooms == {"units", "markup", "live"}, done.stderr
