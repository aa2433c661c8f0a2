"""Published files with the keys that made them hard to read: bytes of cache and known totals.

The totals are those of the published checkpoints, or of transformers' class on the meta device.
Keys that every reading ignores (tokens, dropouts, scales) are left out.
"""

import pytest

from servelab.models import ModelSpec, UnsupportedConfig

HALF = {"torch_dtype": "bfloat16"}
FALCON_40B = {  # the first file of Falcon-40B: neither multi_query nor new_decoder_architecture
    "model_type": "RefinedWeb", "hidden_size": 8192, "n_layer": 60, "n_head": 128, "n_head_kv": 8,
    "alibi": False, "bias": False, "parallel_attn": True, "vocab_size": 65024,
}  # fmt: skip
PHI_4_MINI = {
    "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 24, "num_key_value_heads": 8, "attention_bias": False,
    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    "max_position_embeddings": 131072, "sliding_window": 262144, "tie_word_embeddings": True,
    "vocab_size": 200064,
}  # fmt: skip
GLM_4_9B = {
    "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True, "hidden_size": 4096,
    "ffn_hidden_size": 13696, "kv_channels": 128, "multi_query_attention": True,
    "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 40, "rmsnorm": True,
    "post_layer_norm": True, "rope_ratio": 500, "seq_length": 131072, "padded_vocab_size": 151552,
    "tie_word_embeddings": False,
}  # fmt: skip
GRANITE_4_MICRO = {  # attention in every layer of a hybrid family
    "model_type": "granitemoehybrid", "hidden_size": 2560, "intermediate_size": 8192,
    "layer_types": ["attention"] * 40, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 8, "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 8192, "position_embedding_type": "rope", "mamba_n_heads": 80,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_n_groups": 1, "normalization_function": "rmsnorm", "tie_word_embeddings": True,
    "vocab_size": 100352, "attention_bias": False,
}  # fmt: skip
ERNIE_21B = {
    "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
    "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "moe_k": 6,
    "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_intermediate_size": 1536,
    "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True, "use_bias": False,
    "tie_word_embeddings": True, "vocab_size": 103424,
}  # fmt: skip
HUNYUAN_7B = {
    "model_type": "hunyuan_v1_dense", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "attention_head_dim": 128, "add_classification_head": False, "cla_share_factor": 2,
    "dense_list": [4096, 0], "norm_type": "rms", "num_experts": 1, "org_vocab_size": 128167,
    "use_cla": False, "use_qk_norm": True, "tie_word_embeddings": True, "vocab_size": 128167,
}  # fmt: skip
COMMAND_A = {
    "model_type": "cohere2", "hidden_size": 12288, "intermediate_size": 36864,
    "num_hidden_layers": 64, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "sliding_window": 4096, "sliding_window_pattern": 4, "max_position_embeddings": 131072,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": True, "vocab_size": 256000,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "use_sliding_window": False, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
STABLELM_3B = {
    "model_type": "stablelm_epoch", "hidden_size": 2560, "intermediate_size": 6912,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_heads": 32, "num_key_value_heads": 32,
    "norm_eps": 1e-5, "rope_pct": 0.25, "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip
MISTRAL_SMALL = {
    "model_type": "mistral3", "text_config": MISTRAL, "vision_config": {"patch_size": 14},
    "multimodal_projector_bias": False, "spatial_merge_size": 2, **HALF,
}  # fmt: skip
INTERNVL = {  # the outer section says the vocabulary again, and LoRA ranks that are 0
    "model_type": "internvl_chat", "llm_config": MISTRAL, "vocab_size": 131072, "hidden_size": 5120,
    "downsample_ratio": 0.5, "select_layer": -1, "use_backbone_lora": 0, "use_llm_lora": 0, **HALF,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kv_bytes", "reserved_bytes", "params"),
    [
        (FALCON_40B, 60 * 2 * 8 * 64 * 2, None, 41_303_293_952),
        (PHI_4_MINI, 32 * 2 * 8 * 128 * 2, None, 3_836_021_760),
        (GLM_4_9B, 40 * 2 * 2 * 128 * 2, None, 9_399_951_360),
        (GRANITE_4_MICRO, 40 * 2 * 8 * 64 * 2, None, 3_402_836_480),
        (ERNIE_21B, 28 * 2 * 4 * 128 * 2, None, 21_825_437_888),
        (HUNYUAN_7B, 32 * 2 * 8 * 128 * 2, None, 7_504_568_320),
        (COMMAND_A, 16 * 2 * 8 * 128 * 2, 64 * 2 * 8 * 128 * 2, 111_057_580_032),
        (QWEN3_NEXT, 12 * 2 * 2 * 256 * 2, None, 79_674_391_296),
        (STABLELM_3B, 32 * 2 * 32 * 80 * 2, None, 2_795_443_200),
        (MISTRAL_SMALL, 40 * 2 * 8 * 128 * 2, None, 23_572_403_200),
        (INTERNVL, 40 * 2 * 8 * 128 * 2, None, 23_572_403_200),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_reads_what_is_published(config, kv_bytes, reserved_bytes, params):
    spec = ModelSpec.from_config(config)
    assert spec.kv_bytes_per_token() == kv_bytes
    assert spec.kv_bytes_per_token(view="reserved") == (reserved_bytes or kv_bytes)
    assert spec.params_total == params
    assert "no family known" not in spec.provenance["model_type"]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**PHI_4_MINI, "full_attn_mod": 2}, "full_attn_mod"),
        ({**ERNIE_21B, "moe_use_aux_free": False}, "moe_use_aux_free"),
        ({**HUNYUAN_7B, "num_experts": 16}, "num_experts"),
        ({**COMMAND_A, "use_embedding_sharing": False}, "use_embedding_sharing"),
        ({**QWEN3_NEXT, "use_sliding_window": True}, "use_sliding_window"),
        ({**QWEN3_NEXT, "use_sliding_window": None, "sliding_window": 4096}, "sliding_window"),
        ({**INTERNVL, "vocab_size": 131071}, "vocab_size"),
        ({**INTERNVL, "use_llm_lora": 16}, "use_llm_lora"),
        ({**MISTRAL, "total_ut_steps": 4}, "total_ut_steps"),  # each step keeps a cache of its own
    ],
)
def test_refuses_what_would_change_the_shape(config, key):
    with pytest.raises(UnsupportedConfig) as caught:
        ModelSpec.from_config(config)
    assert caught.value.key == key


