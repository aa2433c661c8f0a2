"""The reader's rules: names, patterns, contradictions, wrong files, provenance, weight bytes."""

import json
import time

import pytest

from servelab.models import LatentAttention, ModelSpec, UnsupportedConfig

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
PER_HEAD = 2 * 32 * 2  # keys and values of one KV head and layer in bf16, head_dim 32


def read(changes, base=LLAMA):
    """Return the spec of a base configuration with changes; DROP removes a key."""
    config = {**base, **changes}
    return ModelSpec.from_config({k: v for k, v in config.items() if v is not DROP})


DROP = object()


def refusal(changes, base=LLAMA):
    with pytest.raises(UnsupportedConfig) as caught:
        read(changes, base)
    return caught.value


# --- KV heads and head_dim under every name -----------------------------------------------------

FALCON = {"model_type": "falcon", "num_key_value_heads": DROP, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({}, 2),
        ({"num_key_value_heads": None}, 8),
        ({"num_key_value_heads": DROP}, 8),
        ({"num_key_value_heads": DROP, "num_kv_heads": 4}, 4),
        ({"num_key_value_heads": 4, "num_kv_heads": 4}, 4),
        ({**FALCON}, 1),  # multi_query is true where absent
        ({**FALCON, "multi_query": True, "num_kv_heads": 8}, 1),  # and num_kv_heads is a decoy
        ({**FALCON, "multi_query": False}, 8),
        ({**FALCON, "multi_query": True, "new_decoder_architecture": True, "n_head_kv": 2}, 2),
        ({"model_type": "RefinedWeb", "num_key_value_heads": DROP, "num_attention_heads": DROP,
          "n_head": 8, "new_decoder_architecture": True, "num_kv_heads": 4, "n_head_kv": 4}, 4),
        ({"model_type": "gpt_bigcode", "num_key_value_heads": DROP}, 1),
        ({"model_type": "gpt_bigcode", "num_key_value_heads": DROP, "multi_query": False}, 8),
        ({"model_type": "chatglm", "num_key_value_heads": DROP, "multi_query_group_num": 2,
          "multi_query_attention": True}, 2),
        ({"model_type": "chatglm", "num_key_value_heads": DROP, "multi_query_group_num": 2}, 8),
        ({"model_type": "mpt", "num_key_value_heads": DROP, "attn_config": {"kv_n_heads": 4}}, 4),
        ({"model_type": "mpt", "num_key_value_heads": DROP,
          "attn_config": {"attn_type": "multiquery_attention"}}, 1),
        ({"model_type": "dbrx", "num_key_value_heads": DROP, "attn_config": {"kv_n_heads": 2},
          "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}}, 2),
    ],
)  # fmt: skip
def test_kv_heads_under_every_name(changes, kv_heads):
    spec = read(changes)
    assert spec.kv_bytes_per_token() == 6 * kv_heads * PER_HEAD
    assert "num_key_value_heads" in spec.provenance or "n_head" in str(dict(spec.provenance))


def test_kv_heads_per_layer():
    spec = read({"num_key_value_heads": [1, 2, 4, 8, 8, 1]})
    assert spec.kv_bytes_per_token() == 24 * PER_HEAD
    assert refusal({"num_key_value_heads": [1, 2]}).key == "num_key_value_heads"


def test_explicit_head_dim_wins_over_hidden_size():
    assert read({"head_dim": 64}).kv_bytes_per_token() == 2 * read({}).kv_bytes_per_token()
    assert read({"head_dim": None}).kv_bytes_per_token() == read({}).kv_bytes_per_token()
    assert refusal({"hidden_size": 250}).key == "hidden_size"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads"),  # says 4, the other name 2
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),  # not of this family
        ({"attention_compression_ratio": 4}, "attention_compression_ratio"),
        ({"sliding_window": 128}, "sliding_window"),  # nothing says which layers
        ({"num_experts": 8}, "num_experts"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers"),
        ({"num_hidden_layers": 6.0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64},
         "max_window_layers"),
        ({"model_type": "mistral"}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "gemma"}, "head_dim"),
        ({"model_type": "falcon", "new_decoder_architecture": "yes"}, "new_decoder_architecture"),
        ({"model_type": "opt", "word_embed_proj_dim": 128}, "word_embed_proj_dim"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before"),
        ({"model_type": "bert", "type_vocab_size": 2}, "type_vocab_size"),
    ],
)  # fmt: skip
def test_refusals_name_the_key(changes, key):
    error = refusal(changes)
    assert error.key == key
    assert str(error) == f"{key}: {error.why}"


