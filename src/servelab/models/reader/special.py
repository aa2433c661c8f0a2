"""Reading the families whose layers differ from one another in ways of their own.

Models: Llama 4 (chunks, experts in some layers), Llama 3.2 Vision (cross attention), MiMo-V2-Flash
(heads of two shapes), Step-3.7,
MiniMax-M3 (sparse attention with an index).

Assumes: the model code named with each.

Ignores: towers for images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from servelab.models.attention import CrossAttention, Indexer, Linear
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import LayerSpec
from servelab.models.reader import patterns
from servelab.models.reader.blocks import nemotron_nas, openelm
from servelab.models.reader.family import Family, Mixture
from servelab.models.reader.feedforward import read_blocks
from servelab.models.reader.gemma import gemma3n, gemma4
from servelab.models.reader.keys import Keys
from servelab.models.reader.ordinary import assemble, read_attention
from servelab.models.reader.sizes import HEADS_STATED, KV_STATED, Q_HEADS, Sizes, read_sizes
from servelab.models.spec import ModelSpec

_WIDE = Mixture(width="intermediate_size")


def llama4(keys: Keys, name: str) -> ModelSpec:
    """Return Llama 4's text decoder: layers with rotary positions attend within chunks."""
    family = Family(
        "transformers modeling_llama4.py",
        stated=HEADS_STATED,
        mlp_bias=False,
        mixture=replace(_WIDE, shared="always", dense_width="intermediate_size_mlp"),
    )
    sizes = read_sizes(keys, family)
    layers = sizes.layers
    if not keys.has("layer_types"):
        given = keys.raw("no_rope_layers")  # may be an empty list
        listed = keys.counts("no_rope_layers", length=layers, minimum=0) if given else None
        period = keys.count_or(4, "no_rope_layer_interval", rule="absent: 4 (Llama4TextConfig)")
        full = [not rotary for rotary in listed or []] or patterns.every(period, layers)
        words = ["full_attention" if f else "chunked_attention" for f in full]
        keys.settle("layer_types", words, "no_rope_layers, or one layer in 4: no rotary, full")
    keys.skip("no_rope_layers", "no_rope_layer_interval")
    reach = patterns.windows(keys, layers, family)
    keys.flag("use_qk_norm", True, "absent: true; it has no weights")
    blocks = read_blocks(sizes)
    keys.skip("intermediate_size_mlp")
    heads = read_attention(sizes, reach)
    return assemble(
        sizes,
        name,
        tuple(
            LayerSpec(a, block, 2 * sizes.hidden) for a, block in zip(heads, blocks, strict=True)
        ),
    )


def mllama(keys: Keys, name: str) -> ModelSpec:
    """Return the text decoder of Llama 3.2 Vision; some layers attend to the image only.

    Their cache holds an image's keys and values, nothing of the text; they are no part of
    ``kv_bytes_per_token``.
    """
    family = Family(
        "transformers modeling_mllama.py",
        stated=KV_STATED,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )
    sizes = read_sizes(keys, family)
    if not keys.has("cross_attention_layers"):
        raise UnsupportedConfig("cross_attention_layers", "is missing")
    crossed = patterns.numbers(keys, "cross_attention_layers", sizes.layers)
    heads = read_attention(sizes, [patterns.Reach()] * sizes.layers)
    plain = heads[0]
    kv_params = sizes.hidden * plain.kv_width
    cross = CrossAttention(
        plain.num_q_heads,
        plain.num_kv_heads,
        plain.head_dim,
        extra_params=kv_params + 2 * plain.head_dim + 2,  # two norms, two gates
    )
    layers = tuple(
        LayerSpec(cross if i in crossed else plain, block, 2 * sizes.hidden)
        for i, block in enumerate(read_blocks(sizes))
    )
    return assemble(sizes, name, layers, extra_params=8 * sizes.hidden)  # rows for image tokens


def mimo_v2_flash(keys: Keys, name: str) -> ModelSpec:
    """Return MiMo-V2-Flash: full and sliding layers with heads of their own, sinks in some."""
    family = Family(
        "XiaomiMiMo modeling_mimo_v2_flash.py",
        mlp_bias=False,
        mixture=Mixture(shared="counted", router_bias=True),
    )
    sizes = read_sizes(keys, family)
    pattern = keys.counts("hybrid_layer_pattern", length=sizes.layers, minimum=0)
    if pattern is not None:
        words = ["sliding_attention" if entry else "full_attention" for entry in pattern]
        keys.settle("layer_types", words, "hybrid_layer_pattern: 1 slides, 0 is full")
    keys.skip("attention_chunk_size")
    keys.settle("attention_chunk_size", None, "no layer is chunked")
    reach = patterns.windows(keys, sizes.layers, family)
    value_dim = keys.count("v_head_dim")
    q_heads = keys.count(*Q_HEADS)
    swa_heads = keys.count_or(q_heads, "swa_num_attention_heads", rule="absent: as the others")
    swa_kv_heads = keys.count("swa_num_key_value_heads")
    swa_dim, swa_value_dim = keys.count("swa_head_dim"), keys.count("swa_v_head_dim")
    if swa_heads % swa_kv_heads:
        raise UnsupportedConfig("swa_num_key_value_heads", f"does not divide {swa_heads} heads")
    sinks = {
        True: keys.flag("add_swa_attention_sink_bias", False, "absent: false"),
        False: keys.flag("add_full_attention_sink_bias", False, "absent: false"),
    }
    full = replace(
        read_attention(sizes, reach)[0],
        window=None,
        v_head_dim=value_dim,
        extra_params=q_heads * sinks[False],
    )
    sliding = replace(
        full,
        num_q_heads=swa_heads,
        num_kv_heads=swa_kv_heads,
        head_dim=swa_dim,
        v_head_dim=swa_value_dim,
        extra_params=swa_heads * sinks[True],
    )
    heads = [full if r.window is None else replace(sliding, window=r.window) for r in reach]
    blocks = read_blocks(sizes)
    return assemble(
        sizes,
        name,
        tuple(
            LayerSpec(a, block, 2 * sizes.hidden) for a, block in zip(heads, blocks, strict=True)
        ),
    )


