"""Families that are ordinary decoders but spell their configuration in a way of their own.

Models: each function reads the peculiar keys and settles the ordinary ones, with the rule that did
so; the ordinary reader does the rest.

Assumes: what `servelab.models.reader.families` says of the same family.

Ignores: nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from servelab.models.errors import UnsupportedConfig
from servelab.models.reader.family import Family
from servelab.models.reader.keys import MAX_LAYERS, Keys, show
from servelab.models.reader.patterns import LAYER_TYPES
from servelab.models.reader.sizes import HIDDEN, LAYERS, Q_HEADS


def falcon(keys: Keys, family: Family) -> Family:
    """Settle Falcon's KV heads and norms by ``new_decoder_architecture`` and ``multi_query``.

    The first files of Falcon-40B (RefinedWeb) state neither, but ``n_head_kv``, which no file of
    the old architecture has. Source: tiiuae modelling_RW.py of both sizes.
    """
    heads = keys.count(*Q_HEADS)
    new = keys.flag(
        "new_decoder_architecture", keys.has("n_head_kv"), "absent: true where n_head_kv is stated"
    )
    multi_query = keys.flag("multi_query", True, "absent: true (FalconConfig)")
    parallel = keys.flag("parallel_attn", True, "absent: true (FalconConfig)")
    norms = keys.count_or_none("num_ln_in_parallel_attn", rule="absent: 2 in the new architecture")
    if new:
        kv_heads = keys.count_or_none("n_head_kv", "num_kv_heads", rule="absent")
        if kv_heads is None:
            keys.settle("num_key_value_heads", heads, "absent: one per query head (FalconConfig)")
        return replace(family, norms=norms or 2) if parallel else family
    keys.skip("n_head_kv", "num_kv_heads")
    if multi_query:
        keys.settle("num_key_value_heads", 1, "multi_query, old architecture: one")
    else:
        keys.settle("num_key_value_heads", heads, "multi_query = false: one per query head")
    return replace(family, norms=1) if parallel else family


def gpt_bigcode(keys: Keys, family: Family) -> Family:
    """Settle GPTBigCode's KV heads: one, unless ``multi_query`` is false."""
    if keys.flag("multi_query", True, "absent: true (GPTBigCodeConfig)"):
        keys.must_be("num_key_value_heads", (1,), "multi_query has one")
        keys.settle("num_key_value_heads", 1, "multi_query: one")
    return family


def chatglm(keys: Keys, family: Family) -> Family:
    """Settle ChatGLM's KV heads: ``multi_query_group_num``, if ``multi_query_attention``."""
    keys.must_be("quantization_bit", (0,), "weights of fewer bits")
    keys.must_be("prefix_projection", (False,), "a learned prefix")
    if not keys.flag("multi_query_attention", False, "absent: false (ChatGLMConfig)"):
        heads = keys.count(*Q_HEADS)
        keys.skip("multi_query_group_num")
        keys.settle("num_key_value_heads", heads, "multi_query_attention is false: one per head")
    elif not keys.has("multi_query_group_num"):
        raise UnsupportedConfig("multi_query_group_num", "is missing, with multi_query_attention")
    return family