@pytest.mark.parametrize("key", sorted(set(LLAMA) - {"model_type", "tie_word_embeddings"}))
def test_a_missing_size_is_never_filled_in(key):
    if key in ("num_key_value_heads", "max_position_embeddings"):
        assert key in read({key: DROP}).provenance
        for model_type in ("mistral", "qwen3"):  # whose code has a number of its own
            changes = {"model_type": model_type, "sliding_window": None, "head_dim": 32, key: DROP}
            if key == "num_key_value_heads":
                assert refusal(changes).key == key
                assert read({**changes, key: None}).kv_bytes_per_token() == 6 * 8 * PER_HEAD
        return
    with pytest.raises(UnsupportedConfig) as caught:  # at once, or where only weights need it
        _ = read({key: DROP}).params_total
    assert caught.value.key == key


def test_unknown_type_with_ordinary_keys_is_read_and_marked():
    spec = read({"model_type": "somebodys_model"})
    assert spec.kv_bytes_per_token() == read({}).kv_bytes_per_token()
    assert "ordinary rules" in spec.provenance["model_type"]
    assert "ordinary rules" not in read({}).provenance["model_type"]
    with pytest.raises(UnsupportedConfig, match="tie_word_embeddings"):
        _ = read({"model_type": "somebodys_model", "tie_word_embeddings": DROP}).params_total


# --- which layers see a window ------------------------------------------------------------------

GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 32, "sliding_window": 64}
WINDOWS = [
    ({"model_type": "mistral", "sliding_window": 64}, "ssssss"),
    ({"model_type": "mistral", "sliding_window": None}, "ffffff"),
    ({"model_type": "mistral", "sliding_window": 4096}, "ffffff"),  # never fills
    ({"model_type": "qwen2", "sliding_window": 64}, "ffffff"),  # no switch: off
    ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, "ffffff"),
    ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True,
      "max_window_layers": 4}, "ffffss"),
    ({"model_type": "gemma2", "head_dim": 32, "sliding_window": 64}, "sfsfsf"),
    ({"model_type": "cohere2", "sliding_window": 64}, "sssfss"),
    ({"model_type": "gemma3", "head_dim": 32, "sliding_window": 64}, "sssssf"),
    ({"model_type": "gemma3", "head_dim": 32, "sliding_window": 64,
      "sliding_window_pattern": 3}, "ssfssf"),
    ({"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LLG"}, "ssfssf"),
    ({"model_type": "somebodys_model", "sliding_window": 64, "layer_types":
      ["sliding_attention", "full_attention"] * 3}, "sfsfsf"),
    ({"model_type": "llama4", "attention_chunk_size": 64, "no_rope_layers": [1, 1, 0, 1, 1, 0],
      "intermediate_size_mlp": 512, "head_dim": 32}, "ssfssf"),
    ({"model_type": "llama4", "attention_chunk_size": 64, "no_rope_layers": [],
      "head_dim": 32}, "sssfss"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "pattern"), WINDOWS)