def step3p7(keys: Keys, name: str) -> ModelSpec:
    """Return Step-3.7's cache: its sliding layers change the query heads only, its KV heads never.

    Source: transformers ``modeling_step3p7.py``. Weights stay unknown: published copies leave out
    the query heads of sliding layers (``attention_other_setting``).
    """
    family = Family("transformers modeling_step3p7.py", mlp_bias=False)
    sizes = read_sizes(keys, family)
    reach = patterns.windows(keys, sizes.layers, family)
    keys.unknown["attention_other_setting"] = (
        "is not modelled: sliding layers have other query heads"
    )
    keys.skip(
        "attention_other_setting", "moe_layers_enum", "num_experts", "num_experts_per_tok",
        "moe_intermediate_size", "share_expert_dim", "n_shared_experts", "first_k_dense_replace",
        "use_moe_router_bias", "intermediate_size", "moe_num_experts", "moe_top_k",
    )  # fmt: skip
    heads = read_attention(sizes, reach)
    return assemble(sizes, name, tuple(LayerSpec(a, None, 2 * sizes.hidden) for a in heads))


def minimax_m3(keys: Keys, name: str) -> ModelSpec:
    """Return MiniMax-M3: grouped-query attention, sparse in most layers, with an index cache."""
    family = Family(
        "transformers modeling_minimax_m3_vl.py",
        stated=HEADS_STATED,
        mlp_bias=False,
        qk_norm="head",
        qk_norm_key=("use_qk_norm", True),
        mixture=Mixture(
            width="intermediate_size",
            shared="width",
            router_bias=("use_routing_bias", True),
            dense_width="dense_intermediate_size",
        ),
    )
    sizes = read_sizes(keys, family)
    keys.must_be("qk_norm_type", ("per_head",), "norms of another width")
    keys.must_be("attention_output_gate", (False,), "a gate")
    keys.must_be("n_shared_experts", (1,), "another number of shared experts")
    keys.skip("num_mtp_modules", "num_nextn_predict_layers", "use_gemma_norm")
    keys.settle("num_nextn_predict_layers", 0, "prediction modules: stated, not counted")
    indexer, top, sparse = _index(sizes)
    plain = read_attention(sizes, [patterns.Reach()] * sizes.layers)
    heads = [
        replace(a, indexer=indexer, top_tokens=top) if s else a
        for a, s in zip(plain, sparse, strict=True)
    ]
    blocks = read_blocks(sizes)
    keys.skip("dense_intermediate_size")
    return assemble(
        sizes,
        name,
        tuple(
            LayerSpec(a, block, 2 * sizes.hidden) for a, block in zip(heads, blocks, strict=True)
        ),
    )


def _index(sizes: Sizes) -> tuple[Indexer | None, int | None, list[bool]]:
    """Return the indexer, the most tokens it picks, and the layers that have one."""
    keys, none = sizes.keys, [False] * sizes.layers
    config = keys.section("sparse_attention_config")
    if config is None or not config.flag("use_sparse_attention", True, "absent: true"):
        if config is None:
            raise UnsupportedConfig("sparse_attention_config", "is missing")
        return None, None, none
    sparse = config.counts("sparse_attention_freq", length=sizes.layers, minimum=0)
    if sparse is None:
        raise UnsupportedConfig("sparse_attention_config.sparse_attention_freq", "is missing")
    heads, dim = config.count("sparse_num_index_heads"), config.count("sparse_index_dim")
    top = config.count("sparse_topk_blocks") * config.count("sparse_block_size")
    config.skip("sparse_disable_index_value", "sparse_init_block", "sparse_local_block",
                "sparse_score_type")  # fmt: skip
    config.refuse_unread("sparse_attention_config.")
    matrices = (
        Linear("index_q_proj", sizes.hidden, heads * dim),
        Linear("index_k_proj", sizes.hidden, dim),
    )
    return Indexer(heads, dim, matrices, extra_params=2 * dim), top, [bool(s) for s in sparse]


SPECIAL: dict[str, Callable[[Keys, str], ModelSpec]] = {
    "llama4": llama4,
    "mllama": mllama,
    "openelm": openelm,
    "nemotron-nas": nemotron_nas,
    "mimo_v2_flash": mimo_v2_flash,
    "step3p7": step3p7,
    "minimax_m3": minimax_m3,
    "minimax_m3_vl": minimax_m3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
}
