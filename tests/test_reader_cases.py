"""The given configurations: bytes per token, window, state and parameters, to the digit."""

import json
from importlib import resources

import pytest

from servelab.models import ModelSpec, UnsupportedConfig

CASES = json.loads(
    (resources.files("servelab") / "data/cases/config_cases.json").read_text(encoding="utf-8")
)
BY_ID = {case["id"]: case for case in CASES}
REFUSED = {"deepseek-ai/DeepSeek-V4-Flash", "xai-org/grok-1"}  # both uncertain, both may be


def read(case):
    return ModelSpec.from_config(case["config"], case["id"])


@pytest.mark.parametrize("name", sorted(set(BY_ID) - REFUSED))
def test_cache_and_state(name):
    spec, expected = read(BY_ID[name]), BY_ID[name]["expected"]
    assert spec.kv_bytes_per_token() == expected["kv_bytes_per_token_bf16"]
    reserved = expected["kv_bytes_per_token_bf16_all_layers_reserved"]
    assert spec.kv_bytes_per_token(view="reserved") == reserved
    assert spec.state_bytes_per_sequence == expected["fixed_state_bytes_per_sequence"]
    windows = {spec.window(layer) for layer in spec.layers} - {None}
    assert windows == ({expected["sliding_window"]} if expected["sliding_window"] else set())


@pytest.mark.parametrize("name", sorted(set(BY_ID) - REFUSED))
def test_window_is_where_growth_changes(name):
    spec, window = read(BY_ID[name]), BY_ID[name]["expected"]["sliding_window"]
    if window is None:
        grown = spec.sequence_bytes(2) - spec.sequence_bytes(1)
        assert grown == spec.kv_bytes_per_token(view="reserved")
        return
    below = spec.sequence_bytes(window) - spec.sequence_bytes(window - 1)
    above = spec.sequence_bytes(window + 1) - spec.sequence_bytes(window)
    assert below == spec.kv_bytes_per_token(view="reserved")
    assert above == spec.kv_bytes_per_token()


@pytest.mark.parametrize(
    "name", [c["id"] for c in CASES if c["expected"]["total_params"] is not None]
)
def test_parameters(name):
    spec, expected = read(BY_ID[name]), BY_ID[name]["expected"]
    assert spec.params_total == expected["total_params"]
    assert sum(spec.params_by_part.values()) == spec.params_total
    if expected["active_params"] is not None:
        assert spec.params_active == expected["active_params"]
    assert spec.weight_bytes("bf16") == 2 * expected["total_params"]


def test_only_uncertain_cases_are_refused():
    for name in REFUSED:
        assert BY_ID[name]["uncertain_fields"]
        with pytest.raises(UnsupportedConfig):
            read(BY_ID[name])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("google/gemma-3-27b-it", "vocab_size"),
        ("facebook/opt-13b", "max_position_embeddings"),
        ("apple/OpenELM-1_1B", "ffn_multipliers"),
        ("bigcode/gpt_bigcode-santacoder", "max_position_embeddings"),
        ("stepfun-ai/Step-3.7-Flash", "attention_other_setting"),
    ],
)
def test_weights_of_a_file_that_leaves_them_out_are_refused(name, key):
    spec = read(BY_ID[name])
    assert key in spec.unknown
    for question in (lambda: spec.params_total, spec.weight_bytes, lambda: spec.lm_head):
        with pytest.raises(UnsupportedConfig):
            question()


#: Families that transformers 5.24 does not build, or builds under other keys: the keys of their
#: published files and the totals of their weights, both recalled, from the hub's pages.
RECALLED = {
    "Qwen-7B": (7721324544, {
        "model_type": "qwen", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "intermediate_size": 22016, "kv_channels": 128,
        "seq_length": 8192, "max_position_embeddings": 32768, "vocab_size": 151936,
        "no_bias": True, "tie_word_embeddings": False, "use_cache_quantization": False,
    }),
    "chatglm3-6b": (6243584000, {
        "model_type": "chatglm", "hidden_size": 4096, "num_layers": 28, "num_attention_heads": 32,
        "ffn_hidden_size": 13696, "kv_channels": 128, "multi_query_attention": True,
        "multi_query_group_num": 2, "padded_vocab_size": 65024, "seq_length": 8192,
        "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True,
        "prefix_projection": False, "quantization_bit": 0, "tie_word_embeddings": False,
    }),
    "dbrx-base": (131596523520, {
        "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
        "vocab_size": 100352, "tie_word_embeddings": False,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }),
    "MiniMax-Text-01": (456089655296, {
        "model_type": "minimax_text_01", "hidden_size": 6144, "intermediate_size": 9216,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 200064, "num_local_experts": 32, "num_experts_per_tok": 2,
        "attn_type_list": ([0] * 7 + [1]) * 10, "shared_intermediate_size": 0, "postnorm": True,
        "tie_word_embeddings": False,
    }),
    "OpenELM-1_1B": (1079891456, {
        "model_type": "openelm", "model_dim": 2048, "num_transformer_layers": 28, "head_dim": 64,
        "num_kv_heads": [4] * 3 + [5] * 7 + [6] * 8 + [7] * 6 + [8] * 4,
        "num_query_heads": [16] * 3 + [20] * 7 + [24] * 8 + [28] * 6 + [32] * 4,
        "ffn_multipliers": [
            0.5, 0.63, 0.76, 0.89, 1.02, 1.15, 1.28, 1.41, 1.54, 1.67, 1.8, 1.93, 2.06, 2.19,
            2.31, 2.44, 2.57, 2.7, 2.83, 2.96, 3.09, 3.22, 3.35, 3.48, 3.61, 3.74, 3.87, 4.0,
        ],
        "ffn_dim_divisor": 256, "ffn_with_glu": True, "normalize_qk_projections": True,
        "share_input_output_layers": True, "vocab_size": 32000, "max_context_length": 2048,
    }),
    "starcoder": (15517456384, {
        "model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48,
        "n_inner": 24576, "n_positions": 8192, "vocab_size": 49152, "multi_query": True,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(RECALLED))
def test_recalled_totals(name):
    total, config = RECALLED[name]
    assert ModelSpec.from_config(config).params_total == total
