"""Capacity against what real engines printed when they started.

Each check of a record is one test, with the verdict that the record gives: a mismatch that is
expected must be one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest

from servelab import memory
from servelab.memory.formats import keys_bytes, served_bytes
from servelab.models import Attention, Indexer, LatentAttention, LayerSpec, ModelSpec
from servelab.units import GiB, KiB, MiB

Case = dict[str, Any]
_TEXT = (resources.files("servelab") / "data/cases/kv_log_cases.json").read_text(encoding="utf-8")
CASES: dict[str, Case] = {case["id"]: case for case in json.loads(_TEXT)}

ENGINES = {"aphrodite": "vllm", "vllm fork (Lvllm)": "vllm", "vllm fork (SM70)": "vllm"}
FORMATS = {"f16": "fp16", "f32": "fp32", "fp16": "fp16", "bf16": "bf16"} | {
    name: name for name in ("fp8", "q8_0", "fp8_ds_mla")
}
# What a record leaves to the model's name: published shapes.
SHAPES: dict[str, Case] = {
    "unsloth-4757-dsv31": {"layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "unsloth-4757-qwen3-0.6b": {"layers": 28, "kv_heads": 8, "head_dim": 128},
    # the ratio of tokens to concurrency needs no shape: any will do
    "prodstack-granite-33660": {"layers": 1, "kv_heads": 1, "head_dim": 1},
}
UNIT = {"MiB": MiB, "GiB": GiB, "KiB": KiB, "bytes": 1}
# Said in the records to be illustrations: no value of ours to compare.
ILLUSTRATIONS = {"linear_in_1/max_len", "ratio", "plausibility", "tokens_not_multiple_of_16"}
CHECKS = [
    (name, i)
    for name, case in CASES.items()
    for i, check in enumerate(case["checks"])
    if check["kind"] not in ILLUSTRATIONS
]


def spec_of(name: str, **changes: int) -> ModelSpec:
    shape = SHAPES.get(name) or CASES[name]["shape"]
    shape = shape | changes
    attention: Attention | LatentAttention
    if "kv_lora_rank" in shape:
        index = Indexer(64, shape["index_head_dim"], ()) if "index_head_dim" in shape else None
        attention = LatentAttention(
            128, shape["kv_lora_rank"], 128, shape["qk_rope_head_dim"], 128, indexer=index
        )
    else:
        attention = Attention(shape["kv_heads"], shape["kv_heads"], shape["head_dim"])
    layers = (LayerSpec(attention, None, 0),) * shape["layers"]
    return ModelSpec(name, 1, 1, layers, True, 1)


def settings_of(case: Case) -> dict[str, Any]:
    kv_dtype = case["kv_cache_dtype"]
    return {
        "engine": ENGINES.get(case["engine"], case["engine"]),
        "tp": case["tp"] or 1,
        "kv_dtype": FORMATS.get(kv_dtype, "bf16"),  # auto: the model's, two bytes in all of these
        "block_size": case["block_size"] or 16,
    }


def count(name: str, available_bytes: int, max_model_len: int = 1) -> memory.Capacity:
    settings = settings_of(CASES[name])
    return memory.capacity(spec_of(name), available_bytes, max_model_len, **settings)


def of_blocks(name: str, blocks: int, max_model_len: int = 1) -> memory.Capacity:
    """The pool of so many blocks."""
    return count(name, blocks * count(name, 0).bytes_per_block, max_model_len)


def printed(value: float, as_reported: float) -> bool:
    """Whether a value, printed with the digits of the reported one, or one digit off, is it."""
    digits = len(str(as_reported).partition(".")[2])
    return abs(value - as_reported) <= 0.51 * 10**-digits


def tokens_of(case: Case) -> int:
    reported = case["reported"]
    found = (
        reported.get("kv_tokens")
        or reported.get("max_sequence_tokens")
        or reported.get("max_tokens_in_kv_cache")
        or reported.get("gpu_blocks", 0) * case["block_size"]
    )
    assert found
    return int(found)


@pytest.mark.parametrize(("name", "number"), CHECKS, ids=[f"{n}-{i}" for n, i in CHECKS])
def test_engine_log(name: str, number: int) -> None:
    check = CASES[name]["checks"][number]
    test = CHECKERS[check["kind"]]
    assert test(name, number, check) == check["ok"]


def test_only_illustrations_are_left_out() -> None:
    left_out = [c for case in CASES.values() for c in case["checks"] if c["kind"] in ILLUSTRATIONS]
    assert len(left_out) == 4
    assert all(check["illustration"] for check in left_out)
    assert (len(CASES), len(CHECKS)) == (40, 57)


def capacity_from_available(name: str, number: int, check: Case) -> bool:
    # sizes are printed with two decimals: the engine's own value lies within half of one
    ends = [int((check["input_GiB"] + half) * GiB) for half in (-0.005, 0.005)]
    fewest, most = (count(name, end).tokens for end in ends)
    assert [fewest, most] == check["interval"]
    assert count(name, int(check["input_GiB"] * GiB)).tokens == check["predicted_tokens"]
    return bool(fewest <= check["reported_tokens"] <= most)


def cpu_blocks_from_swap_space(name: str, number: int, check: Case) -> bool:
    blocks = count(name, check["swap_space_GiB"] * GiB).blocks
    assert blocks == check["predicted"]
    return bool(blocks == check["reported"])


def concurrency_eq_tokens_over_max_len(name: str, number: int, check: Case) -> bool:
    case = CASES[name]
    length, reported = case["max_model_len"], case["reported"]
    if name == "1cat-237-v100-hybrid":  # this version prints concurrency times length as tokens
        fewest, most = (int((reported["max_concurrency"] + e) * length) for e in (-0.005, 0.005))
        return bool(fewest <= reported["kv_tokens"] <= most)
    tokens = tokens_of(case)
    if name == "vllm-45178-minimax-cudagraph-off":  # two pools in one record
        tokens = [reported["kv_tokens"], reported["kv_tokens_with_graph_estimate"]][number]
    blocks = tokens // (case["block_size"] or 16)
    concurrency = of_blocks(name, blocks, length).max_concurrency
    assert concurrency == pytest.approx(check["predicted"], abs=6e-5)
    return printed(concurrency, check["reported"])


def needed_GiB_for_max_len(name: str, number: int, check: Case) -> bool:
    needed = count(name, 0, CASES[name]["max_model_len"]).needed_bytes / GiB
    assert printed(needed, check["predicted"])
    return printed(needed, check["reported"])


def estimated_max_model_len(name: str, number: int, check: Case) -> bool:
    case = CASES[name]
    told = settings_of(case)
    del told["engine"]
    room, limit = case["reported"]["available_GiB"], case["max_model_len"]
    shortest, longest = (
        memory.suggested_context(spec_of(name), int((room + half) * GiB), limit, **told)
        for half in (-0.005, 0.005)
    )
    assert check["interval"][0] <= shortest <= longest <= check["interval"][1]
    return bool(shortest <= check["reported"] <= longest)


def tokens_eq_blocks_x_block_size(name: str, number: int, check: Case) -> bool:
    return bool(of_blocks(name, CASES[name]["reported"]["gpu_blocks"]).tokens == check["reported"])


def tokens_multiple_of_block(name: str, number: int, check: Case) -> bool:
    pool = of_blocks(name, check["reported"] // check["block_size"])
    return bool(pool.tokens == check["reported"])


def ceil_blocks_from_fraction(name: str, number: int, check: Case) -> bool:
    case = CASES[name]
    share = case["gpu_memory_utilization"] * case["reported"]["available_GiB"]
    blocks = count(name, int(share * GiB)).blocks
    assert blocks == check["predicted"]
    return bool(blocks == check["reported"])


def budget_identity(name: str, number: int, check: Case) -> bool:
    terms = {k: int(v * GiB) for k, v in CASES[name]["reported"].items() if k.endswith("_GiB")}
    budget = memory.Budget(
        terms["total_GiB"],
        terms["available_GiB"],
        terms["weights_GiB"],
        activation_bytes=terms["activation_peak_GiB"],
        margin_bytes=terms["wasted_GiB"],
    )
    return printed(budget.available_bytes / GiB, check["reported"])


def budget_identity_with_150MiB_margin(name: str, number: int, check: Case) -> bool:
    reported = CASES[name]["reported"]
    terms = {k: int(v * GiB) for k, v in reported.items() if k.endswith("_GiB")}
    budget = memory.Budget(
        terms["total_GiB"],
        terms["requested_GiB"],
        terms["weights_GiB"],
        non_torch_bytes=terms["non_torch_GiB"],
        activation_bytes=terms["activation_peak_GiB"],
        graph_bytes=terms["graph_GiB"],
        margin_bytes=memory.VLLM_MARGIN_BYTES,
    )
    # five terms of two decimals each: the sum is known to 0.025 GiB
    off = budget.available_bytes - reported["suggested_kv_cache_memory_bytes"]
    assert abs(off) < 0.025 * GiB
    return printed(budget.available_bytes / GiB, check["reported"])


def exact(name: str, number: int, check: Case) -> bool:
    value = exact_bytes(name, number) / UNIT[check["unit"]]
    assert value == pytest.approx(check["predicted"], abs=0.006)
    return bool(abs(value - check["reported"]) <= 0.011)


def approximate(name: str, number: int, check: Case) -> bool:
    value = exact_bytes(name, number) / UNIT[check["unit"]]
    assert value == pytest.approx(check["predicted"], abs=0.006)
    return printed(value, check["reported"])


CHECKERS: dict[str, Callable[[str, int, Case], bool]] = {
    test.__name__: test
    for test in (
        capacity_from_available,
        cpu_blocks_from_swap_space,
        concurrency_eq_tokens_over_max_len,
        needed_GiB_for_max_len,
        estimated_max_model_len,
        tokens_eq_blocks_x_block_size,
        tokens_multiple_of_block,
        ceil_blocks_from_fraction,
        budget_identity,
        budget_identity_with_150MiB_margin,
        exact,
        approximate,
    )
}


def exact_bytes(name: str, number: int) -> int:
    """The bytes that a record states: its tokens times what its format stores of one."""
    case = CASES[name]
    reported = case["reported"]
    spec, kv_dtype = spec_of(name), settings_of(case)["kv_dtype"]
    if name == "sglang-11309-v32-before":  # the first size printed left the index keys out
        stored = (keys_bytes, served_bytes)[number]
        return int(reported["kv_tokens"]) * sum(stored(layer, kv_dtype) for layer in spec.layers)
    if name == "omlx-2725-qwen38-27b":  # all 64 layers were counted; 16 keep keys and values
        layers = (64, CASES[name]["shape"]["full"])[number]
        return memory.sequence_bytes(spec_of(name, layers=layers), case["block_size"], kv_dtype)
    if name == "koboldcpp-724-qwen15-72b":
        tokens = 32848  # from the note
    elif name == "paper-opt-13b":
        tokens = (1, case["max_model_len"])[number]
    else:
        tokens = reported.get("n_ctx") or reported.get("kv_tokens") or case["max_model_len"]
    if "llama.cpp" in case["engine"] and tokens % 256 == 0:  # older versions padded less
        return memory.capacity(spec, 0, tokens, kv_dtype=kv_dtype, engine="llama.cpp").needed_bytes
    return memory.sequence_bytes(spec, tokens, kv_dtype)


def test_the_smallest_rank_explains_a_pool_that_is_too_small() -> None:
    """vllm#13061: 8.69 GiB were printed for one rank, the pool is that of a smaller one."""
    name = "vllm-13061-r1-distill-qwen14b-tp2"
    told = settings_of(CASES[name])
    printed_rank, reported = int(8.69 * GiB), 81536
    other = reported * CASES[name]["bytes_per_token_per_rank"]
    for ranks in ((printed_rank, other), (other, printed_rank)):
        assert memory.capacity(spec_of(name), ranks, 131072, **told).tokens == reported
    assert other / GiB == pytest.approx(7.46, abs=0.01)


def test_a_pipeline_stage_needs_its_own_layers_only() -> None:
    """vllm#34076: the whole model's 24 GiB were compared with one stage's memory."""
    name = "vllm-34076-qwen3-coder-30b-pp2"
    told = settings_of(CASES[name]) | {"pp": 2}
    split = tuple(CASES[name]["reported"]["pp_layer_partition"])
    for rooms, needed in (((1, 10**12), 8), ((10**12, 1), 16)):
        stage = memory.capacity(spec_of(name), rooms, 262144, **told, layers_per_stage=split)
        assert stage.needed_bytes == needed * GiB
