"""Reading a decoder of the ordinary shape: attention, then an MLP or a mixture, behind norms.

Models: the size and head keys under all their names, and a family's rules where a file is silent.

Assumes: every layer has both halves; which layers see a window and which have experts is for
`servelab.models.reader.patterns`.

Ignores: shapes with latent attention, recurrent state or per-layer blocks; they build on the parts
exported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from servelab.models.attention import Attention
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import Experts, LayerSpec, Mlp
from servelab.models.reader import patterns
from servelab.models.reader.family import Family, Flag, Mixture
from servelab.models.reader.keys import MAX_LAYERS, Keys
from servelab.models.spec import ModelSpec

HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "model_dim")
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers",
)  # fmt: skip
Q_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num",
    "num_key_value_heads_per_layer", "n_kv_heads", "num_query_groups",
)  # fmt: skip
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim", "head_size")
#: Where a family states its heads or is refused, as `Family.stated`: hybrids and others.
KV_STATED = (KV_HEADS[0],)
HEADS_STATED = (KV_HEADS[0], HEAD_DIM[0])
MLP_WIDTH = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff")
CONTEXT = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
    "model_max_length", "max_context_length",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk",
    "top_k_experts", "moe_top_k",
)  # fmt: skip
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_NO_TABLE = ("rope", "rotary", "nope", "alibi", "rope_gptj", "relative")
PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class Sizes:
    """What every decoder has: its width, its depth, and its family's rules."""

    keys: Keys
    family: Family
    hidden: int
    layers: int

    def flag(self, rule: Flag) -> bool:
        """Return a family's flag: fixed, or read from its key."""
        if isinstance(rule, bool):
            return rule
        key, otherwise = rule
        return self.keys.flag(key, otherwise, f"absent: {otherwise} ({self.family.source})")


def read_sizes(keys: Keys, family: Family) -> Sizes:
    """Return width and depth; refuse what the family's rules do not cover."""
    keys.must_be("add_cross_attention", (False,), "cross attention")
    if family.position_offset is None:
        keys.must_be("position_embedding_type", _NO_TABLE, "a table of positions")
    for key in family.stated:
        names = KV_HEADS if key == KV_HEADS[0] else HEAD_DIM if key == HEAD_DIM[0] else (key,)
        if not keys.mentions(*names):
            raise UnsupportedConfig(key, f"is missing, and no rule replaces it ({family.source})")
    if family.qkv_bias is False and family.out_bias is False:
        keys.must_be("attention_bias", (False,), f"no such biases: {family.source}")
    if family.mlp_bias is False:
        keys.must_be("mlp_bias", (False,), f"no such biases: {family.source}")
    for key, value in family.fixed:
        keys.must_be(key, (value,), family.source)
    return Sizes(keys, family, keys.count(*HIDDEN), keys.count(*LAYERS, maximum=MAX_LAYERS))


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


# --- feed-forward blocks ------------------------------------------------------------------------


def read_blocks(sizes: Sizes) -> list[Mlp | Experts | None]:
    """Return the feed-forward block of every layer; None where the file leaves its width out."""
    keys, family = sizes.keys, sizes.family
    if family.mixture is None or not keys.has(*EXPERTS):
        return [*read_mlps(sizes, MLP_WIDTH)]
    experts = read_experts(sizes, family.mixture)
    sparse = patterns.sparse_layers(keys, sizes.layers)
    if all(sparse):
        keys.skip(*MLP_WIDTH)
        return [experts] * sizes.layers
    dense = read_mlps(sizes, (family.mixture.dense_width,))
    return [experts if s else mlp for s, mlp in zip(sparse, dense, strict=True)]


def read_mlps(sizes: Sizes, names: tuple[str, ...]) -> list[Mlp | None]:
    """Return an MLP per layer."""
    keys, family = sizes.keys, sizes.family
    widths = keys.counts(*names, length=sizes.layers)
    bias = sizes.flag(family.mlp_bias)
    if widths is None and family.mlp_factor is not None:
        keys.state(names[0], f"absent: {family.mlp_factor} x hidden_size ({family.source})")
        widths = [family.mlp_factor * sizes.hidden] * sizes.layers
    if widths is None:
        keys.unknown.setdefault(names[0], "is missing")
        return [None] * sizes.layers
    extra = family.mlp_extra_params
    made = {width: Mlp(width, family.gated, bias, extra) for width in set(widths)}
    return [made[width] for width in widths]


def read_experts(sizes: Sizes, mixture: Mixture) -> Experts | None:
    """Return the mixture that the sparse layers have; None where the file leaves its width out."""
    keys, family = sizes.keys, sizes.family
    count = keys.count(*EXPERTS)
    per_token = keys.count_for_weights(*EXPERTS_PER_TOKEN)
    width = keys.count_for_weights(mixture.width)
    shared = read_shared_width(sizes, mixture, width)
    bias = sizes.flag(mixture.router_bias)
    if width is None or per_token is None:
        return None
    if per_token > count:
        raise UnsupportedConfig(EXPERTS_PER_TOKEN[0], f"is {per_token}, of {count} experts")
    return Experts(
        count,
        per_token,
        Mlp(width, family.gated, family.mlp_bias is True or sizes.flag(family.mlp_bias)),
        Mlp(shared, family.gated) if shared else None,
        shared_gate=mixture.shared == "gated" and bool(shared),
        extra_params=count if bias else 0,
    )


def read_shared_width(sizes: Sizes, mixture: Mixture, width: int | None) -> int:
    """Return the width of the shared experts together, 0 without any."""
    keys = sizes.keys
    if mixture.shared == "counted":
        return (width or 0) * keys.count_or(
            0, *SHARED_EXPERTS, rule="absent or null: none", minimum=0
        )
    if mixture.shared == "gated":
        return keys.count_or(
            0, "shared_expert_intermediate_size", rule="absent: no shared expert", minimum=0
        )
    if mixture.shared == "width":
        return keys.count_or(
            0, "shared_intermediate_size", rule="absent: no shared expert", minimum=0
        )
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size", *SHARED_EXPERTS):
        keys.must_be(name, (0,), "the family has no shared expert")
    return width or 0 if mixture.shared == "always" else 0


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
