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
