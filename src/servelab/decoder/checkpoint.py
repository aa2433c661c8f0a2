"""Reading a published checkpoint: ``config.json``, safetensors in one file or many, a tokenizer.

Models: a folder as the transformers library saves it (version 5, and the older keys of the hub):
the families llama, mistral, qwen2 and qwen3. Whatever would change the result and is not known here
is refused, with the key and the value.

Assumes: weights in safetensors. Pickled files and code from the folder are never run.

Ignores: chat templates, and settings of training and generation, but for the end of a sequence.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from servelab.decoder.rope import Llama3Scaling, Rope
from servelab.models import ModelSpec, UnsupportedConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The small model that comes with the package; its README says how it was made.
BUNDLED_CHECKPOINT = Path(str(resources.files("servelab"))) / "data/checkpoint"

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Number formats of weights, by the names of the calculators.
DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
_STORED = ("F64", "F32", "F16", "BF16")  # the same, as safetensors call them
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class BadCheckpoint(ValueError):
    """Weights that are missing, surplus, damaged, of the wrong shape or in an unknown format."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose configuration has been read, and whose weights have been found.

    Parameters: ``folder``; ``spec``, ``rope``, ``norm_eps`` of the model; ``dtype`` of the stored
    weights; ``eos_token_ids`` that end a sequence; ``files`` the file of each tensor.

    >>> stored = Checkpoint.open(BUNDLED_CHECKPOINT)
    >>> stored.spec.params_total, stored.dtype, stored.eos_token_ids
    (1609440, torch.bfloat16, frozenset({1}))
    """

    folder: Path
    spec: ModelSpec
    rope: Rope
    norm_eps: float
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    files: Mapping[str, Path] = field(repr=False)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Return the checkpoint in a folder; weights are not read yet.

        Raises: ``UnsupportedConfig`` for a configuration that is not understood; ``BadCheckpoint``;
        ``OSError`` where a file is missing.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} is no folder with a config.json; "
                "the bundled model is servelab.decoder.BUNDLED_CHECKPOINT"
            )
        config = _json(folder / "config.json")
        family = config.get("model_type")
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UnsupportedConfig("model_type", f"{family!r} is not decoded here; known: {known}")
        for key in ("quantization_config", "quantization"):
            if config.get(key) is not None:
                raise UnsupportedConfig(key, f"quantised weights are not read: {config[key]!r}")
        _expect(config, "hidden_act", "silu", "swish")
        _expect(config, "partial_rotary_factor", 1)
        _expect(config, "rope_interleaved", False)
        spec = ModelSpec.from_config(config, name=folder.name)
        spec.require_parameters()
        return cls(
            folder=folder,
            spec=spec,
            rope=read_rope(config),
            norm_eps=_number(config, "rms_norm_eps", 1e-6),  # the default of all four families
            dtype=_dtype(spec),
            eos_token_ids=_eos(config, folder / "generation_config.json"),
            files=_files(folder),
        )

    def load_into(self, weights: Mapping[str, Tensor]) -> None:
        """Fill ``weights``, tensors by their published names, converting to their dtype.

        Everything is compared before anything is copied. A tied model may have stored its lm_head
        too; it must equal the embedding.
        Raises: ``BadCheckpoint``.
        """
        repeated = self.check(weights)
        with torch.no_grad():
            # Each file is opened for each tensor: as long as it is mapped, every page that was read
            # counts as this process's memory, and loading would take twice the weights.
            for name, wanted in weights.items():
                with _opened(self.files[name]) as file:
                    wanted.copy_(file.get_tensor(name))
            if repeated:
                embedding = weights["model.embed_tokens.weight"]
                with _opened(self.files["lm_head.weight"]) as file:
                    head = file.get_tensor("lm_head.weight").to(embedding)
                if not torch.equal(head, embedding):
                    raise BadCheckpoint(
                        f"{self.folder}: tie_word_embeddings is true, "
                        f"but lm_head.weight is not model.embed_tokens.weight"
                    )

    def check(self, weights: Mapping[str, Tensor]) -> bool:
        """Return whether the files hold lm_head beside ``weights``, which must all be there.

        Parameters: ``weights`` as ``load_into`` would fill, perhaps on the meta device: a wrong
        configuration may ask for more memory than there is.
        Raises: ``BadCheckpoint`` for other names, shapes or number formats.
        """
        stored = {name for name in self.files if not name.endswith("rotary_emb.inv_freq")}
        repeated = self.spec.tied_embeddings and "lm_head.weight" in stored
        if missing := sorted(set(weights) - stored):
            raise BadCheckpoint(f"{self.folder}: {_some(missing)} missing from the weights")
        if surplus := sorted(stored - set(weights) - ({"lm_head.weight"} if repeated else set())):
            raise BadCheckpoint(
                f"{self.folder}: {_some(surplus)} in the weights, but not the model"
            )
        for name, wanted in weights.items():
            with _opened(self.files[name]) as file:
                part = file.get_slice(name)
                found, shape, dtype = tuple(part.get_shape()), tuple(wanted.shape), part.get_dtype()
            if dtype not in _STORED:
                known = ", ".join(_STORED)
                raise BadCheckpoint(f"{name}: weights in {dtype} are not read; known: {known}")
            if found != shape:
                raise BadCheckpoint(f"{name} must have shape {shape}, its file has {found}")
        return repeated

    def tokenizer(self) -> TextTokenizer | None:
        """Return the tokenizer of ``tokenizer.json``, None where there is none."""
        path = self.folder / "tokenizer.json"
        return TextTokenizer(path) if path.is_file() else None


class TextTokenizer:
    """Text to token ids and back, by the tokenizers library.

    Parameters: ``path`` of a ``tokenizer.json``. Its truncation and padding are those of training,
    and turned off: a prompt counts as it is.
    Raises: ``BadCheckpoint``.
    """

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer

        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise BadCheckpoint(f"{Path(path).name} is not read: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, with what the model expects in front of a prompt.

        Raises: ``ValueError`` for text that is no UTF-8: half a surrogate pair.
        """
        text.encode()
        return list(self.tokenizer.encode(text).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``, special tokens left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Return the rotary positions of a configuration, in the keys of either time.

    Raises: ``UnsupportedConfig`` for a scaling other than llama3, or a contradiction.

    >>> read_rope({"rope_theta": 500000.0, "rope_scaling": None})
    Rope(theta=500000.0, scaling=None)
    >>> read_rope({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}})
    Traceback (most recent call last):
    ...
    servelab.models.errors.UnsupportedConfig: rope_parameters: rope_type 'yarn' is not decoded ...
    """
    given = [key for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None]
    if len(given) == 2 and config[given[0]] != config[given[1]]:
        raise UnsupportedConfig("rope_scaling", "contradicts rope_parameters")
    key = given[0] if given else "rope_scaling"
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise UnsupportedConfig(key, f"must be an object, got {section!r}")
    thetas = {
        _number(part, "rope_theta", 10_000.0) for part in (section, config) if "rope_theta" in part
    }
    if len(thetas) > 1:
        raise UnsupportedConfig("rope_theta", f"has two values: {sorted(thetas)}")
    theta = thetas.pop() if thetas else 10_000.0  # the default of all four families
    _expect(section, "partial_rotary_factor", 1)
    kinds = [section[name] for name in ("rope_type", "type") if section.get(name) is not None]
    kind = None
    if kinds and kinds[0] == kinds[-1]:
        kind = kinds[0]
    elif not section.keys() - {"rope_theta"}:
        kind = "default"
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise UnsupportedConfig(
            key, f"rope_type {kind!r} is not decoded here; known: 'default', 'llama3'"
        )
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [name for name in names if name not in section]:
        raise UnsupportedConfig(key, f"llama3 needs {', '.join(missing)}")
    try:
        return Rope(theta, Llama3Scaling(*(section[name] for name in names)))
    except (TypeError, ValueError) as error:
        raise UnsupportedConfig(key, str(error)) from error


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise BadCheckpoint(f"{path.parent}: {path.name} is missing")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise BadCheckpoint(f"{path.name} is damaged or cut short: {error}") from error


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor: by the index, or all that the one file holds."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = _json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
            raise BadCheckpoint(f"{index.name} has no weight_map from tensors to files")
        found = {name: folder / file for name, file in names.items()}
        for path in sorted(set(found.values())):
            if path.parent != folder:
                raise BadCheckpoint(f"{index.name} leads out of its folder: {path}")
            with _opened(path) as file:
                held, listed = set(file.keys()), {n for n, f in found.items() if f == path}
            if held != listed:
                raise BadCheckpoint(
                    f"{path.name} and {index.name} differ in {_some(sorted(held ^ listed))}"
                )
        return found
    if single.is_file():
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if others:
        raise BadCheckpoint(
            f"{folder} has its weights only as {_some(others)}: such files can run code when they "
            f"are read, so they are not; convert them to model.safetensors"
        )
    raise BadCheckpoint(f"{folder} has neither {single.name} nor {index.name}")


def _eos(config: Mapping[str, Any], generation: Path) -> frozenset[int]:
    """Return the token ids that end a sequence: of generation_config.json, else config.json."""
    stated = _json(generation).get("eos_token_id") if generation.is_file() else None
    stated = config.get("eos_token_id") if stated is None else stated
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UnsupportedConfig("eos_token_id", f"must be a token id or a list, got {stated!r}")
    return frozenset(ids)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
        raise BadCheckpoint(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path.name} must hold an object, got {type(content).__name__}")
    return content


def _dtype(spec: ModelSpec) -> torch.dtype:
    if spec.weight_dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise UnsupportedConfig("dtype", f"{spec.weight_dtype} is not decoded here; known: {known}")
    return DTYPES[spec.weight_dtype]


def _expect(config: Mapping[str, Any], key: str, *allowed: object) -> None:
    value = config.get(key)
    if value is not None and value not in allowed:
        raise UnsupportedConfig(key, f"{value!r} is not decoded here; known: {allowed[0]!r}")


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise UnsupportedConfig(key, f"must be a positive number, got {value!r}")
    return float(value)


def _some(names: list[str]) -> str:
    """Return the first few of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
