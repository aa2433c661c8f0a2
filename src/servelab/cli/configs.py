"""Which model is meant: a file, a folder, standard input, or the name of a bundled one.

Models: the order of looking, and what to say, with the nearest right thing, where nothing is found.

Assumes: a path that exists is meant before a bundled model of the same name.

Ignores: what the configuration says; that is the reader's business (`servelab.models.reader`).
"""

import difflib
import sys
import tempfile
from pathlib import Path

from servelab import models
from servelab.models import ModelSpec, UnsupportedConfig
from servelab.models.reader.files import MAX_FILE_BYTES
from servelab.units import near_names


def read_model(text: str) -> ModelSpec:
    """Return the model of a file, a folder, ``-`` for standard input, or a bundled name.

    Raises: ``ValueError`` where it cannot be read, with the nearest right thing.
    """
    if text == "-":
        return _from_stdin()
    path = Path(text)
    try:
        if path.is_dir():
            return _from_folder(path)
        if path.exists():
            _check_text(path)
            return ModelSpec.from_config(path, _label(path))
        if text in models.names():
            return models.get(text)
    except OSError as error:
        raise ValueError(f"{text}: {error.strerror or error}") from error
    raise ValueError(_no_model(text, path))


def _check_text(path: Path) -> None:
    """Refuse what is no text at all, weights above all, before anything tries to read it."""
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(4096)
        if not start.strip():
            raise ValueError(f"{path} is empty")
        if b"\0" in start:
            raise ValueError(f"{path} is a binary file; give the config.json that lies beside it")


def _label(path: Path) -> str | None:
    """Return a name for a model from where its file lies."""
    return (path.resolve().parent.name if path.stem == "config" else path.stem) or None


def _from_folder(folder: Path) -> ModelSpec:
    if not (folder / "config.json").exists():
        near = [str(p) for p in (*folder.glob("*/config.json"), *folder.glob("*.json"))][:3]
        hint = f"; near: {', '.join(sorted(near))}" if near else ""
        raise ValueError(f"the folder {folder} holds no config.json{hint}")
    return ModelSpec.from_config(folder, folder.resolve().name or None)


def _from_stdin() -> ModelSpec:
    """Read standard input by way of a file, so that the reader's own checks apply to it."""
    content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    if not content.strip():
        raise ValueError("standard input is empty; write it like: servelab kv - < config.json")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_bytes(content)
        try:
            return ModelSpec.from_config(path)
        except UnsupportedConfig as error:
            why = error.why.replace(str(path), "standard input")
            raise UnsupportedConfig(error.key, why) from None


def no_file(path: Path) -> str:
    """Return that there is no such file, with the names beside it that are near."""
    siblings = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=3)
    found = "; near: " + ", ".join(str(path.parent / name) for name in near) if near else ""
    return f"no file {str(path)!r}{found}"


def _no_model(text: str, path: Path) -> str:
    """Return that there is neither a file nor a model of that name, and what there is."""
    if path.suffix == ".json" or (path.parent != Path(".") and path.parent.exists()):
        return no_file(path)
    near = near_names(text.rsplit("/", 1)[-1], models.names())
    download = "; nothing is downloaded: give its config.json" if "/" in text else ""
    return f"no file and no bundled model {text!r}{download}; near: {near}"
