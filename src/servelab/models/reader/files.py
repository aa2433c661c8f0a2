"""From a path to a configuration, and from a wrong file to its name.

Models: a ``config.json`` or a folder that holds one, and the other files of a model folder that are
given by mistake.

Assumes: a configuration is at most 16 MiB; the largest published ones, which list every quantised
matrix, have less than one.

Ignores: which hub or repository it came from, and what stands beside it, but for the quantisation
that ModelOpt writes into ``hf_quant_config.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servelab.models.errors import UnsupportedConfig
from servelab.units import MiB

MAX_FILE_BYTES = 16 * MiB

#: (keys of which one is there, what such a file is).
_OTHER_FILES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("peft_type", "lora_alpha", "base_model_name_or_path"), "an adapter_config.json: it says what "
     "was added to a base model; give that model's config.json"),
    (("added_tokens_decoder", "chat_template", "tokenizer_file", "tokenizer_class",
      "add_bos_token"), "a tokenizer_config.json"),
    (("weight_map",), "a safetensors index"),
    (("image_processor_type", "feature_extractor_type", "processor_class"),
     "a preprocessor_config.json"),
    (("_class_name", "_diffusers_version"), "a configuration of diffusers"),
    (("producer", "quantization"), "an hf_quant_config.json: not the shape of a model"),
    (("do_sample", "max_new_tokens", "temperature", "top_p", "top_k"), "a generation_config.json"),
    (("n_kv_heads", "ffn_dim_multiplier", "multiple_of"), "a params.json of the original release; "
     "give the config.json"),
    (("merges", "added_tokens"), "a tokenizer.json"),
)  # fmt: skip

_VISION = ("patch_size", "image_size", "num_channels")


def load(source: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration as a mapping.

    Parameters: ``source`` a file, a folder that holds a ``config.json``, or the mapping itself.
    Raises: ``UnsupportedConfig`` where it is no JSON object or too large; ``OSError``.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise UnsupportedConfig(
            "config.json", f"must be a path or a mapping, got {type(source).__name__}"
        )
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    config = _json_object(path)
    beside = path.with_name("hf_quant_config.json")  # where ModelOpt puts the quantisation
    if "quantization_config" not in config and beside.is_file():
        stated = _json_object(beside).get("quantization")
        if isinstance(stated, Mapping):
            config["quantization_config"] = {"quant_method": "modelopt", **stated}
    return config


def _json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    with path.open("rb") as file:
        return json_object(file.read(MAX_FILE_BYTES + 1), str(path))


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object of a configuration's bytes; ``name`` stands for them in messages.

    Raises: ``UnsupportedConfig`` where it is no JSON object or too large.

    >>> json_object(b'{"vocab_size": 8}', "the text")
    {'vocab_size': 8}
    """
    if len(content) > MAX_FILE_BYTES:
        raise UnsupportedConfig(
            "config.json", f"{name} is larger than {MAX_FILE_BYTES // MiB} MiB: no configuration is"
        )
    try:
        config = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    except UnsupportedConfig:
        raise
    except RecursionError as error:
        raise UnsupportedConfig("config.json", f"{name} is nested too deeply") from error
    except ValueError as error:  # bad UTF-8, bad JSON, a number of thousands of digits
        raise UnsupportedConfig("config.json", f"{name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedConfig("config.json", f"{name} holds no JSON object")
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object; a key given twice has no meaning."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UnsupportedConfig(twice[:80], "is given twice")
    return found


def name_of_wrong_file(config: Mapping[str, Any]) -> str | None:
    """Return what a file without ``model_type`` is, where it can be told.

    >>> name_of_wrong_file({"peft_type": "LORA", "r": 16}).split(":")[0]
    'an adapter_config.json'
    """
    for marks, what in _OTHER_FILES:
        if any(mark in config for mark in marks):
            return what
    if is_vision(config):
        return "the configuration of a vision model, without a text decoder"
    return None


def is_vision(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration describes an image encoder and no text decoder."""
    return any(mark in config for mark in _VISION) and "vocab_size" not in config
