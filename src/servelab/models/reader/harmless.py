"""Which unread keys may be ignored: those that bear on neither shape nor cache.

Models: a key by its name. A stem such as ``attn``, ``expert`` or ``window`` in it makes it suspect;
a list of names that are known to change neither bytes nor parameters clears some again.

Assumes: a null, an empty list or an empty object says nothing.
"""

import re

#: A key with one of these in its name speaks of shape or cache, unless it is listed below.
_STEMS = re.compile(
    "attention|attn|head|kv|cache|window|swa|sliding|chunk|sparse|index|expert|moe|router|layer|"
    "block|mamba|ssm|conv|state|linear|delta|recurrent|latent|lora|rank|compress|share|sharing|"
    "cross|mla|mtp|nextn|hidden_size|dim|width|_size|group|pattern|memory|depth|token_merg|sink|"
    "mlp|ffn|proj|bias|norm|tie_|gate|query|key_value|alibi|position_embed|quant|adapter|segment|"
    "hybrid|ratio|interval|period|offset|freq"
)

#: Known to change neither parameters nor cache, with the stem that makes each of them suspect.
_NAMES = frozenset(
    # numerics: epsilons, ranges, dropouts, scales, soft caps
    """
    rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon
    layernorm_eps rms_norm_epsilon attention_dropout hidden_dropout hidden_dropout_prob
    attn_dropout attention_probs_dropout_prob attn_pdrop emb_dropout_prob attn_dropout_prob
    attention_dropout_prob final_logit_softcapping attn_logit_softcapping attention_multiplier
    query_pre_attn_scalar key_multiplier attention_out_multiplier attention_in_multiplier
    mlp_multipliers ssm_multipliers ssm_in_multiplier ssm_out_multiplier attention_value_scale
    scale_attn_weights scale_attn_by_inverse_layer_idx scale_depth attn_scale
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 fp32_residual_connection
    residual_in_fp32 apply_query_key_layer_scaling layer_scale norm_moe_eps softmax_scale
    apply_residual_connection_post_layernorm reorder_and_upcast_attn attn_temperature_tuning
    rescale_prenorm_residual mixer_rms_eps attention_scale use_scaled_init_method
    norm_after_attention low_cpu_mem_usage group_norm_eps clip_qkv
    full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor
    mlp_alpha_factor mlp_beta_factor layernorm_full_attention_alpha layernorm_full_attention_beta
    layernorm_linear_attention_alpha layernorm_linear_attention_beta layernorm_mlp_alpha
    layernorm_mlp_beta altup_coef_clip altup_active_idx altup_correct_scale
    activation_sparsity_pattern activation_situ_beta activation_situ_linear_beta swiglu_limit qkv_clip gate_lower_bound
    """
    # routing that moves no weight: how the router scores, normalises and balances
    """
    router_aux_loss_coef output_router_logits router_jitter_noise router_z_loss_coef
    input_jitter_noise norm_topk_prob routed_scaling_factor moe_router_dtype n_group topk_group
    topk_method seq_aux router_dtype num_expert_group use_grouped_topk moe_renormalize
    moe_router_activation_func moe_router_scaling_factor moe_norm_min moe_use_aux_free
    moe_router_score_function moe_aux_loss_coeff router_bias_update_rate moe_shared_expert_overlap
    moe_capacity routed_expert_scale expert_selection_fn moe_router_topk_scaling_factor
    router_activation_func norm_expert_weight need_fp32_gate moe_every_n load_balance_coeff
    """
    # position encodings without a table
    """
    partial_rotary_factor rotary_dim rope_scaling rope_theta rotary_emb_base rotary_pct
    original_max_position_embeddings position_embedding_type no_rope_layers no_rope_layer_interval
    rope_interleave indexer_rope_interleave alibi_bias_max use_alibi rope_ratio initial_context_length
    rope_local_base_freq rope_freq_constant rope_scaling_factor rope_freq_base nope_layer_interval
    global_rope_theta swa_rope_theta layer_rope use_mrope mrope_section rope_dim use_dynamic_ntk
    use_logn_attn longrope_scaling position_embedding_interval max_rope_freq
    cross_attention_rope no_rope_layer_freq
    """
    # execution: kernels, sharding, caching on or off, what is returned
    """
    use_cache chunk_size chunk_size_feed_forward mamba_chunk_size use_mamba_kernels use_mambapy
    use_associative_scan mamba_act mamba_hidden_act mlp_hidden_act projector_hidden_act
    output_hidden_states output_attentions pruned_heads pretraining_tp ep_size tensor_parallel
    tensor_parallel_size cache_implementation attn_implementation _attn_implementation
    use_flash_attention use_flash_attn _flash_attn_2_enabled flash_attn_version
    gradient_checkpointing_kwargs use_cache_quantization use_cache_kernel softmax_in_fp32
    num_logits_to_keep rms_norm use_mem_eff_path hidden_act time_step_limit use_bidirectional_attention
    slow_but_exact memory_efficient_attention masked_softmax_fusion bias_dropout_fusion
    use_post_norm_for_training offset_alibi moe_implementation index_share_for_mtp_iteration
    index_skip_topk_offset unsloth_version head_init_std quantization_status block_size_hint
    num_beam_groups ignore_index alibi lm_head_multiplier skip_bias_add skip_bias_add_qkv
    """
    # training, classification, generation
    """
    classifier_dropout classifier_bias initializer_range init_method_std layerdrop
    embedding_initializer_range w_init_variance_scale final_w_init_variance_scale max_window_size
    num_labels id2label label2id return_dict task_specific_params problem_type pooler_hidden_act
    summary_proj_to_labels summary_type summary_use_proj use_cut_cross_entropy freeze_layers
    bad_words_ids tie_encoder_decoder cross_attention_hidden_size add_cross_attention_text
    group_size_hint z_loss_coefficient aux_loss_alpha aux_loss_coef num_reward_heads
    tokenizer_class time_step_rank_hint mup_width_multiplier mup_attn_multiplier dim_model_base
    layer_norm_elementwise no_repeat_ngram_size encoder_no_repeat_ngram_size
    is_causal is_decoder vision_soft_tokens_per_image bias_dropout prefix_tuning
    linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor
    linear_allow_neg_eigval
    """.split()
)

#: Keys of towers, projectors and tokens of other media: counted apart, never part of the text decoder.
_MEDIA = re.compile("image|video|vision|audio|speech|projector|mm_|media|visual|pixel|vit_|img_")


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
    if lowered in _NAMES or lowered.endswith(("_token_id", "_token_ids", "_token_index")):
        return False
    return bool(_STEMS.search(lowered)) and not _MEDIA.search(lowered)
