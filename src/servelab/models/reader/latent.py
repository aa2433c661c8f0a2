"""Reading the families of multi-head latent attention: DeepSeek, Kimi, GLM, MiniCPM3.

Models: the latent and its rope part, queries with or without a latent of their own, and the indexer
of sparse attention in the layers that have one.

Assumes: ``num_key_value_heads`` and ``head_dim`` of these files are decoys: nothing is cached per
head.

Ignores: fp8 formats of the cache; they are the engine's.
"""

from __future__ import annotations

from dataclasses import replace

from servelab.models.attention import Indexer, LatentAttention, Linear
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import LayerSpec
from servelab.models.reader.family import Family, Mixture
from servelab.models.reader.feedforward import read_blocks
from servelab.models.reader.keys import Keys
from servelab.models.reader.ordinary import assemble
from servelab.models.reader.sizes import KV_HEADS, Q_HEADS, Sizes, read_sizes
from servelab.models.spec import ModelSpec

_DEEPSEEK = Family(
    "transformers modeling_deepseek_v3.py",
    mlp_bias=False,
    mixture=Mixture(shared="counted", router_bias=True),
)

LATENT_FAMILIES: dict[str, Family] = {
    "deepseek_v2": replace(
        _DEEPSEEK,
        source="transformers modeling_deepseek_v2.py",
        mixture=Mixture(shared="counted"),
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": replace(_DEEPSEEK, source="transformers modeling_deepseek_v32.py"),
    "kimi_k2": replace(_DEEPSEEK, source="moonshotai modeling_deepseek.py: DeepSeek-V3's shape"),
    "glm_moe_dsa": replace(_DEEPSEEK, source="transformers modeling_glm_moe_dsa.py"),
    "glm4_moe_lite": replace(_DEEPSEEK, source="transformers modeling_glm4_moe_lite.py"),
    "minicpm3": replace(
        _DEEPSEEK, source="transformers modeling_minicpm3.py", tied=True, mixture=None
    ),
    "youtu": replace(_DEEPSEEK, source="transformers modeling_youtu.py", tied=True, mixture=None),
}


def read_latent(keys: Keys, name: str, family: Family) -> ModelSpec:
    """Return a decoder whose every layer has latent attention."""
    sizes = read_sizes(keys, family)
    if keys.text("topk_method") == "noaux_tc" and family.mixture is not None:
        family = replace(family, mixture=replace(family.mixture, router_bias=True))
        sizes = replace(sizes, family=family)
    attentions = with_indexers(sizes, read_latent_attention(sizes))
    norms = family.norms * family.norm_params(sizes.hidden)
    blocks = read_blocks(sizes)
    return assemble(
        sizes,
        name,
        tuple(
            LayerSpec(attention, block, norms)
            for attention, block in zip(attentions, blocks, strict=True)
        ),
    )


def read_latent_attention(sizes: Sizes) -> LatentAttention:
    """Return the latent attention of a layer, without an indexer."""
    keys = sizes.keys
    nope = keys.count("qk_nope_head_dim")
    rope = keys.count("qk_rope_head_dim", minimum=0)
    keys.must_be("qk_head_dim", (nope + rope,), "not the sum of qk_nope and qk_rope head_dim")
    keys.skip(*KV_HEADS, "head_dim")
    keys.state("num_key_value_heads", "not read: one latent per token stands for all heads")
    return LatentAttention(
        num_q_heads=keys.count(*Q_HEADS),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=keys.count("v_head_dim"),
        q_lora_rank=keys.count_or_none(
            "q_lora_rank", rule="absent or null: queries have no latent"
        ),
        bias=keys.flag("attention_bias", False, "absent: the family has none"),
    )


def with_indexers(sizes: Sizes, attention: LatentAttention) -> list[LatentAttention]:
    """Return the attention of every layer, with the indexer where one is stated.

    A layer whose indexer is shared reads the choice of an earlier one and keeps no index keys.
    """
    keys, layers = sizes.keys, sizes.layers
    top = keys.count_or_none("index_topk", rule="absent: attention is not sparse")
    kinds_known = ("indexed_attention", "deepseek_sparse_attention", "full_attention")
    keys.words("layer_types", layers, dict.fromkeys(kinds_known, ""))
    if top is None:
        return [attention] * layers
    rank = attention.q_lora_rank
    if rank is None:
        raise UnsupportedConfig("q_lora_rank", "is missing, and the indexer reads that latent")
    heads, dim = keys.count("index_n_heads"), keys.count("index_head_dim")
    kinds = keys.words("indexer_types", layers, {"full": "full", "shared": "shared"})
    if kinds is None:
        keys.must_be("index_topk_freq", (1,), "some layers share an indexer, none says which")
        keys.must_be("index_topk_pattern", (), "some layers share an indexer")
        kinds = ["full"] * layers
    keys.skip("index_topk_freq", "index_topk_pattern")
    indexer = Indexer(
        heads,
        dim,
        (
            Linear("index_q_proj", rank, heads * dim),
            Linear("index_k_proj", sizes.hidden, dim),
            Linear("index_weights_proj", sizes.hidden, heads),
        ),
        extra_params=2 * dim,  # a LayerNorm on the keys
    )
    full = replace(attention, top_tokens=top, indexer=indexer)
    return [full if kind == "full" else replace(attention, top_tokens=top) for kind in kinds]