def mpt(keys: Keys, family: Family) -> Family:
    """Settle MPT's KV heads and width from ``attn_config`` and ``expansion_ratio``."""
    attention = keys.section("attn_config")
    if attention is not None:
        kind = attention.text("attn_type") or "multihead_attention"
        kv_heads = attention.count_or_none("kv_n_heads", rule="absent: one per query head")
        if kind == "multiquery_attention":
            keys.settle("num_key_value_heads", 1, "attn_config.attn_type = multiquery_attention")
        elif kind not in ("multihead_attention", "grouped_query_attention"):
            raise UnsupportedConfig("attn_config.attn_type", f"{show(kind)} is not known")
        elif kv_heads is not None:
            keys.settle("num_key_value_heads", kv_heads, f"attn_config.kv_n_heads = {kv_heads}")
        attention.must_be("alibi", (True,), "learned positions or rotary")
        attention.must_be("qk_ln", (False,), "norms on queries and keys")
        attention.must_be("sliding_window_size", (-1,), "a window")
        attention.skip(
            "prefix_lm", "softmax_scale", "attn_impl", "alibi_bias_max", "rope", "attn_pdrop",
            "attn_uses_sequence_id",
        )  # fmt: skip
        attention.refuse_unread("attn_config.")
    keys.must_be("no_bias", (True,), "biases")
    keys.skip("learned_pos_emb", "norm_type", "ffn_config", "init_config", "embedding_fraction")
    ratio = keys.count_or(4, "expansion_ratio", rule="absent: 4 (MptConfig)")
    keys.settle("n_inner", ratio * keys.count(*HIDDEN), "expansion_ratio x d_model")
    return family


