"""Which unread keys may be ignored: those that bear on neither shape nor cache.

Models: a key by its name. A stem such as ``attn``, ``expert`` or ``window`` in it makes it suspect;
a list of names that are known to change neither bytes nor parameters clears some again.

Assumes: a null, an empty list or an empty object says nothing.
"""

import re

#: A key with one of these in its name speaks of shape or cache, unless it is listed below.
_STEMS = re.compile(
    "attention|attn|head|kv|cache|window|swa|sliding|chunk|sparse|index|expert|moe|router|layer|"
    "block|mamba|ssm|conv|state|linear|delta|recur|loop|repeat|ut_step|latent|lora|rank|compress|share|sharing|"
    "cross|mla|mtp|nextn|hidden_size|dim|width|_size|group|pattern|memory|depth|token_merg|sink|"
    "mlp|ffn|proj|bias|norm|tie_|gate|query|key_value|alibi|position_embed|quant|adapter|segment|"
    "hybrid|ratio|interval|period|offset|freq"
)

#: Known to change neither parameters nor cache, with the stem that makes each of them suspect.
_NAMES = {
    # numerics: epsilons, ranges, dropouts, scales, soft caps
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps",
    "norm_epsilon", "attention_dropout", "attn_dropout", "attention_probs_dropout_prob",
    "attn_pdrop", "attn_dropout_prob", "attn_logit_softcapping", "attention_multiplier",
    "query_pre_attn_scalar", "attention_out_multiplier", "attention_in_multiplier",
    "mlp_multipliers", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
    "attention_value_scale", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
    "scale_depth", "attn_scale", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
    "apply_query_key_layer_scaling",
    "cache_implementation", "apply_residual_connection_post_layernorm",
    "reorder_and_upcast_attn", "attn_temperature_tuning", "rescale_prenorm_residual",
    "clip_qkv", "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor",
    "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor",
    "layernorm_full_attention_alpha", "layernorm_full_attention_beta",
    "layernorm_linear_attention_alpha", "layernorm_linear_attention_beta",
    "layernorm_mlp_alpha", "layernorm_mlp_beta", "activation_sparsity_pattern",
    "activation_situ_linear_beta", "output_gate_type", "gate_lower_bound",
    # routing that moves no weight: how the router scores, normalises and balances
    "router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "router_z_loss_coef",
    "norm_topk_prob", "moe_router_dtype", "n_group", "topk_group", "router_dtype",
    "num_expert_group", "use_grouped_topk", "moe_renormalize", "moe_router_activation_func",
    "moe_router_scaling_factor", "moe_norm_min", "moe_shared_expert_overlap", "moe_capacity",
    "expert_selection_fn",
    # position encodings without a table
    "rotary_dim", "original_max_position_embeddings", "no_rope_layers",
    "no_rope_layer_interval", "indexer_rope_interleave", "alibi_bias_max",
    "rope_local_base_freq", "rope_freq_constant", "rope_ratio", "swa_rope_theta", "use_logn_attn",
    # execution: kernels, sharding, caching on or off, what is returned
    "use_cache", "chunk_size", "chunk_size_feed_forward", "mamba_chunk_size",
    "use_mamba_kernels", "use_mambapy", "mamba_hidden_act", "mlp_hidden_act",
    "projector_hidden_act", "output_hidden_states", "output_attentions", "ep_size",
    "attn_implementation", "_attn_implementation", "use_flash_attn", "use_cache_quantization",
    "use_cache_kernel", "rms_norm", "use_bidirectional_attention", "bias_dropout_fusion",
    "offset_alibi", "index_share_for_mtp_iteration", "index_skip_topk_offset",
    "quantization_status", "num_beam_groups", "ignore_index", "alibi", "lm_head_multiplier",
    "skip_bias_add", "skip_bias_add_qkv", "pre_allocate_kv_cache", "fused_add_norm",
    "pad_vocab_size_multiple", "attn_rotary_emb", "interleaved_qkv", "embeddings_scale_by_sqrt_dim",
    # training, classification, generation
    "classifier_bias", "layerdrop", "summary_proj_to_labels", "summary_use_proj",
    "tie_encoder_decoder", "num_reward_heads", "dim_model_base", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "linear_a_log_min", "linear_a_log_max", "linear_dt_min",
    "linear_dt_max", "linear_dt_init_floor", "linear_allow_neg_eigval",
}  # fmt: skip

#: Keys of towers, projectors and tokens of other media: no part of the text decoder.
_MEDIA = re.compile(
    "image|video|vision|audio|speech|projector|mm_|media|visual|pixel|vit_|img_|spatial|downsample|"
    "select_layer"
)


def bears_on_shape(name: object, value: object) -> bool:
    """Return whether an unread key may change parameters or cache.

    >>> bears_on_shape("kv_compression", 4), bears_on_shape("rms_norm_eps", 1e-5)
    (True, False)
    """
    if not isinstance(name, str) or value is None or value == [] or value == {}:
        return False
    lowered = name.lower()
    if value is False and lowered.endswith("bias"):
        return False  # a bias that is not there
    if lowered in ("use_backbone_lora", "use_llm_lora"):
        return bool(value)  # the rank that a fine-tuning had, 0 without
    if lowered in _NAMES or lowered.endswith(("_token_id", "_token_ids", "_token_index")):
        return False
    return bool(_STEMS.search(lowered)) and not _MEDIA.search(lowered)