def test_which_layers_slide(changes, pattern):
    spec = read(changes)
    assert "".join("f" if spec.window(x) is None else "s" for x in spec.layers) == pattern
    full = pattern.count("f") * 2 * PER_HEAD
    assert spec.kv_bytes_per_token() == full
    assert spec.kv_bytes_per_token(view="reserved") == 12 * PER_HEAD
    held = spec.sequence_bytes(100) - 100 * full
    assert held == (6 - pattern.count("f")) * 64 * 2 * PER_HEAD


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"layer_types": ["full_attention"] * 5 + ["magic"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 6, "sliding_window_pattern": 2}, "layer_types"),
        ({"layer_types": ["linear_attention"] + ["full_attention"] * 5}, "layer_types"),
        ({"sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
        ({"sliding_window": None, "sliding_window_pattern": 2}, "sliding_window"),
    ],
)
def test_a_pattern_that_contradicts_itself_is_refused(changes, key):
    assert refusal(changes, GEMMA2).key == key


# --- latent attention, experts, state -----------------------------------------------------------

DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 2,
}


def test_latents_have_no_factor_two_and_no_heads():
    spec = read({}, DEEPSEEK)
    assert spec.kv_bytes_per_token() == 6 * (64 + 16) * 2
    assert read({"num_key_value_heads": 1}, DEEPSEEK).kv_bytes_per_token() == 6 * 80 * 2
    assert all(isinstance(layer.attention, LatentAttention) for layer in spec.layers)
    indexed = {"model_type": "deepseek_v32", "index_topk": 8, "index_n_heads": 2,
               "index_head_dim": 20}  # fmt: skip
    assert read(indexed, DEEPSEEK).kv_bytes_per_token() == 6 * (80 + 20) * 2
    some = {**indexed, "indexer_types": ["full", "shared", "shared"] * 2}
    assert read(some, DEEPSEEK).kv_bytes_per_token() == (6 * 80 + 2 * 20) * 2


def test_active_parameters_leave_out_idle_experts():
    spec = read({}, DEEPSEEK)
    one_expert = 3 * 256 * 128
    assert spec.params_total - spec.params_active == 4 * 12 * one_expert
    assert refusal({"num_experts_per_tok": 17}, DEEPSEEK).key == "num_experts_per_tok"


def test_prediction_layers_are_counted_apart():
    without, with_one = read({}, DEEPSEEK), read({"num_nextn_predict_layers": 1}, DEEPSEEK)
    assert without.params_total == with_one.params_total
    layer = with_one.layers[-1].params_total(256)
    assert with_one.params_other == layer + 2 * 256**2 + 3 * 256


def test_state_dtype_is_the_files_or_named():
    mamba = {
        "model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 32, "n_groups": 1, "state_size": 16, "conv_kernel": 4, "vocab_size": 100,
    }  # fmt: skip
    conv, matrix = (128 + 2 * 16) * 3, 4 * 32 * 16
    spec = ModelSpec.from_config(mamba)
    assert spec.state_bytes_per_sequence == 2 * 2 * (conv + matrix)
    assert "vLLM" in spec.provenance["state_dtype"]
    spec = ModelSpec.from_config({**mamba, "mamba_ssm_cache_dtype": "float32"})
    assert spec.state_bytes_per_sequence == 2 * (2 * conv + 4 * matrix)
    assert spec.provenance["state_dtype"] == "mamba_ssm_cache_dtype = float32"
    assert spec.kv_bytes_per_token() == 0
    assert spec.sequence_bytes(10**6) == spec.state_bytes_per_sequence
    nemotron = {
        "model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": "M*",
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4,
        "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16, "conv_kernel": 4,
        "vocab_size": 100,
    }  # fmt: skip
    spec = ModelSpec.from_config(nemotron)
    assert spec.state_bytes_per_sequence == 2 * conv + 4 * matrix
    assert spec.provenance["state_dtype"] == "no key: fp32 (vLLM's default)"


def test_sizes_that_a_part_refuses_are_refused():
    gemma4 = {
        "model_type": "gemma4", "sliding_window": 64, "head_dim": 32, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 32,
        "global_head_dim": 64, "layer_types": ["full_attention"] * 6,
    }  # fmt: skip
    assert "experts_per_token" in refusal(gemma4).why
    gemma4["top_k_experts"] = 4
    spec = read(gemma4)
    assert spec.params_active == spec.params_total
    assert refusal({**gemma4, "layer_types": DROP}).key == "sliding_window"
    assert refusal({**gemma4, "global_head_dim": DROP}).key == "global_head_dim"


