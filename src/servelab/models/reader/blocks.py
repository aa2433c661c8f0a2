"""Reading the families that describe every layer by itself: OpenELM and Nemotron-NAS.

Models: heads and MLP width per layer; blocks thinned, removed, or replaced by one matrix.

Assumes: apple modeling_openelm.py; nvidia modeling_decilm.py.

Ignores: sinks and sparse weights of pruned blocks; such a block is refused.
"""

from __future__ import annotations

from dataclasses import replace

from servelab.models.attention import Attention, Linear
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import LayerSpec, Mlp
from servelab.models.reader import patterns
from servelab.models.reader.family import Family
from servelab.models.reader.keys import Keys, show
from servelab.models.reader.ordinary import assemble, read_attention, read_head_dim
from servelab.models.reader.sizes import Q_HEADS, read_sizes
from servelab.models.spec import ModelSpec


def openelm(keys: Keys, name: str) -> ModelSpec:
    """Return OpenELM: heads and MLP width of their own in every layer."""
    family = Family("apple modeling_openelm.py", qkv_bias=False, out_bias=False)
    if keys.flag("normalize_qk_projections", False, "absent: the weights are not known"):
        family = replace(family, qk_norm="head")
    sizes = read_sizes(keys, family)
    heads = read_attention(sizes, [patterns.Reach()] * sizes.layers)
    if not keys.has("normalize_qk_projections"):
        keys.unknown.setdefault("normalize_qk_projections", "is missing")
    factors = keys.listing("ffn_multipliers", length=sizes.layers)
    divisor = keys.count_or(256, "ffn_dim_divisor", rule="absent: 256 (OpenELMConfig)")
    keys.must_be("ffn_with_glu", (True,), "two matrices")
    blocks: list[Mlp | None] = [None] * sizes.layers
    if factors is None:
        keys.unknown.setdefault("ffn_multipliers", "is missing")
    else:
        blocks = [
            Mlp(_divisible(_factor("ffn_multipliers", f) * sizes.hidden, divisor)) for f in factors
        ]
    shared = keys.flag("share_input_output_layers", False, "absent: the weights are not known")
    keys.settle("tie_word_embeddings", shared, "share_input_output_layers")
    if not keys.has("share_input_output_layers"):
        keys.unknown.setdefault("share_input_output_layers", "is missing")
    keys.skip("num_gqa_groups", "qkv_multipliers", "normalization_layer_name")
    norms = 2 * sizes.hidden
    return assemble(
        sizes,
        name,
        tuple(LayerSpec(a, block, norms) for a, block in zip(heads, blocks, strict=True)),
    )


def _factor(key: str, value: object) -> float:
    """Return a width as a multiple of the model's."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1000:
        raise UnsupportedConfig(key, f"{show(value)} is no factor")
    return value


def _divisible(width: float, divisor: int) -> int:
    """Return the multiple of ``divisor`` nearest to a width, never a tenth below it (OpenELM)."""
    nearest = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * width else nearest


def nemotron_nas(keys: Keys, name: str) -> ModelSpec:
    """Return a Llama pruned by search: in each block attention and MLP may be thinned or gone."""
    family = Family("nvidia modeling_decilm.py (Llama-Nemotron)")
    keys.skip("num_key_value_heads", "intermediate_size")
    sizes = read_sizes(keys, family)
    blocks = keys.listing("block_configs", length=sizes.layers)
    if blocks is None:
        raise UnsupportedConfig("block_configs", "is missing")
    q_heads = keys.count(*Q_HEADS)
    head_dim = read_head_dim(keys, sizes.hidden, [q_heads])
    qkv, mlp_bias = sizes.flag(("attention_bias", False)), sizes.flag(("mlp_bias", False))
    layers = []
    for block in blocks:
        part = Keys({"block": block}).section("block")
        if part is None:
            raise UnsupportedConfig("block_configs", "has an empty entry")
        attention, ffn = part.section("attention"), part.section("ffn")
        if attention is None or ffn is None:
            raise UnsupportedConfig("block_configs", "has an entry without attention or ffn")
        group = attention.count_or_none("n_heads_in_group")
        heads, extra = None, []
        if attention.flag("replace_with_linear", False, ""):
            extra.append(Linear("attention_linear", sizes.hidden, sizes.hidden))
        elif not attention.flag("no_op", False, ""):
            if group is None or q_heads % group:
                raise UnsupportedConfig("n_heads_in_group", f"is {group}, of {q_heads} heads")
            heads = Attention(q_heads, q_heads // group, head_dim, qkv_bias=qkv, out_bias=qkv)
        for key in ("num_sink_tokens", "window_length", "sparsify"):
            attention.must_be(key, (), "a thinned cache")
        attention.must_be("unshifted_sink", (False,), "sinks")
        mlp = None
        if ffn.flag("replace_with_linear", False, ""):
            extra.append(Linear("ffn_linear", sizes.hidden, sizes.hidden))
        elif not ffn.flag("no_op", False, ""):
            width = int(2 * _factor("ffn_mult", ffn.raw("ffn_mult")) * sizes.hidden / 3)
            mlp = Mlp(-(-width // 256) * 256, bias=mlp_bias)
        ffn.must_be("sparsify", (), "sparse weights")
        kept = (heads is not None or bool(extra)) + (mlp is not None or len(extra) > 1)
        layers.append(LayerSpec(heads, mlp, kept * sizes.hidden, extra=tuple(extra)))
    keys.state("num_key_value_heads", "block_configs: num_attention_heads / n_heads_in_group")
    return assemble(sizes, name, tuple(layers))
