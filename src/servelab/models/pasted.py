"""A model from what somebody types: the name of a bundled one, or the text of a config.json.

Models: text that begins with a brace is a configuration; all else is a name.

Assumes: nothing is downloaded.

Ignores: paths; `ModelSpec.from_config` reads files.
"""

from functools import lru_cache

from servelab.models.bundled import get
from servelab.models.errors import UnsupportedConfig
from servelab.models.reader import read_config
from servelab.models.reader.files import json_object
from servelab.models.spec import ModelSpec


@lru_cache(maxsize=32)
def parse(text: str) -> ModelSpec:
    """Return the model that ``text`` names or describes.

    Parameters: ``text`` the name of a bundled model, or a whole ``config.json``.
    Raises: ``KeyError`` for an unknown name, ``UnsupportedConfig`` for a configuration that is no
    JSON object or cannot be read without guessing.

    >>> parse("llama-3-8b").kv_bytes_per_token()
    131072
    >>> parse('{"model_type": "llama"}')
    Traceback (most recent call last):
    ...
    servelab.models.errors.UnsupportedConfig: hidden_size: is missing
    """
    if not isinstance(text, str):
        raise TypeError(f"a model is given as text, got {text!r:.80} ({type(text).__name__})")
    if not text.strip():
        raise UnsupportedConfig("config.json", "is empty: paste the whole file")
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        return read_config(json_object(text.encode("utf-8", "replace"), "the text"))
    return get(text.strip())
