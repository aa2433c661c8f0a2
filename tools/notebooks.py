"""Generate and execute the notebook of each Markdown page: ``notebooks.py [STEM ...]``.

A page is a pair: ``NAME.md`` (MyST, edited and reviewed) and ``NAME.ipynb`` (made here, committed
with its outputs, shown by the book and compared by nbval). Two runs give the same bytes: cell ids
are counted, no times are stored, and the outputs of cells tagged ``nbval-ignore-output``
(measurements of this machine) are carried over while the source of the cell is unchanged, unless
``--refresh`` is given. A notebook that fails keeps its old file.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("chapters", "solutions")
RECORD = "chapters/_status.json"
STATUS_PAGE = "chapters/92_status"  # reads the record, so it runs last and is not in the record
README_FIGURE = ("chapters/02_the_roofline", "fig-c2-roofline", "_static/roofline.png")
CELL_TIMEOUT_SECONDS = 120
NOTEBOOK_LIMIT_SECONDS = 60
IGNORED, STDERR_ALLOWED, RAISES = "nbval-ignore-output", "stderr-expected", "raises-exception"
METADATA = {
    "jupytext": {"text_representation": {"extension": ".md", "format_name": "myst"}},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
RECORDED_PACKAGES = ("torch", "numpy", "matplotlib", "jupyter-book")


@dataclass
class Run:
    """What executing one page gave: its seconds, and the notebook's text or what went wrong."""

    stem: str
    seconds: float
    text: str = ""
    error: str = ""


def stems(root: Path = ROOT) -> list[str]:
    """Every page with cells, as ``folder/name``, in the order of the folders' file names."""
    return [
        f"{folder}/{path.stem}"
        for folder in FOLDERS
        for path in sorted((root / folder).glob("*.md"))
    ]


def from_markdown(path: Path) -> Any:
    """The notebook that a Markdown page stands for, not yet executed."""
    notebook = jupytext.read(path)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
    return notebook


def has_tag(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def carry_over(old: Any, new: Any) -> None:
    """Put the stored outputs of ignored cells into `new` where their source is unchanged."""
    stored: dict[str, list[Any]] = {}
    for cell in old.cells:
        if cell.cell_type == "code" and has_tag(cell, IGNORED) and cell.outputs:
            stored.setdefault(cell.source, []).append(cell.outputs)
    for cell in new.cells:
        if cell.cell_type == "code" and has_tag(cell, IGNORED) and stored.get(cell.source):
            cell.outputs = stored[cell.source].pop(0)
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count


def complaint(notebook: Any) -> str:
    """The first output that may not stand in the book: an error or a warning nobody announced."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            what = ""
            if output.output_type == "error" and not has_tag(cell, RAISES):
                what = "\n".join(output.traceback)
            elif output.get("name") == "stderr" and not has_tag(cell, STDERR_ALLOWED):
                what = f"stderr (if it is meant, tag the cell {STDERR_ALLOWED!r}):\n{output.text}"
            if what:
                return f"cell {number}:\n{cell.source}\n{'-' * 40}\n{what}"
    return ""


def execute(stem: str, refresh: bool = False, root: Path = ROOT) -> Run:
    """Execute one page in its own folder and return its notebook as text; writes nothing."""
    began = time.perf_counter()
    notebook = from_markdown(root / f"{stem}.md")
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_TIMEOUT_SECONDS,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str((root / stem).parent)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # else each start warns about TCP
    )
    error = ""
    try:
        client.execute()
    except Exception as failure:  # a cell, its time limit or the kernel: this notebook failed
        error = complaint(notebook) or str(failure)
    seconds = time.perf_counter() - began
    error = error or complaint(notebook)
    if error:
        return Run(stem, seconds, error=error)
    notebook.metadata = nbformat.from_dict(METADATA)  # the kernel added its version
    target = root / f"{stem}.ipynb"
    if target.exists() and not refresh:
        carry_over(nbformat.read(target, as_version=4), notebook)
    return Run(stem, seconds, text=nbformat.writes(notebook, version=4) + "\n")


def machine() -> str:
    """The processor and its cores, and the GPU if there is one; never the machine's name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    processor = found.group(1).strip() if found else platform.processor() or platform.machine()
    text = f"{processor}, {os.cpu_count()} cores"
    import torch  # slow to load, and needed only when a record is written

    return f"{text}, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else text


def record(runs: list[Run], root: Path = ROOT) -> None:
    """Write seconds, date, machine and versions of these runs into the record."""
    path = root / RECORD
    notebooks = json.loads(path.read_text())["notebooks"] if path.exists() else {}
    known = set(stems(root))
    versions = {name: importlib.metadata.version(name) for name in RECORDED_PACKAGES}
    versions["torch"] = versions["torch"].split("+")[0]
    entry = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions},
    }
    for run in runs:
        notebooks[run.stem] = {"seconds": round(run.seconds, 1), **entry}
    kept = {stem: notebooks[stem] for stem in sorted(notebooks) if stem in known}
    path.write_text(json.dumps({"notebooks": kept}, indent=1) + "\n")


def figure(notebook: Any, name: str) -> bytes:
    """The PNG of the figure that the book knows under a name."""
    for cell in notebook.cells:
        if cell.metadata.get("mystnb", {}).get("figure", {}).get("name") == name:
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    return base64.b64decode(output.data["image/png"])
    raise ValueError(f"no cell of the notebook shows a figure named {name!r}")


def store(run: Run, refresh: bool, root: Path = ROOT) -> bool:
    """Report one run, write its notebook if the bytes differ; say if the record is due."""
    if run.error:
        print(f"  {run.stem:40s} FAILED after {run.seconds:.1f} s, {run.error}\n", flush=True)
        return False
    target = root / f"{run.stem}.ipynb"
    changed = not target.exists() or target.read_text() != run.text
    if changed:
        target.write_text(run.text)
    stem, name, picture = README_FIGURE
    if run.stem == stem:
        (root / picture).write_bytes(figure(nbformat.reads(run.text, as_version=4), name))
    slow = f"  (over {NOTEBOOK_LIMIT_SECONDS} s)" if run.seconds > NOTEBOOK_LIMIT_SECONDS else ""
    print(
        f"  {run.stem:40s} {run.seconds:6.1f} s  {'written' if changed else 'unchanged'}{slow}",
        flush=True,
    )
    return changed or refresh


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate and execute the notebooks of the book.")
    parser.add_argument("stems", nargs="*", help="pages, as folder/name; all by default")
    parser.add_argument("--refresh", action="store_true", help="store new measurements too")
    options = parser.parse_args(arguments)
    asked = [re.sub(r"\.(md|ipynb)$", "", stem) for stem in options.stems] or stems()
    if unknown := set(asked) - set(stems()):
        parser.error(f"no such page: {', '.join(sorted(unknown))}; known are {', '.join(stems())}")

    # Measurements are stored afresh only with --refresh: then nothing else may use the processor.
    workers = 1 if options.refresh else 2
    first = [stem for stem in asked if stem != STATUS_PAGE]
    runs, due = [], []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(execute, stem, options.refresh) for stem in first]:
            runs.append(run := future.result())
            if store(run, options.refresh):
                due.append(run)
    if due:
        record(due)
    if STATUS_PAGE in stems() and (due or STATUS_PAGE in asked):
        runs.append(execute(STATUS_PAGE, options.refresh))
        store(runs[-1], options.refresh)
    failed = sum(bool(run.error) for run in runs)
    print(f"{len(runs) - failed} notebooks ran, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
