"""Reading a Hugging Face ``config.json``: which keys give which shape.

Models: the llama, mistral, qwen3 and opt families. Each value of the spec is read from a named key;
where a family has a rule without a key for it, the rule stands here and in the provenance.

Assumes: the keys mean what the transformers library gives them to mean.

Ignores: keys that change neither shape, parameters nor cache (initialisation, dropout, token ids).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servelab.models.spec import Attention, LayerSpec, Mlp, ModelSpec

_MOST_LAYERS = 10_000
_WEIGHT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class UnsupportedConfig(ValueError):
    """A configuration that cannot be read without guessing.

    Parameters: ``key`` the key at fault; ``why`` it cannot be used.

    >>> UnsupportedConfig("num_hidden_layers", "is missing").key
    'num_hidden_layers'
    """

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key
        self.why = why


class _Keys:
    """A configuration with a memory: what was asked of it, and which key answered."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.provenance: dict[str, str] = {}

    def _record(self, key: str, value: object) -> None:
        self.provenance[key] = f"{key} = {json.dumps(value)}"

    def count(self, key: str) -> int:
        """Return a required whole number, at least 1."""
        value = self._config.get(key)
        if value is None:
            raise UnsupportedConfig(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedConfig(key, f"must be a whole number of at least 1, got {value!r}")
        self._record(key, value)
        return value

    def count_or_none(self, key: str, rule: str) -> int | None:
        """Return a whole number, or None by a stated ``rule`` where the key is absent or null."""
        if self._config.get(key) is None:
            self.provenance[key] = rule
            return None
        return self.count(key)

    def flag(self, key: str, otherwise: bool, rule: str) -> bool:
        """Return true or false; absent or null: ``otherwise``, by a stated ``rule``."""
        value = self._config.get(key)
        if value is None:
            self.provenance[key] = rule
            return otherwise
        if not isinstance(value, bool):
            raise UnsupportedConfig(key, f"must be true or false, got {value!r}")
        self._record(key, value)
        return value

    def layers(self) -> int:
        """Return the number of layers; more than any model has is a slip, and a list too long."""
        count = self.count("num_hidden_layers")
        if count > _MOST_LAYERS:
            raise UnsupportedConfig(
                "num_hidden_layers", f"must be at most {_MOST_LAYERS:,}, got {count}"
            )
        return count

    def weight_dtype(self) -> str:
        """Return the number format that the weights were published in."""
        key = "dtype" if self._config.get("dtype") is not None else "torch_dtype"
        value = self._config.get(key)
        if value is None:
            self.provenance["weight_dtype"] = "torch_dtype absent: taken as bfloat16"
            return "bf16"
        if not isinstance(value, str) or value not in _WEIGHT_DTYPES:
            known = ", ".join(_WEIGHT_DTYPES)
            raise UnsupportedConfig(key, f"{value!r} is not a known format; known: {known}")
        self._record(key, value)
        return _WEIGHT_DTYPES[value]

    def must_be_present(self, *names: str) -> None:
        """Refuse a configuration that leaves a key out (null is an answer, absence is not)."""
        for key in names:
            if key not in self._config:
                raise UnsupportedConfig(key, "is missing, and the family has no rule for that")

    def must_be(self, key: str, allowed: tuple[object, ...], rule: str) -> None:
        """Refuse a key whose value would change the shape in a way that is not modelled here."""
        value = self._config.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedConfig(key, f"{value!r} is not modelled here ({rule})")


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None
) -> ModelSpec:
    """Return the spec of a file or mapping; see `ModelSpec.from_config`."""
    if isinstance(source, Mapping):
        config: Any = source
    else:
        try:
            config = json.loads(Path(source).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, endless digits
            raise UnsupportedConfig("config.json", f"{source} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise UnsupportedConfig("config.json", f"{source} holds no JSON object")
    model_type = config.get("model_type")
    if model_type is None:
        raise UnsupportedConfig("model_type", "is missing")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedConfig(
            "model_type", f"{model_type!r} is not supported; supported: {known}"
        )
    return _FAMILIES[model_type](
        _Keys(config), name or str(config.get("_name_or_path") or model_type)
    )


def _llama(keys: _Keys, name: str) -> ModelSpec:
    bias = keys.flag("attention_bias", False, "absent: the family has none")
    mlp_bias = keys.flag("mlp_bias", False, "absent: the family has none")
    return _gated_rotary(keys, name, attention_bias=bias, mlp_bias=mlp_bias)


def _mistral(keys: _Keys, name: str) -> ModelSpec:
    # transformers fills these in where they are absent, and with other values than for null
    keys.must_be_present("sliding_window", "num_key_value_heads")
    keys.must_be("attention_bias", (False,), "the family has no biases")
    keys.must_be("mlp_bias", (False,), "the family has no biases")
    window = keys.count_or_none("sliding_window", "null: no window")
    return _gated_rotary(keys, name, window=window, attention_bias=False, mlp_bias=False)


def _qwen3(keys: _Keys, name: str) -> ModelSpec:
    keys.must_be("use_sliding_window", (False,), "some layers would have a window")
    keys.must_be("mlp_bias", (False,), "the family has none there")
    keys.must_be("layer_types", (["full_attention"] * keys.layers(),), "some layers would differ")
    keys.must_be_present("head_dim", "num_key_value_heads")
    bias = keys.flag("attention_bias", False, "absent: the family has none")
    return _gated_rotary(keys, name, attention_bias=bias, mlp_bias=False, qk_norm=True)


def _gated_rotary(
    keys: _Keys,
    name: str,
    attention_bias: bool,
    mlp_bias: bool,
    window: int | None = None,
    qk_norm: bool = False,
) -> ModelSpec:
    """Return a model of RMSNorm, rotary positions and a gated MLP: the Llama shape."""
    keys.must_be("num_experts", (0,), "a mixture of experts")
    keys.must_be("num_local_experts", (0,), "a mixture of experts")
    keys.must_be("quantization_config", (), "quantised weights")
    hidden, q_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    kv_heads = (
        keys.count_or_none("num_key_value_heads", "absent or null: one per query head") or q_heads
    )
    head_dim = keys.count_or_none("head_dim", "absent or null: hidden_size / num_attention_heads")
    if head_dim is None:
        head_dim = _divided("hidden_size", hidden, "num_attention_heads", q_heads)
    if q_heads % kv_heads:
        raise UnsupportedConfig(
            "num_key_value_heads", f"{kv_heads} does not divide {q_heads} query heads"
        )
    layer = LayerSpec(
        Attention(
            q_heads,
            kv_heads,
            head_dim,
            window=window,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            qk_norm=qk_norm,
        ),
        Mlp(keys.count("intermediate_size"), bias=mlp_bias),
        norm_params=2 * hidden,
    )
    return ModelSpec(
        name=name,
        hidden_size=hidden,
        vocab_size=keys.count("vocab_size"),
        layers=(layer,) * keys.layers(),
        tied_embeddings=keys.flag("tie_word_embeddings", False, "absent: the family unties"),
        final_norm_params=hidden,
        max_context_tokens=keys.count_or_none("max_position_embeddings", "absent: not stated"),
        weight_dtype=keys.weight_dtype(),
        provenance=keys.provenance,
    )


def _opt(keys: _Keys, name: str) -> ModelSpec:
    """Return an OPT model: LayerNorm, learned positions, biases, a two-matrix MLP, tied embeddings.

    Source: Zhang et al. (2022); the position table has two rows more than positions, as in fairseq.
    """
    hidden, q_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    keys.must_be("word_embed_proj_dim", (hidden,), "an embedding narrower than the model")
    keys.must_be("do_layer_norm_before", (True,), "post-norm has no final norm")
    keys.must_be("_remove_final_layer_norm", (False,), "no final norm")
    keys.must_be("layer_norm_elementwise_affine", (True,), "norms without weights")
    bias = keys.flag("enable_bias", True, "absent: the family has biases")
    positions = keys.count("max_position_embeddings")
    head_dim = _divided("hidden_size", hidden, "num_attention_heads", q_heads)
    layer = LayerSpec(
        Attention(q_heads, q_heads, head_dim, qkv_bias=bias, out_bias=bias),
        Mlp(keys.count("ffn_dim"), gated=False, bias=bias),
        norm_params=2 * 2 * hidden,
    )
    return ModelSpec(
        name=name,
        hidden_size=hidden,
        vocab_size=keys.count("vocab_size"),
        layers=(layer,) * keys.layers(),
        tied_embeddings=keys.flag("tie_word_embeddings", True, "absent: the family ties"),
        final_norm_params=2 * hidden,
        max_context_tokens=positions,
        position_rows=positions + 2,
        weight_dtype=keys.weight_dtype(),
        provenance=keys.provenance
        | {"num_key_value_heads": "no key: OPT has one KV head per query head"},
    )


def _divided(name: str, total: int, by_name: str, by: int) -> int:
    if total % by:
        raise UnsupportedConfig(
            name, f"{total} is not a multiple of {by_name} ({by}) and head_dim is not given"
        )
    return total // by


_FAMILIES = {"llama": _llama, "mistral": _mistral, "opt": _opt, "qwen3": _qwen3}
