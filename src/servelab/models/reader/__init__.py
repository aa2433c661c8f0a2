"""Reading a Hugging Face ``config.json``, strictly: which keys give which shape.

Models: the families of `families`, `latent`, `hybrid` and `special`, and any decoder whose keys are
the ordinary ones. Each value of the spec is read from a named key; where a family has a rule
without a key for it, the rule and its source stand in the provenance.

Assumes: the keys mean what the family's model code, mostly in transformers, takes them to mean.

Ignores: keys that change neither shape, parameters nor cache; `harmless` says which those are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from servelab.models.errors import UnsupportedConfig
from servelab.models.reader import files
from servelab.models.reader.dialects import DIALECTS
from servelab.models.reader.families import FAMILIES, ORDINARY
from servelab.models.reader.hybrid import HYBRIDS
from servelab.models.reader.keys import Keys, show
from servelab.models.reader.latent import LATENT_FAMILIES, read_latent
from servelab.models.reader.ordinary import read_ordinary
from servelab.models.reader.quantization import with_published_weights
from servelab.models.reader.refused import REFUSED
from servelab.models.reader.special import SPECIAL
from servelab.models.spec import ModelSpec

__all__ = ["read_config"]

#: Where a model of several parts keeps its text decoder.
_TEXT_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")

#: Parts of such a model that are no text decoder.
_TOWERS = ("vision_config", "audio_config", "talker_config", "token2wav_config")

#: Heads that are no language model's: there is no lm_head, or no decoding.
_OTHER_TASKS = (
    "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering",
    "ForImageClassification", "ForSpeechSeq2Seq", "EncoderModel", "ForMultipleChoice",
    "ForRewardModel", "ForPreTraining", "ForAudioClassification", "ForCTC",
)  # fmt: skip


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None
) -> ModelSpec:
    """Return the spec of a file, folder or mapping; see `ModelSpec.from_config`."""
    config = files.load(source)
    try:
        return _read(config, name)
    except UnsupportedConfig:
        raise
    except ValueError as error:  # a part refused its sizes
        raise UnsupportedConfig("config.json", f"contradicts itself: {error}") from error


def _read(config: Mapping[str, Any], name: str | None) -> ModelSpec:
    outer = Keys(config)
    outer.skip("quantization_config", "quantization")  # read last, when the matrices are known
    text, where = _text_section(outer)
    model_type = text.raw("model_type") or outer.raw("model_type")
    if model_type is None:
        what = files.name_of_wrong_file(config)
        raise UnsupportedConfig(
            "model_type", f"is missing: this is {what}" if what else "is missing"
        )
    if not isinstance(model_type, str):
        raise UnsupportedConfig("model_type", f"must be a string, got {show(model_type)}")
    _check_task(config, text, model_type)
    label = name or text.raw("_name_or_path") or outer.raw("_name_or_path") or model_type
    towers = [key for key in _TOWERS if config.get(key)]
    if towers:
        text.state("params_other", f"{', '.join(towers)}: beside the text decoder, not counted")
    spec = with_published_weights(_by_family(text, str(label), model_type), outer, text)
    text.refuse_unread(where)
    return spec


def _text_section(outer: Keys) -> tuple[Keys, str]:
    """Return the section of the text decoder, and where it stands: "" or ``"text_config."``."""
    text, where = outer, ""
    for section in _TEXT_SECTIONS:
        nested = text.section(section)
        if nested is not None:
            _check_ties(text, nested)
            text.refuse_unread(where)
            text, where = nested, f"{where}{section}."
    return text, where


def _check_ties(outer: Keys, nested: Keys) -> None:
    """Carry down what the outer section says of the text decoder; refuse a contradiction."""
    for key in ("tie_word_embeddings", "vocab_size", "hidden_size", "torch_dtype", "dtype"):
        above, below = outer.raw(key), nested.raw(key)
        if above is not None and below is None and key != "hidden_size":
            nested.settle(key, above, f"{key} = {show(above)}, of the outer section")
        elif not key.endswith("dtype") and None is not above != below:
            raise UnsupportedConfig(
                key, f"is {show(below)} in the text decoder, {show(above)} above"
            )


def _check_task(config: Mapping[str, Any], text: Keys, model_type: str) -> None:
    """Refuse what has no text decoder with an lm_head."""
    if text.raw("is_encoder_decoder") is True:
        raise UnsupportedConfig("is_encoder_decoder", "an encoder-decoder is not modelled here")
    if text.has("type_vocab_size"):
        raise UnsupportedConfig("type_vocab_size", "an encoder of the BERT kind has no KV cache")
    if files.is_vision(config) and not text.has("vocab_size", "num_key_value_heads"):
        raise UnsupportedConfig(
            "model_type", f"{show(model_type)} is a vision model, without a text decoder"
        )
    for section in (text.raw("architectures"), config.get("architectures")):
        for architecture in section if isinstance(section, (list, tuple)) else ():
            if isinstance(architecture, str) and architecture.endswith(_OTHER_TASKS):
                raise UnsupportedConfig("architectures", f"{show(architecture)} has no lm_head")


def _by_family(keys: Keys, name: str, model_type: str) -> ModelSpec:
    """Return the spec by the reader of the family, or by the ordinary rules, marked as such."""
    base = model_type.removesuffix("_model").removesuffix("_text")
    if base in REFUSED:
        raise UnsupportedConfig(
            "model_type", f"{show(model_type)} is not modelled: {REFUSED[base]}"
        )
    keys.state("model_type", f"model_type = {show(model_type)}")
    special = SPECIAL.get(base) or HYBRIDS.get(base)
    if special is not None:
        return special(keys, name)
    if base in LATENT_FAMILIES:
        return read_latent(keys, name, LATENT_FAMILIES[base])
    family = FAMILIES.get(base)
    if family is None:
        keys.state("model_type", f"{show(model_type)} is no family known here: {ORDINARY.source}")
        family = ORDINARY
    elif base in DIALECTS:
        family = DIALECTS[base](keys, family)
    return read_ordinary(keys, name, family)
