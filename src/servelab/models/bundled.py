"""The models that the book speaks of, read from their published configurations."""

import json
from functools import cache
from importlib import resources

from servelab.models.reader import read_config
from servelab.models.spec import ModelSpec
from servelab.units import near_names

_FOLDER = resources.files("servelab") / "data/configs"


@cache
def names() -> tuple[str, ...]:
    """Return the names of the bundled models.

    >>> "qwen3-8b" in names()
    True
    """
    return tuple(
        sorted(f.name.removesuffix(".json") for f in _FOLDER.iterdir() if f.name.endswith(".json"))
    )


def get(name: str) -> ModelSpec:
    """Return a bundled model.

    Raises: ``KeyError`` for an unknown name; the message lists near ones.

    >>> get("llama-3-8b").params_total
    8030261248
    >>> get("llama")
    Traceback (most recent call last):
    ...
    KeyError: "no bundled model 'llama'; near: llama-2-7b, llama-3-70b, llama-3-8b"
    """
    if name not in names():
        raise KeyError(f"no bundled model {name!r}; near: {near_names(name, names())}")
    return _read(name)


@cache
def _read(name: str) -> ModelSpec:
    return read_config(json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8")), name)
