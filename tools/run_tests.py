"""Prove the book: ``python tools/run_tests.py [STAGE ...]``; all stages by default, in order.

lint       style, format, spelling and types
unit       tests/ and the doctests of the package
notebooks  every cell of every notebook run again, its output compared (nbval, strict)
book       the whole book built from nothing, each warning an error; beside it, what live pages
           compute under Node, and a page made by hand in a browser
site       the built pages: links, anchors, images, no outside host
live       the built pages in a browser, used as a reader uses them

Every stage runs even if an earlier one failed. The last line sums what pytest counted; a check that
is not pytest (a linter, the build) counts as one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import browser  # noqa: E402

BIN = Path(sys.executable).parent
REPORTS = ROOT / "_build" / "junit"
SITE_TESTS = "tests/book/test_site.py"
LIVE_TESTS = "tests/book/test_live.py"
# What needs no built book: Python under Node, and a page made by hand.
SOURCE_TESTS = ("tests/book/test_live_node.py", "tests/book/test_live_page.py")
WORKERS = 2


def command(*words: str, quiet: bool = False) -> int:
    """Run a program of this environment; if quiet, show its output only when it fails."""
    # Two workers share the cores: more threads than cores would only slow both down.
    threads = str(max(1, (os.cpu_count() or 1) // WORKERS))
    # Else every worker of every stage would compile and rewrite all that pytest rewrites: seconds.
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )
    if quiet and done.returncode:
        print(done.stdout)
    return done.returncode


def check(*words: str, quiet: bool = False) -> Counter[str]:
    """Count one program as one test."""
    return Counter({"failed" if command(*words, quiet=quiet) else "passed": 1})


def pytest(report: str, *words: str) -> Counter[str]:
    """Run pytest and count its tests; a run that broke off or found no test counts as failed."""
    path = REPORTS / f"{report}.xml"
    path.unlink(missing_ok=True)
    # Every worker would load all of Jupyter with the plugin, which takes seconds.
    plugins = ("--nbval",) if report == "notebooks" else ("-p", "no:nbval")
    code = command("pytest", "-q", "--no-header", "-ra", f"--junitxml={path}", *plugins, *words)
    count = read_report(path) if path.exists() else Counter()
    if code and not count["failed"]:
        count["failed"] = 1
    return count


def read_report(path: Path) -> Counter[str]:
    """Sum the suites of a junit file into passed, failed and skipped."""
    count: Counter[str] = Counter()
    for suite in ET.parse(path).getroot().iter("testsuite"):
        number = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        failed = number["failures"] + number["errors"]
        count["failed"] += failed
        count["skipped"] += number["skipped"]
        count["passed"] += number["tests"] - failed - number["skipped"]
    return count


def lint() -> Counter[str]:
    return (
        check("ruff", "check", ".")
        + check("ruff", "format", "--check", ".")
        + check("codespell", ".")
        + check("mypy")
    )


def unit() -> Counter[str]:
    return pytest(
        "unit",
        "-n",
        str(WORKERS),
        "--doctest-modules",
        *(f"--ignore={path}" for path in (SITE_TESTS, LIVE_TESTS, *SOURCE_TESTS)),
        "tests",
        "src/servelab",
    )


def notebooks() -> Counter[str]:
    return pytest(
        "notebooks",
        "--nbval-current-env",  # the notebooks name a kernel that this machine may not have
        "--nbval-cell-timeout=120",
        "-n",
        str(WORKERS),
        "--dist=loadscope",  # one notebook, one kernel
        "chapters",
        "solutions",
    )


def book() -> Counter[str]:
    if subprocess.run([sys.executable, "tools/live_assets.py"], cwd=ROOT).returncode:
        return Counter({"failed": 1})
    # From nothing: a page that is not read again would not repeat its warning.
    for folder in ("html", ".doctrees"):
        shutil.rmtree(ROOT / "_build" / folder, ignore_errors=True)
    build = ("jupyter-book", "build", "-W", "-n", "--keep-going", "--quiet", ".")
    # The build takes one core, these tests the other.
    with ThreadPoolExecutor(1) as beside:
        tried = beside.submit(pytest, "sources", *SOURCE_TESTS)
        return check(*build, quiet=True) + tried.result()


def site() -> Counter[str]:
    return pytest("site", "-n", str(WORKERS), "--dist=loadgroup", SITE_TESTS)


def live() -> Counter[str]:
    return pytest("live", "-n", str(WORKERS), "--dist=worksteal", LIVE_TESTS)


STAGES: dict[str, Callable[[], Counter[str]]] = {
    "lint": lint,
    "unit": unit,
    "notebooks": notebooks,
    "book": book,
    "site": site,
    "live": live,
}


def summary(total: Counter[str]) -> str:
    """The closing line: ``N passed, N failed``, and the skipped where there are any."""
    line = f"{total['passed']} passed, {total['failed']} failed"
    return f"{line}, {total['skipped']} skipped" if total["skipped"] else line


def main(asked: list[str]) -> int:
    if unknown := [name for name in asked if name not in STAGES]:
        print(
            f"no such stage: {', '.join(unknown)}; known are {', '.join(STAGES)}", file=sys.stderr
        )
        return 2
    REPORTS.mkdir(parents=True, exist_ok=True)
    total: Counter[str] = Counter()
    times = []
    for name in asked or STAGES:
        print(f"==> {name}", flush=True)
        began = time.perf_counter()
        count = STAGES[name]()
        times.append(f"{name:10s} {time.perf_counter() - began:6.1f} s   {summary(count)}")
        total.update(count)
    print("\n".join(["", *times]))
    if browser.path() is None and "live" in (asked or STAGES):
        print(browser.MISSING)
    print(summary(total), flush=True)
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
