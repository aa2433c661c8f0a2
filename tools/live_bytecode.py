"""Compile what a live page imports; run by Pyodide, since bytecode serves one version of Python.

Without it, a page spends most of its start in compiling Python's own library, which comes as source
(``benchmarks/live_pages.py`` measures the start). It is written below ``/target``, under the names
that the import system looks for: ``python_stdlib.zip/json/__init__.pyc`` instead of the source, and
``servelab.whl/servelab/__pycache__/units.cpython-314.pyc`` beside it.
"""

import importlib
import importlib.util
import pkgutil
import py_compile
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import servelab

TARGET = Path("/target")
STDLIB = Path(next(path for path in sys.path if path.endswith(".zip")))
PACKAGE = Path(servelab.__path__[0])
SOURCES = Path("/sources")
LATER = ("encodings.utf_8_sig",)  # imported by what a page does; a test names what is missing here


def write(source: Path, target: Path, name: str) -> None:
    """Compile a module that is read as ``name``, and never compared with its source."""
    target.parent.mkdir(parents=True, exist_ok=True)
    never = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(source), str(target), name, doraise=True, invalidation_mode=never)


for source in PACKAGE.rglob("*.py"):
    inside = importlib.util.cache_from_source(str(source.relative_to(PACKAGE.parent)))
    write(source, TARGET / "servelab.whl" / inside, str(source))

for module in pkgutil.walk_packages([str(PACKAGE)], "servelab."):
    with suppress(ModuleNotFoundError):  # the answers of chapter 6 need torch
        importlib.import_module(module.name)
for name in LATER:
    importlib.import_module(name)
with zipfile.ZipFile(STDLIB) as archive:
    archive.extractall(SOURCES)
specs = [module.__spec__ for module in sys.modules.values()]
for file in {spec.origin for spec in specs if spec and spec.origin}:  # "frozen" where in Python
    if STDLIB in Path(file).parents:
        inside = str(Path(file).relative_to(STDLIB))
        write(SOURCES / inside, TARGET / "python_stdlib.zip" / f"{inside}c", file)
