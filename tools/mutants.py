"""Put known bugs into a copy of the package, one by one, and see which test notices each.

``python tools/mutants.py [--named] [WORD ...]``, or ``make mutants``: all mutants, or those whose
room and name ("serving: B23 ...") hold one of the words. A table of mutants stands beside the tests
of its room; each mutant names the test that must fail on it. Where a room has random histories,
they are tried on each mutant too, to see what they alone would find; where its tests are slow, a
mutant is tried on the test that it names, and no other. With ``--named`` all are, which takes a
fraction of the time. The exit code is 0 only if every named test failed, and all tests pass on the
unchanged copy.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import decoder_mutants, paging_mutants, serving_mutants, triton_mutants  # noqa: E402

TABLES = (paging_mutants, serving_mutants, decoder_mutants, triton_mutants)

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
    words = ("-m", "pytest", "-v", "--tb=no", "-p", "no:cacheprovider", *table.TESTS)
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
        print(f"broken off after {LIMIT_SECONDS} s, before the verdict:", flush=True)
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


def main(words: list[str]) -> int:
    """Try the mutants; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="of the names of the mutants to try")
    parser.add_argument("--named", action="store_true", help="only on the test that each names")
    asked = parser.parse_args(words)
    survivors: list[str] = []
    tried = by_histories = 0
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder)
        shutil.copytree(
            ROOT / "src" / "servelab",
            package / "servelab",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for table in TABLES:
            chosen = [m for m in table.MUTANTS if is_chosen(f"{table.ROOM}: {m.name}", asked.words)]
            if not chosen:
                continue
            room = package / "servelab" / table.ROOM
            where = f"import servelab.{table.ROOM} as room; print(room.__file__)"
            found, _ = start(package, "-c", where).communicate()
            if Path(found.strip()).parent != room:
                raise RuntimeError(f"not the copy is what runs, but {found}")
            if any(failed := failures(package, table)):
                raise RuntimeError(f"without any mutant, tests or histories fail: {failed}")
            for mutant in chosen:
                file = room / mutant.file
                text = file.read_text(encoding="utf-8")
                file.write_text(mutated(text, mutant), encoding="utf-8")
                named = asked.named or getattr(table, "NAMED_ONLY", False)
                only = mutant.killer if named else ""
                names, random = failures(package, table, only, not asked.named)
                file.write_text(text, encoding="utf-8")
                tried, by_histories = tried + 1, by_histories + random
                killer = next((name for name in names if name.startswith(mutant.killer)), None)
                if killer is None:
                    survivors.append(mutant.name)
                others = f" and {len(names) - 1} more" if killer and len(names) > 1 else ""
                verdict = f"{killer}{others}" if killer else f"SURVIVES {mutant.killer}: {names}"
                seen = "; also in histories" if random else "; not in histories"
                verdict += "" if asked.named else seen
                print(f"{table.ROOM}: {mutant.name}\n    {verdict}", flush=True)
    alone = "" if asked.named else f"; histories alone found {by_histories}"
    print(f"{tried} mutants, {len(survivors)} survived{alone}")
    return 1 if survivors or not tried else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