# --- quantised: which matrices keep the model's dtype -------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
ATTENTION = 40 * (5120 * (32 + 2 * 8) * 128 + 32 * 128 * 5120)  # weights of Mistral Small's
MLP = 40 * 3 * 5120 * 32768


def quantised(quantization):
    return ModelSpec.from_config({**MISTRAL, **HALF, "quantization_config": quantization})


@pytest.mark.parametrize(
    "left_out",
    [
        {"ignored_layers": ["re:.*self_attn.*", "lm_head"]},
        {"modules_to_not_convert": ["self_attn"]},
        {"ignore": [r"re:model\.language_model\.layers\.\d+\.self_attn\..*"]},
    ],
)
def test_fp8_leaves_out_what_is_listed_under_any_name(left_out):
    whole, part = quantised(FP8).weight_bytes(), quantised({**FP8, **left_out}).weight_bytes()
    assert part - whole == ATTENTION - 40 * 2 * 4  # a byte more per weight, two fp32 scales less


def test_gptq_rules_leave_modules_out():
    rules = {"lm_head": {}, "-:.*self_attn.*": {}}
    spec = quantised({**GPTQ, "dynamic": rules})
    matrices = 40 * ((5120 * 2 * 32768 + 32768 * 5120) // 128 * (16 + 4) // 8)  # scales, zeros
    groups = 40 * 4 * (5120 + 32768)  # the group of each row
    assert spec.weight_bytes() == 2 * (spec.params_total - MLP) + MLP // 2 + matrices + groups


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        ({**GPTQ, "dynamic": {"+:.*down_proj": {"bits": 8}}}, "dynamic"),
        ({**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj"]]},
         "modules_in_block_to_quantize"),
        ({**FP8, "sparsity_config": {"format": "sparse-24-bitmask"}}, "format"),
    ],
)  # fmt: skip
def test_refuses_formats_that_differ_by_module(quantization, key):
    with pytest.raises(UnsupportedConfig) as caught:
        quantised(quantization)
    assert caught.value.key == key
