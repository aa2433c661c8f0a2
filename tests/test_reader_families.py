"""The reader against the model classes of transformers: parameters, KV heads, head sizes, state.

Every class is built on the meta device with few layers, its configuration is written as the library
would save it, and read back by ours. What differs is either refused or a failure here.
"""

import json
import math

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from servelab.models import ModelSpec, UnsupportedConfig

TOKENS = 7  # a length that no shape has by itself

#: (model_type, what differs from the class's defaults).
FAMILIES = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 64, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"head_dim": 96, "sliding_window": 9}),
    ("ministral3", {}),
    ("qwen2", {"num_key_value_heads": 4}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 9}),
    ("qwen3", {"attention_bias": True}),
    ("gemma", {"num_key_value_heads": 1}),
    ("gemma2", {}),
    ("gemma3_text", {"num_hidden_layers": 7}),
    ("gemma3n_text", {"num_hidden_layers": 10, "num_kv_shared_layers": 4}),
    ("gemma4_text", {"num_hidden_layers": 12, "num_kv_shared_layers": 6}),
    ("gemma4_text", {"num_hidden_layers": 6, "attention_k_eq_v": True, "enable_moe_block": True,
                     "num_global_key_value_heads": 2, "num_experts": 8, "top_k_experts": 2,
                     "moe_intermediate_size": 64, "hidden_size_per_layer_input": 0}),
    ("vaultgemma", {}),
    ("cohere", {"use_qk_norm": True}),
    ("cohere2", {"num_hidden_layers": 5}),
    ("phi", {"num_key_value_heads": 8}),
    ("phi3", {"num_key_value_heads": 8}),
    ("persimmon", {}),
    ("starcoder2", {"use_bias": False}),
    ("stablelm", {"use_qkv_bias": True, "num_key_value_heads": 8}),
    ("stablelm", {"use_parallel_residual": True}),
    ("olmo", {"num_key_value_heads": 8}),
    ("olmo2", {"num_key_value_heads": 8}),
    ("olmo3", {"num_hidden_layers": 5}),
    ("exaone", {}),
    ("exaone4", {"num_key_value_heads": 8}),
    ("glm", {}),
    ("glm4", {}),
    ("granite", {"num_key_value_heads": 8, "attention_bias": True}),
    ("helium", {}),
    ("internlm3", {"num_key_value_heads": 4}),
    ("seed_oss", {"attention_out_bias": True}),
    ("smollm3", {}),
    ("arcee", {"num_key_value_heads": 8}),
    ("apertus", {"num_key_value_heads": 8}),
    ("apertus1p5_text", {"num_key_value_heads": 8}),
    ("ernie4_5", {"use_bias": True}),
    ("hyperclovax", {}),
    ("hunyuan_v1_dense", {"head_dim": 128, "num_key_value_heads": 8}),
    ("nemotron", {"num_key_value_heads": 8}),
    ("cwm", {}),
    ("falcon", {}),
    ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64,
                "hidden_size": 4096}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64,
                "hidden_size": 4096, "num_ln_in_parallel_attn": 1}),
    ("bloom", {"n_head": 4}),
    ("gpt2", {"n_inner": 1000}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neo", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}),
    ("gpt_neox", {"attention_bias": False}),
    ("gptj", {}),
    ("codegen", {}),
    ("mpt", {"n_heads": 8}),
    ("opt", {}),
    # --- experts
    ("mixtral", {}),
    ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    ("qwen2_moe", {"mlp_only_layers": [1], "sliding_window": 4096}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("olmoe", {"num_key_value_heads": 8}),
    ("flex_olmo", {}),
    ("granitemoe", {}),
    ("granitemoeshared", {"shared_intermediate_size": 512}),
    ("gpt_oss", {}),
    ("glm4_moe", {"head_dim": 128, "use_qk_norm": True, "num_hidden_layers": 3}),
    ("ernie4_5_moe", {"moe_layer_end_index": 2}),
    ("exaone_moe", {}),
    ("solar_open", {}),
    ("minimax_m2", {}),
    ("llama4_text", {"num_hidden_layers": 5, "interleave_moe_layer_step": 2}),
    ("dots1", {"first_k_dense_replace": 1, "n_routed_experts": 16, "n_shared_experts": 2,
               "num_experts_per_tok": 4}),
    # --- latent attention
    ("deepseek_v2", {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}),
    ("deepseek_v2", {"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "q_lora_rank": None}),
    ("deepseek_v3", {"num_hidden_layers": 5, "attention_bias": True}),
    ("deepseek_v32", {"num_hidden_layers": 5}),
    ("glm_moe_dsa", {"num_hidden_layers": 5}),
    ("glm4_moe_lite", {}),
    ("minicpm3", {}),
    ("youtu", {}),
    # --- recurrent state
    ("qwen3_next", {"num_hidden_layers": 5}),
    ("qwen3_5_text", {"num_hidden_layers": 5}),
    ("qwen3_5_moe_text", {"num_hidden_layers": 5}),
    ("jamba", {"num_hidden_layers": 8}),
    ("jamba", {"num_hidden_layers": 8, "mamba_proj_bias": True, "mamba_dt_rank": 7}),
    ("bamba", {"num_hidden_layers": 5, "attn_layer_indices": [1, 3]}),
    ("granitemoehybrid", {"num_hidden_layers": 4,
                          "layer_types": ["mamba", "attention", "mamba", "mamba"]}),
    ("granitemoehybrid", {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
                          "num_local_experts": 0}),
    ("falcon_h1", {"mamba_rms_norm": True}),
    ("falcon_mamba", {}),
    ("mamba", {"use_bias": True, "use_conv_bias": False}),
    ("mamba2", {}),
    ("nemotron_h", {}),
    ("recurrent_gemma", {"num_hidden_layers": 5, "num_key_value_heads": 1}),
    ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    ("lfm2_moe", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    ("minimax", {}),
    ("kimi_linear", {"num_hidden_layers": 5}),
    ("mllama", {}),
]  # fmt: skip

#: Types whose keys look ordinary and whose shape is not: they must be refused, not guessed.
NOT_MODELLED = [
    "biogpt", "bitnet", "diffllama", "jais2", "nanochat", "xglm", "doge", "jetmoe", "longcat_flash",
    "rwkv", "zamba", "zamba2", "olmo_hybrid", "bailing_hybrid", "deepseek_v4", "afmoe", "hy_v3",
    "bert-generation", "git",
]  # fmt: skip

#: Classes that cannot run without memory, or keep something else than engines do: Falcon repeats
#: its KV heads before it stores them. Their projections are compared all the same.
CACHE_NOT_COMPARED = {"falcon", "recurrent_gemma", "kimi_linear"}


def saved(config):
    """Return a configuration as it reads from its file."""
    return json.loads(config.to_json_string(use_diff=False))


def built(model_type, changes):
    """Return the class's configuration and its model without memory."""
    config_class = CONFIG_MAPPING[model_type]
    layers = {} if {"num_layers", "layer_types"} & set(changes) else {"num_hidden_layers": 4}
    if model_type in ("gemma3n_text", "mllama"):
        layers = {}
    if model_type == "nemotron_h":
        layers = {}  # its pattern says how many
    config = config_class(**{**layers, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return config, model.eval()


def parameters(model):
    """Return the parameters of the text decoder and its router biases, which are buffers there."""
    biases = [b for n, b in model.named_buffers() if n.endswith(("e_score_correction_bias",
                                                                  "expert_bias"))]  # fmt: skip
    return sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in biases)


def cached_per_token(model):
    """Return the numbers that one token leaves in each layer, from a forward pass on no memory."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with torch.no_grad():
        layers = model(input_ids=tokens, use_cache=True).past_key_values.layers
    return [
        sum(
            math.prod(t.shape) // TOKENS
            for t in vars(layer).values()
            if isinstance(t, torch.Tensor) and TOKENS in t.shape
        )
        for layer in layers
    ]


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES)
def test_reads_what_the_class_builds(model_type, changes):
    config, model = built(model_type, changes)
    spec = ModelSpec.from_config(saved(config))
    assert spec.params_total == parameters(model)
    assert spec.kv_bytes_per_token(view="reserved") == 2 * sum(
        layer.kv_elements_per_token for layer in spec.layers
    )
    if model_type not in CACHE_NOT_COMPARED:
        expected = cached_per_token(model)
        expected += [0] * (len(spec.layers) - len(expected))  # last ones without keys
        assert [layer.kv_elements_per_token for layer in spec.layers] == expected


@pytest.mark.parametrize("model_type", NOT_MODELLED)
def test_refuses_what_is_not_modelled(model_type):
    with pytest.raises(UnsupportedConfig):
        ModelSpec.from_config(saved(CONFIG_MAPPING[model_type]()))
