"""Reading a decoder of the ordinary shape: attention, then an MLP or a mixture, behind norms.

Models: the heads of every layer, and the model around its layers: vocabulary, ties, final norm,
positions, prediction layers, number format.

Assumes: every layer has both halves; which layers see a window and which have experts is for
`servelab.models.reader.patterns`.

Ignores: shapes with latent attention, recurrent state or per-layer blocks; they build on the parts
exported here.
"""

from __future__ import annotations

from collections.abc import Mapping

from servelab.models.attention import Attention
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import LayerSpec
from servelab.models.reader import patterns
from servelab.models.reader.family import Family
from servelab.models.reader.feedforward import read_blocks
from servelab.models.reader.keys import MAX_LAYERS, Keys
from servelab.models.reader.sizes import (
    CONTEXT,
    HEAD_DIM,
    KV_HEADS,
    PREDICTION_LAYERS,
    Q_HEADS,
    Sizes,
    read_sizes,
)
from servelab.models.spec import ModelSpec


def read_ordinary(keys: Keys, name: str, family: Family) -> ModelSpec:
    """Return a decoder whose layers all have attention and a feed-forward block."""
    sizes = read_sizes(keys, family)
    windows = patterns.windows(keys, sizes.layers, family)
    blocks = read_blocks(sizes)
    norms = family.norms * family.norm_params(sizes.hidden)
    return assemble(
        sizes,
        name,
        tuple(
            LayerSpec(attention, block, norms)
            for attention, block in zip(read_attention(sizes, windows), blocks, strict=True)
        ),
    )


# --- attention ----------------------------------------------------------------------------------


def read_attention(sizes: Sizes, windows: list[patterns.Reach]) -> list[Attention]:
    """Return the attention of every layer, one per entry of ``windows``."""
    keys, family = sizes.keys, sizes.family
    q_heads = keys.counts(*Q_HEADS, length=sizes.layers)
    if q_heads is None:
        raise UnsupportedConfig(Q_HEADS[0], "is missing")
    kv_heads = keys.counts(*KV_HEADS, length=sizes.layers)
    if kv_heads is None:
        keys.state(KV_HEADS[0], "absent or null: one per query head")
        kv_heads = q_heads
    head_dim = read_head_dim(keys, sizes.hidden, q_heads)
    normed = family.qk_norm != "none" and sizes.flag(family.qk_norm_key)
    qkv_bias, out_bias = sizes.flag(family.qkv_bias), sizes.flag(family.out_bias)

    def one(q: int, kv: int, reach: patterns.Reach) -> Attention:
        if q % kv:
            raise UnsupportedConfig(KV_HEADS[0], f"{kv} does not divide {q} query heads")
        width = {"heads": q + kv, "width": q + kv, "head": 2, "none": 0}[family.qk_norm] * head_dim
        plain = family.qk_norm == "head" and family.norm != "layer"
        extra = family.norm_params(width) if normed and not plain else 0
        return Attention(
            q,
            kv,
            head_dim,
            window=reach.window,
            chunked=reach.chunked,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=normed and plain,
            extra_params=extra + (q if family.sinks else 0),
        )

    return [one(q, kv, reach) for q, kv, reach in zip(q_heads, kv_heads, windows, strict=True)]


def read_head_dim(keys: Keys, hidden: int, q_heads: list[int]) -> int:
    """Return the stated width of a head, or hidden_size over the query heads."""
    stated = keys.count_or_none(*HEAD_DIM, rule="absent or null: hidden_size / num_attention_heads")
    if stated is not None:
        return stated
    if len(set(q_heads)) > 1 or hidden % q_heads[0]:
        raise UnsupportedConfig(
            "hidden_size",
            f"{hidden} is not a multiple of num_attention_heads ({q_heads[0]}) "
            f"and head_dim is not given",
        )
    return hidden // q_heads[0]


# --- the whole ----------------------------------------------------------------------------------


def assemble(
    sizes: Sizes,
    name: str,
    layers: tuple[LayerSpec, ...],
    extra_params: int = 0,
    more_provenance: Mapping[str, str] | None = None,
) -> ModelSpec:
    """Return the model around its layers: vocabulary, ties, final norm, positions."""
    keys, family = sizes.keys, sizes.family
    context = keys.first(*CONTEXT)
    rows = 0
    if family.position_offset is not None:
        if context is None:
            keys.unknown.setdefault(CONTEXT[0], "is missing, and the position table has its rows")
        rows = (context or 0) + family.position_offset
    if family.embedding_norm:
        extra_params += family.norm_params(sizes.hidden)
    return ModelSpec(
        name=name,
        hidden_size=sizes.hidden,
        vocab_size=keys.count_for_weights("vocab_size", "padded_vocab_size") or 0,
        layers=layers,
        tied_embeddings=read_tie(sizes),
        final_norm_params=family.norm_params(sizes.hidden),
        max_context_tokens=context,
        position_rows=rows,
        lm_head_bias=sizes.flag(family.lm_head_bias),
        extra_params=extra_params,
        params_other=read_prediction_layers(sizes, layers),
        weight_dtype=read_dtype(keys, family),
        unknown=keys.unknown,
        provenance=keys.provenance | dict(more_provenance or {}),
    )


def read_tie(sizes: Sizes) -> bool:
    """Return whether embedding and lm_head are one matrix."""
    keys, family = sizes.keys, sizes.family
    if family.tied is None:
        if not keys.has("tie_word_embeddings"):
            keys.unknown.setdefault(
                "tie_word_embeddings", "is missing, and the family's rule is not known"
            )
        return keys.flag("tie_word_embeddings", False, "absent: not known")
    word = "ties" if family.tied else "unties"
    return keys.flag(
        "tie_word_embeddings", family.tied, f"absent: the family {word} ({family.source})"
    )


def read_prediction_layers(sizes: Sizes, layers: tuple[LayerSpec, ...]) -> int:
    """Return the parameters of multi-token-prediction layers; embedding and lm_head are shared.

    Each is a layer like the last that has attention, a projection of two hidden states to one, and
    three norms. Source: DeepSeek-AI (2024), "DeepSeek-V3", section 2.2.
    """
    count = sizes.keys.count_or(0, *PREDICTION_LAYERS, rule="absent: none", minimum=0)
    if not count or sizes.keys.unknown:
        return 0
    if count > MAX_LAYERS:
        raise UnsupportedConfig(PREDICTION_LAYERS[0], f"must be at most {MAX_LAYERS}, got {count}")
    last = next((layer for layer in reversed(layers) if layer.attention is not None), layers[-1])
    each = last.params_total(sizes.hidden) + 2 * sizes.hidden**2 + 3 * sizes.hidden
    sizes.keys.state("params_other", f"{count} prediction layer(s), counted apart")
    return count * each


_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "float8_e4m3fn": "fp8",
}  # fmt: skip


def read_dtype(keys: Keys, family: Family) -> str:
    """Return the number format of the published weights."""
    for key in ("dtype", "torch_dtype"):
        stated = keys.text(key)
        if stated is not None:
            stated = stated.removeprefix("torch.")
            if stated not in _DTYPES:
                raise UnsupportedConfig(
                    key, f"{stated!r} is not understood; known: {', '.join(_DTYPES)}"
                )
            return _DTYPES[stated]
    keys.state("torch_dtype", f"absent: {family.weight_dtype}")
    return family.weight_dtype