def test_blocks_removed_by_search_store_nothing():
    block = {"attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False},
             "ffn": {"ffn_mult": 3.0, "no_op": False, "replace_with_linear": False}}  # fmt: skip
    no_heads = {**block, "attention": {"no_op": True, "n_heads_in_group": None}}
    linear = {**block, "attention": {"replace_with_linear": True}}
    spec = read({"model_type": "nemotron-nas", "num_key_value_heads": None,
                 "block_configs": [block, no_heads, linear] * 2})  # fmt: skip
    assert spec.kv_bytes_per_token() == 2 * 2 * PER_HEAD
    assert spec.layers[1].attention is None
    assert spec.layers[2].extra[0].params == 256 * 256


# --- nested sections, wrong files, bad files ------------------------------------------------------


def test_text_section_is_read_and_the_outer_tie_counts():
    text = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"}
    outer = {"model_type": "llava", "text_config": text, "vision_config": {"patch_size": 14}}
    untied, tied = (
        ModelSpec.from_config({**outer, "tie_word_embeddings": tie}) for tie in (False, True)
    )
    assert untied.params_total - tied.params_total == 1000 * 256
    assert "vision_config" in tied.provenance["params_other"]
    omni = {"model_type": "omni", "thinker_config": {**outer, "tie_word_embeddings": False}}
    assert ModelSpec.from_config(omni) == untied
    with pytest.raises(UnsupportedConfig, match="tie_word_embeddings"):
        ModelSpec.from_config({**outer, "text_config": LLAMA, "tie_word_embeddings": True})
    with pytest.raises(UnsupportedConfig, match=r"text_config\.kv_squeeze"):
        ModelSpec.from_config({**outer, "text_config": {**LLAMA, "kv_squeeze": 2}})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"peft_type": "LORA", "r": 16, "base_model_name_or_path": "x"}, "adapter_config.json"),
        ({"tokenizer_class": "LlamaTokenizer", "chat_template": "..."}, "tokenizer_config.json"),
        ({"tokenizer_class": "QWenTokenizer", "model_max_length": 8192}, "tokenizer_config.json"),
        ({"do_sample": True, "temperature": 0.6, "eos_token_id": 2}, "generation_config.json"),
        ({"weight_map": {"a": "b"}}, "safetensors index"),
        ({"dim": 4096, "n_layers": 32, "n_kv_heads": 8}, "params.json"),
        ({"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 384,
          "hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16}, "vision model"),
        ({}, "missing"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named(config, name):
    with pytest.raises(UnsupportedConfig, match=name):
        ModelSpec.from_config(config)


def test_files_and_folders(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    by_file, by_folder = ModelSpec.from_config(file), ModelSpec.from_config(str(tmp_path))
    assert by_file == by_folder == ModelSpec.from_config(LLAMA)
    with pytest.raises(FileNotFoundError):
        ModelSpec.from_config(tmp_path / "none.json")
    beside = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    assert ModelSpec.from_config(file).weight_bytes() == 6 * LAYER + 6 * 4 * 4 + REST


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\xfe\x00",
        b'{"model_type": "llama"',
        b"[" * 10**6,
        b'{"model_type":' * 10**5,
        b'{"hidden_size": ' + b"1" * 10**5 + b"}",
        json.dumps(LLAMA).replace('"vocab', '"hidden_size": 256, "vocab').encode(),
        b'{"model_type": "llama", "hidden_size": NaN}',
        json.dumps(LLAMA).encode() + b" " * 50_000_000,
    ],
    ids=["empty", "list", "bytes", "cut", "deep", "nested", "digits", "twice", "nan", "50MB"],
)
def test_bad_files_are_refused_promptly(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    start = time.process_time()
    with pytest.raises(UnsupportedConfig, match=r"JSON|twice|larger|nested|hidden_size") as caught:
        ModelSpec.from_config(file)
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 1000


# --- provenance, weight bytes -------------------------------------------------------------------


def test_provenance_names_keys_and_rules():
    spec = read({"head_dim": DROP})
    assert spec.provenance["num_key_value_heads"] == "num_key_value_heads = 2"
    assert spec.provenance["head_dim"].startswith("absent or null: hidden_size")
    assert "modeling_llama" in spec.provenance["attention_bias"]
    gemma = read({}, GEMMA2)
    assert "one layer in 2 is full" in gemma.provenance["layer_types"]
    assert "modeling_gemma2" in gemma.provenance["layer_types"]
    falcon = read({**FALCON, "tie_word_embeddings": DROP})
    assert falcon.provenance["num_key_value_heads"] == "multi_query, old architecture: one"
    assert "ties" in falcon.provenance["tie_word_embeddings"]


LAYER = 256 * (256 + 2 * 64) + 256 * 256 + 3 * 256 * 512  # weights of the matrices of one layer
REST = (2 * 1000 * 256 + 13 * 256) * 2  # embedding, lm_head and norms, bytes in bf16


def groups(rows):
    """Return how many groups of so many rows the matrices of all layers have."""
    columns = 256 + 2 * 64 + 256 + 2 * 512
    return 6 * (columns * 256 // rows + 256 * 512 // rows)


@pytest.mark.parametrize(
    ("config", "matrices"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
         6 * LAYER // 2 + groups(128) * (16 + 4) // 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
         6 * LAYER // 2 + groups(128) * (16 + 4) // 8 + 6 * 4 * (3 * 256 + 512)),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"g": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32,
                                               "strategy": "group", "symmetric": True}}}},
         6 * LAYER // 2 + groups(32) * 2),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]},
         6 * LAYER + 6 * 4 * (2 * 3 + 2 * 2 + 2 * 8 + 4 * 2)),
        ({"quant_method": "fp8"}, 6 * LAYER + 6 * 4 * 4),
        ({"quant_method": "fp8", "modules_to_not_convert": ["mlp"]},
         6 * (LAYER + 3 * 256 * 512) + 6 * 2 * 4),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0"]},
         5 * LAYER + 2 * LAYER + 5 * 4 * 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4",
          "ignore": ["lm_head", "model.layers.*.self_attn*"]},
         6 * 2 * (LAYER - 3 * 256 * 512) + 6 * 3 * 256 * 512 // 2
         + 6 * (1024 * 256 + 256 * 512) // 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
          "exclude_modules": ["lm_head", "model.layers.0*", "model.layers.1.mlp*"]},
         7 * LAYER + 3 * 256 * 512 + (4 * 4 + 2) * 4),
    ],
    ids=["awq", "gptq", "compressed", "fp8-block", "fp8", "fp8-mlp", "fp8-layer", "nvfp4", "glob"],
)  # fmt: skip
def test_weight_bytes_of_quantised_files(config, matrices):
    spec = read({"quantization_config": config})
    assert spec.weight_bytes() == matrices + REST
    assert spec.weight_bytes("bf16") == 2 * spec.params_total
    assert spec.params_total == read({}).params_total


def test_weight_bytes_of_mlx_count_embedding_and_lm_head():
    spec = read({"quantization": {"group_size": 64, "bits": 4}})
    assert spec.weight_bytes() == 6 * LAYER // 2 + groups(64) * 4 + 2 * 13 * 256 + 2 * (
        1000 * 256 // 2 + 1000 * 4 * 4
    )


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "magic"},
        {"bits": 4},
        {"quant_method": "awq", "group_size": 128},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "modelopt", "quant_algo": "FP3"},
        {"group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": {"bits": 8}},
        {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["re:("]},
    ],
)
def test_a_quantisation_that_is_not_understood_is_refused(config):
    with pytest.raises(UnsupportedConfig):
        read({"quantization_config": config})
