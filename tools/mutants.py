"""Put known bugs into copies of the package, one by one, and see which test notices each.

``python tools/mutants.py [--all] [WORD ...]``, or ``make mutants``: all mutants, or those whose
room and name ("serving: B23 ...") hold one of the words. A table of mutants stands beside the tests
of its room; each mutant names the test that must fail on it, and is tried on that test. With
``--all`` it is tried on all tests of its room, which takes many times as long, and on the random
histories where the room has some, to see what they alone would find; where the tests are slow, on
the named test even then. The exit code is 0 only if every named test failed, and all tests pass on
the unchanged copies.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import decoder_mutants, paging_mutants, serving_mutants, triton_mutants  # noqa: E402

TABLES = (paging_mutants, serving_mutants, decoder_mutants, triton_mutants)

# Of the package: a mutant in each, tried side by side.
COPIES = 2

# For the tests of one mutant, which take a minute at most on a busy machine.
LIMIT_SECONDS = 300

# Shrinking a counterexample takes long, and nobody reads it here.
_HISTORIES = """
from hypothesis import Phase, settings
settings.register_profile("mutants", derandomize=True, deadline=None, phases=[Phase.generate])
settings.load_profile("mutants")
from {module} import run_histories
run_histories()
"""


def start(package: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start Python on the package in ``package``, ahead of the installed one."""
    path = os.pathsep.join([str(package), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def failures(
    package: Path, table: ModuleType, killer: str = "", histories_too: bool = True
) -> tuple[list[str], bool]:
    """Return the names of the tests that fail, in order, and whether random histories fail.

    Parameters: ``killer`` how the name of the test begins that is run (none: all of the table's).
    """
    # Both at once: each uses one core.
    has_histories = histories_too and table.HISTORIES
    script = _HISTORIES.format(module=table.HISTORIES) if has_histories else ""
    histories = start(package, "-c", script)
    plugins = ("-p", "no:cacheprovider", "-p", "no:nbval")
    words = ("-m", "pytest", "-v", "--tb=no", *plugins, *table.TESTS)
    words += ("-k", killer) if killer else ()
    tests = start(package, *words, **getattr(table, "ENVIRONMENT", {}))
    output, in_time = finished(tests)
    names = re.findall(r"^\S+::(\w+).* (?:FAILED|ERROR) +\[", output, re.MULTILINE)
    random_fails = not finished(histories)[1] or histories.returncode != 0
    if in_time and (tests.returncode not in (0, 1) or bool(names) != bool(tests.returncode)):
        raise RuntimeError(f"pytest broke off:\n{output}")
    return list(dict.fromkeys(names)), random_fails


def finished(process: subprocess.Popen[str]) -> tuple[str, bool]:
    """Return what a process printed, and whether it ended within ``LIMIT_SECONDS``.

    A bug can keep an engine busy for ever; the tests that failed before count all the same.
    """
    try:
        return process.communicate(timeout=LIMIT_SECONDS)[0], True
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"broken off after {LIMIT_SECONDS} s: {process.args!r}", flush=True)
        return process.communicate()[0], False


def mutated(text: str, mutant: paging_mutants.Mutant) -> str:
    """Return a source text with the changes of a mutant in it."""
    for before, after in mutant.changes:
        if text.count(before) != 1:
            raise ValueError(f"{mutant.name}: {mutant.file} must hold {before!r} exactly once")
        text = text.replace(before, after)
    return text


def is_chosen(name: str, words: list[str]) -> bool:
    """Return whether a mutant of this name is asked for."""
    return not words or any(word in name for word in words)


def copied(folder: Path) -> Path:
    """Copy the package into a folder, make sure that it is what runs from there, and return it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "servelab", folder / "servelab", ignore=ignored)
    where = "import servelab; print(servelab.__file__)"
    found, _ = start(folder, "-c", where).communicate()
    if Path(found.strip()).parent != folder / "servelab":
        raise RuntimeError(f"not the copy is what runs, but {found}")
    return folder


def tried(
    package: Path, table: ModuleType, mutant: paging_mutants.Mutant, on_all: bool
) -> tuple[list[str], bool]:
    """Put a mutant into a copy, return what `failures` finds, and take it out again."""
    file = package / "servelab" / table.ROOM / mutant.file
    text = file.read_text(encoding="utf-8")
    file.write_text(mutated(text, mutant), encoding="utf-8")
    named_only = not on_all or getattr(table, "NAMED_ONLY", False)
    found = failures(package, table, mutant.killer if named_only else "", on_all)
    file.write_text(text, encoding="utf-8")
    return found


def main(words: list[str]) -> int:
    """Try the mutants; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="of the names of the mutants to try")
    parser.add_argument("--all", action="store_true", help="on all tests and random histories")
    asked = parser.parse_args(words)
    survived = by_histories = 0
    chosen = [
        (table, mutant)
        for table in TABLES
        for mutant in table.MUTANTS
        if is_chosen(f"{table.ROOM}: {mutant.name}", asked.words)
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(COPIES) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(COPIES):
            copies.put(copied(Path(folder, str(number))))

        def on_a_copy(task: Callable[..., tuple[list[str], bool]], *of: Any) -> Any:
            package = copies.get()
            try:
                return task(package, *of)
            finally:
                copies.put(package)

        tables = list(dict.fromkeys(table for table, _ in chosen))
        for failed in pool.map(lambda table: on_a_copy(failures, table), tables):
            if any(failed):
                raise RuntimeError(f"without any mutant, tests or histories fail: {failed}")
        trials = pool.map(lambda one: on_a_copy(tried, *one, asked.all), chosen)
        for (table, mutant), (names, random) in zip(chosen, trials, strict=True):
            killer = next((name for name in names if name.startswith(mutant.killer)), None)
            survived, by_histories = survived + (killer is None), by_histories + random
            others = f" and {len(names) - 1} more" if killer and len(names) > 1 else ""
            verdict = f"{killer}{others}" if killer else f"SURVIVES {mutant.killer}: {names}"
            seen = "; also in histories" if random else "; not in histories"
            print(
                f"{table.ROOM}: {mutant.name}\n    {verdict}{seen if asked.all else ''}", flush=True
            )
    alone = f"; histories alone found {by_histories}" if asked.all else ""
    print(f"{len(chosen)} mutants, {survived} survived{alone}")
    return 1 if survived or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