def dbrx(keys: Keys, family: Family) -> Family:
    """Settle DBRX's KV heads and experts from its two nested sections."""
    attention, ffn = keys.section("attn_config"), keys.section("ffn_config")
    for key, section in (("attn_config", attention), ("ffn_config", ffn)):
        if section is None:
            raise UnsupportedConfig(key, "is missing")
    assert attention is not None  # for the type checker: raised above
    assert ffn is not None
    kv_heads = attention.count("kv_n_heads")
    keys.settle("num_key_value_heads", kv_heads, f"attn_config.kv_n_heads = {kv_heads}")
    attention.skip("tie_word_embeddings")  # sections may be saved with all defaults
    attention.refuse_unread("attn_config.")
    for ordinary, own in (
        ("num_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
        ("ffn_hidden_size", "ffn_hidden_size"),
    ):
        value = ffn.count(own)
        keys.settle(ordinary, value, f"ffn_config.{own} = {value}")
    ffn.skip(
        "moe_jitter_eps", "moe_loss_weight", "moe_normalize_expert_weights", "hidden_size",
        "uniform_expert_assignment", "tie_word_embeddings",
    )  # fmt: skip
    ffn.refuse_unread("ffn_config.")
    return family


def gpt_neo(keys: Keys, family: Family) -> Family:
    """Settle GPT-Neo's layer kinds: ``attention_types`` is a list of (kinds, repetitions)."""
    layers = keys.count(*LAYERS, maximum=MAX_LAYERS)
    kinds: list[object] = []
    for entry in keys.listing("attention_types") or []:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise UnsupportedConfig("attention_types", f"{show(entry)} is no (kinds, count) pair")
        repeated, count = entry
        if not isinstance(repeated, (list, tuple)) or not isinstance(count, int):
            raise UnsupportedConfig("attention_types", f"{show(entry)} is no (kinds, count) pair")
        if count > layers:
            raise UnsupportedConfig("attention_types", f"has more entries than {layers} layers")
        kinds += list(repeated) * count
    listed = keys.listing("attention_layers", length=layers)
    if listed is not None and kinds and listed != kinds:
        raise UnsupportedConfig("attention_layers", "differs from attention_types")
    if not (listed or kinds):
        raise UnsupportedConfig("attention_types", "is missing")
    if any(kind not in LAYER_TYPES for kind in listed or kinds if isinstance(kind, str)):
        raise UnsupportedConfig("attention_types", "has a kind other than global and local")
    keys.settle("layer_types", listed or kinds, "attention_types")
    return family


def qwen(keys: Keys, family: Family) -> Family:
    """Settle the first Qwen's MLP width: ``intermediate_size`` counts gate and up together."""
    both = keys.count_or_none("intermediate_size", rule="absent")
    if both is not None:
        keys.settle("intermediate_size", both // 2, f"intermediate_size = {both}, for two matrices")
    return family


def stablelm(keys: Keys, family: Family) -> Family:
    """StableLM with ``use_parallel_residual`` has one norm per layer."""
    if keys.flag("use_parallel_residual", False, "absent: false (StableLmConfig)"):
        return replace(family, norms=1)
    return family


def opt(keys: Keys, family: Family) -> Family:
    """OPT may embed in another width than the model's; that is not modelled."""
    keys.must_be("word_embed_proj_dim", (keys.count(*HIDDEN),), "an embedding of another width")
    return family


def minimax_m2(keys: Keys, family: Family) -> Family:
    """MiniMax-M2's norms cover all heads of a layer; its prediction modules are not counted."""
    keys.must_be("qk_norm_type", ("per_layer",), "norms of another width")
    if set(keys.listing("attn_type_list") or [1]) != {1}:
        raise UnsupportedConfig("attn_type_list", "has another attention than softmax")
    if keys.has("num_mtp_modules"):
        keys.state("params_other", "prediction modules are stated, their shape is not: not counted")
    keys.skip("use_mtp", "mtp_transformer_layers", "num_mtp_modules")
    return family


def phi3(keys: Keys, family: Family) -> Family:
    """Phi-3's ``attention_bias`` is stated by its files and read by no matrix of the model code."""
    keys.must_be("full_attn_mod", (1,), "full attention in some layers only")
    keys.must_be("attention_bias", (False,), "biases that the model code does not have")
    return family


def cohere2(keys: Keys, family: Family) -> Family:
    """Cohere 2 states its period under two names, and its block by flags with one value."""
    if keys.has("layer_switch") and not keys.has("sliding_window_pattern"):
        period = keys.count("layer_switch")
        keys.settle("sliding_window_pattern", period, f"layer_switch = {period}")
    keys.must_be("order_of_interleaved_layers", ("local_attn_first",), "another order")
    keys.must_be("use_gated_activation", (True,), "two matrices")
    keys.must_be("use_parallel_block", (True,), "two norms")
    keys.must_be("use_embedding_sharing", (True,), "an lm_head of its own")
    keys.skip("layer_switch", "use_parallel_embedding")
    return family


def hyperclovax(keys: Keys, family: Family) -> Family:
    """HyperCLOVA X with ``use_post_norm`` has two norms more per layer."""
    if keys.flag("use_post_norm", False, "absent: false (HyperCLOVAXConfig)"):
        return replace(family, norms=4)
    return family


def ernie(keys: Keys, family: Family) -> Family:
    """ERNIE writes the experts of text and images as a list; only one number is modelled."""
    if isinstance(keys.raw("moe_num_experts"), (list, tuple)):
        raise UnsupportedConfig("moe_num_experts", "is a list: experts per modality")
    keys.must_be("moe_gate", ("topk", "topk_fused"), "another router")
    keys.must_be("moe_use_aux_free", (True,), "a router without its biases")
    return family


def hunyuan(keys: Keys, family: Family) -> Family:
    """Hunyuan's dense files carry keys of its other models, with values that switch them off."""
    keys.must_be("num_experts", (1,), "experts")
    keys.must_be("add_classification_head", (False,), "no lm_head")
    keys.must_be("norm_type", ("rms",), "other norms")
    keys.skip("cla_share_factor", "dense_list", "org_vocab_size")
    return family


DIALECTS: dict[str, Callable[[Keys, Family], Family]] = {
    "falcon": falcon,
    "RefinedWeb": falcon,
    "RefinedWebModel": falcon,
    "gpt_bigcode": gpt_bigcode,
    "chatglm": chatglm,
    "mpt": mpt,
    "dbrx": dbrx,
    "gpt_neo": gpt_neo,
    "qwen": qwen,
    "stablelm": stablelm,
    "stablelm_epoch": stablelm,
    "opt": opt,
    "minimax_m2": minimax_m2,
    "phi3": phi3,
    "ernie4_5_moe": ernie,
    "hyperclovax": hyperclovax,
    "hunyuan_v1_dense": hunyuan,
    "cohere2": cohere2,
}
