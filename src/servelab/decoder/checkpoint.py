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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
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
        _expect(config, "model_type", *FAMILIES)
        _expect(config, "quantization_config", None)
        _expect(config, "quantization", None)
        _expect(config, "hidden_act", "silu", "swish", None)
        _expect(config, "partial_rotary_factor", 1, None)
        _expect(config, "rope_interleaved", False, None)
        spec = ModelSpec.from_config(config, name=folder.name)
        spec.require_parameters()
        _expect({"dtype": spec.weight_dtype}, "dtype", *DTYPES)
        return cls(
            folder=folder,
            spec=spec,
            rope=read_rope(config),
            norm_eps=_number(config, "rms_norm_eps", 1e-6),  # the default of all four families
            dtype=DTYPES[spec.weight_dtype],
            eos_token_ids=_eos(config, folder / "generation_config.json"),
            files=_files(folder),
        )

    def load_into(self, weights: Mapping[str, Tensor]) -> None:
        """Fill ``weights``, tensors by their published names, converting to their dtype.

        Everything is compared before anything is copied. A tied model may have stored its lm_head
        too; it must equal the embedding.
        Raises: ``BadCheckpoint``.
        """
        self.check(weights)
        with torch.no_grad():
            # Each file is opened for each tensor: as long as it is mapped, every page that was read
            # counts as this process's memory, and loading would take twice the weights.
            for name, wanted in weights.items():
                with _opened(self.files[name]) as file:
                    wanted.copy_(file.get_tensor(name))
        if self.spec.tied_embeddings and "lm_head.weight" in self.files:
            embedding = weights["model.embed_tokens.weight"]
            with _opened(self.files["lm_head.weight"]) as file:
                head = file.get_tensor("lm_head.weight").to(embedding)
            if not torch.equal(head, embedding):
                raise BadCheckpoint(
                    f"{self.folder}: tie_word_embeddings is true, "
                    f"but lm_head.weight is not model.embed_tokens.weight"
                )

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Compare ``weights``, as ``load_into`` would fill them, with what the files hold.

        They may be on the meta device: a wrong configuration may ask for more memory than there is.
        Raises: ``BadCheckpoint`` for other names, shapes or number formats.
        """
        stored = {name for name in self.files if not name.endswith("rotary_emb.inv_freq")}
        twice = {"lm_head.weight"} if self.spec.tied_embeddings else set()
        if missing := sorted(set(weights) - stored):
            raise BadCheckpoint(f"{self.folder}: {_some(missing)} missing from the weights")
        if surplus := sorted(stored - set(weights) - twice):
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
    servelab.models.errors.UnsupportedConfig: rope_type: 'yarn' is not decoded here; known: ...
    """
    key = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    section = _agreed(key, config.get("rope_parameters"), config.get("rope_scaling"), {})
    if not isinstance(section, Mapping):
        raise UnsupportedConfig(key, f"must be an object, got {section!r}")
    _expect(section, "partial_rotary_factor", 1, None)
    theta = _agreed("rope_theta", section.get("rope_theta"), config.get("rope_theta"), 10_000.0)
    theta = _number({"rope_theta": theta}, "rope_theta", theta)
    plain = None if section.keys() - {"rope_theta"} else "default"
    kind = _agreed("rope_type", section.get("rope_type"), section.get("type"), plain)
    _expect({"rope_type": kind}, "rope_type", "default", "llama3")
    try:
        if kind == "default":
            return Rope(theta)
        scaling: dict[str, Any] = {own.name: section.get(own.name) for own in fields(Llama3Scaling)}
        return Rope(theta, Llama3Scaling(**scaling))
    except (TypeError, ValueError) as error:
        raise UnsupportedConfig(key, str(error)) from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of weights; what is wrong with it, or missing from it, is said by its name."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise BadCheckpoint(f"{path.parent}: {path.name} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise BadCheckpoint(f"{path.name} is damaged or cut short: {error}") from error


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor: by the index, or all that the one file holds."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = _json(index).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(file, str) and (folder / file).parent == folder for file in names.values()
        ):
            raise BadCheckpoint(f"{index.name} has no weight_map from tensors to files beside it")
        listed = {name: folder / file for name, file in names.items()}
        held: set[tuple[str, Path]] = set()
        for path in sorted(set(listed.values())):
            with _opened(path) as file:
                held |= dict.fromkeys(file.keys(), path).items()
        if differ := held ^ listed.items():
            wrong = _some(sorted({name for name, _ in differ}))
            raise BadCheckpoint(f"{index.name} and its files differ in {wrong}")
        return listed
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


def _expect(config: Mapping[str, Any], key: str, *known: object) -> None:
    """Refuse a key's value unless it is known; None stands for a key that is not there."""
    value = config.get(key)
    if value not in known:
        names = ", ".join(str(one) for one in known if one is not None)
        raise UnsupportedConfig(
            key, f"{value!r} is not decoded here{names and f'; known: {names}'}"
        )


def _agreed(key: str, one: Any, other: Any, default: Any) -> Any:
    """Return what is stated in one of two places, or alike in both."""
    stated = [value for value in (one, other) if value is not None] or [default]
    if len(stated) == 2 and stated[0] != stated[1]:
        raise UnsupportedConfig(key, f"is stated twice, as {stated[0]!r} and as {stated[1]!r}")
    return stated[0]


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
