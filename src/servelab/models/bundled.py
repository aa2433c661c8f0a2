"""The models that the book speaks of: published configurations, and the book's own small model."""

import json
from functools import cache
from importlib import resources

from servelab.models.reader import read_config
from servelab.models.spec import ModelSpec
from servelab.units import near_names

_DATA = resources.files("servelab") / "data"
_SMALL = "stories"  # the model that comes with its weights, in a folder of its own


@cache
def names() -> tuple[str, ...]:
    """Return the names of the bundled models; "stories" is the book's small one.

    >>> "qwen3-8b" in names(), "stories" in names()
    (True, True)
    """
    files = [file.name for file in (_DATA / "configs").iterdir()]
    published = [name.removesuffix(".json") for name in files if name.endswith(".json")]
    return tuple(sorted([*published, _SMALL]))


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
    file = _DATA / ("checkpoint/config.json" if name == _SMALL else f"configs/{name}.json")
    return read_config(json.loads(file.read_text(encoding="utf-8")), name)
