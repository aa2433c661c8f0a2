"""Start-up logs of engines: read whatever stands around the numbers, and recomputed."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from servelab.logs import LogCheck, explain_log
from servelab.models import Attention, Indexer, LatentAttention, LayerSpec, ModelSpec

Case = dict[str, Any]
_TEXT = (resources.files("servelab") / "data/cases/kv_log_cases.json").read_text(encoding="utf-8")
CASES: dict[str, Case] = {case["id"]: case for case in json.loads(_TEXT)}
LOGS = Path(__file__).parent / "data" / "logs"

#: Records of the engines whose logs are read, and of their forks.
FAMILY = {
    "vllm": "vllm",
    "aphrodite": "vllm",
    "vllm fork (Lvllm)": "vllm",
    "vllm fork (SM70)": "vllm",
    "vllm-ascend": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt-llm",
    "llama.cpp": "llama.cpp",
    "llama.cpp/koboldcpp": "llama.cpp",
    "llama.cpp (python)": "llama.cpp",
    "ik_llama.cpp": "llama.cpp",
}
KINDS = {
    "capacity_from_available",
    "cpu_blocks_from_swap_space",
    "concurrency_eq_tokens_over_max_len",
    "needed_GiB_for_max_len",
    "tokens_eq_blocks_x_block_size",
    "estimated_max_model_len",
    "budget_identity",
    "budget_identity_with_150MiB_margin",
    "ceil_blocks_from_fraction",
    "exact",
}
CHECKS = [
    (name, i)
    for name, case in CASES.items()
    for i, check in enumerate(case["checks"])
    if case["engine"] in FAMILY and check["kind"] in KINDS
]


def spec_of(case: Case) -> ModelSpec | None:
    """The shape that a record gives, as a model: only what its cache depends on is real."""
    shape = case["shape"] or {}
    attention: Attention | LatentAttention
    if "kv_lora_rank" in shape:
        index = Indexer(64, shape["index_head_dim"], ()) if "index_head_dim" in shape else None
        latent, rope = shape["kv_lora_rank"], shape["qk_rope_head_dim"]
        attention = LatentAttention(128, latent, 128, rope, 128, indexer=index)
    elif "kv_heads" in shape:
        attention = Attention(shape["kv_heads"], shape["kv_heads"], shape["head_dim"])
    else:
        return None
    layers = (LayerSpec(attention, None, 0),) * shape["layers"]
    unknown = {"hidden_size": "is not in the record"}
    return ModelSpec(case["id"], 1, 1, layers, True, 1, unknown=unknown)


# --- logs composed from the facts of a record ---------------------------------------------------


def vllm_log(case: Case) -> str:
    told = case["reported"]
    stated = {
        "tensor_parallel_size": case["tp"],
        "pipeline_parallel_size": case["pp"],
        "kv_cache_dtype": case["kv_cache_dtype"],
        "block_size": case["block_size"],
        "max_seq_len": case["max_model_len"],
    }
    settings_ = ", ".join(f"{name}={value}" for name, value in stated.items() if value)
    lines = [f"Initializing a V1 LLM engine with config: {settings_}, seed=0"]

    def say(key: str, shape: str) -> None:
        if key in told:
            lines.append(shape.format(told[key]))

    say("weights_GiB", "Loading model weights took {:.4f} GB")
    say("model_loading_GiB", "Model loading took {:.4f} GiB and 3.5 seconds")
    say("available_GiB", "Available KV cache memory: {:.2f} GiB")
    say("reserved_for_kv_GiB_one_rank", "the rest of the memory reserved for KV Cache is {}GiB.")
    if "kv_cache_size_GiB" in told:
        lines.append(
            f"Memory profiling results: total_gpu_memory={told['total_gpu_memory_GiB']}GiB "
            f"peak_torch_memory={told['peak_torch_memory_GiB']}GiB "
            f"non_torch_memory={told['non_torch_GiB']}GiB "
            f"kv_cache_size={told['kv_cache_size_GiB']}GiB gpu_memory_utilization=0.90"
        )
    if "cpu_blocks" in told:
        lines.append(f"# GPU blocks: {told['gpu_blocks']}, # CPU blocks: {told['cpu_blocks']}")
    else:
        say("gpu_blocks", "# GPU blocks: {}")
    say("kv_tokens", "GPU KV cache size: {:,} tokens")
    if "max_concurrency" in told:
        lines.append(
            f"Maximum concurrency for {case['max_model_len']:,} tokens per request: "
            f"{told['max_concurrency']}x"
        )
    if "max_tokens_in_kv_cache" in told:
        lines.append(
            f"ValueError: The model's max seq len ({case['max_model_len']}) is larger than the "
            f"maximum number of tokens that can be stored in KV cache "
            f"({told['max_tokens_in_kv_cache']}). Try increasing `gpu_memory_utilization`"
        )
    if "needed_GiB" in told:
        lines.append(
            "ValueError: To serve at least one request with the models's max seq len "
            f"({case['max_model_len']}), ({told['needed_GiB']:.2f} GiB KV cache is needed, which is "
            f"larger than the available KV cache memory ({told['available_GiB']} GiB)."
        )
    say("estimated_max_model_len", "Based on it, the estimated maximum model length is {}. Try")
    return "\n".join(lines)


def two_runs_log(case: Case) -> str:
    told = case["reported"]
    pairs = (
        (told["kv_tokens"], told["max_concurrency"]),
        (told["kv_tokens_with_graph_estimate"], told["max_concurrency_with"]),
    )
    return "\n".join(
        f"GPU KV cache size: {tokens:,} tokens\n"
        f"Maximum concurrency for {case['max_model_len']:,} tokens per request: {users}x"
        for tokens, users in pairs
    )


def aphrodite_log(case: Case) -> str:
    told = case["reported"]
    if "total_GiB" not in told:
        return f"INFO:     # GPU blocks: {told['gpu_blocks']}, # CPU blocks: {told['cpu_blocks']}"
    column = (
        ("Total GPU memory", told["total_GiB"], "GiB"),
        ("Memory utilization", 90, "%"),
        ("Available for Aphrodite", told["available_GiB"], "GiB"),
        ("Model weights", told["weights_GiB"], "GiB"),
        ("Reserved for KV cache", told["reserved_for_kv_GiB"], "GiB"),
        ("KV cache for 8192 tokens", told["kv_for_8192_tokens_GiB"], "GiB"),
        ("Wasted memory", told["wasted_GiB"], "GiB"),
        ("Peak activations memory", told["activation_peak_GiB"], "GiB"),
        ("# GPU blocks", f"{told['gpu_blocks']}, # CPU blocks: {told['cpu_blocks']}", ""),
        ("Minimum concurrency", f"{told['min_concurrency']}x", ""),
        ("Maximum sequence length allowed in the cache", told["max_sequence_tokens"], ""),
    )
    return "\n".join(f"INFO:       {name}: {value} {unit}" for name, value, unit in column)


def ascend_log(case: Case) -> str:
    told = case["reported"]
    return (
        f"Free memory on device ({told['free_at_start_GiB']}/{told['total_GiB']} GiB) on startup. "
        f"Desired GPU memory utilization is (0.9, {told['requested_GiB']} GiB). Actual usage is "
        f"{told['weights_GiB']} GiB for weight, {told['activation_peak_GiB']} GiB for peak "
        f"activation, {told['non_torch_GiB']} GiB for non-torch memory, and {told['graph_GiB']} GiB "
        "for CUDAGraph memory. Replace gpu_memory_utilization config with "
        f"`--kv-cache-memory={told['suggested_kv_cache_memory_bytes']}` (53.46 GiB) to fit into "
        "requested memory"
    )


def sglang_log(case: Case) -> str:
    told = case["reported"]
    size = told.get("kv_size_GB_label")
    lines = [f"[2026-01-01 10:00:00] server_args=ServerArgs(tp_size={case['tp']}, seed=1)"]
    sizes = [size, told["true_total_GB_label"]] if "true_total_GB_label" in told else [size]
    lines += [
        f"[2026-01-01 10:00:0{i} TP0] KV Cache is allocated. dtype: torch.bfloat16, "
        f"#tokens: {told['kv_tokens']}, KV size: {printed} GB"
        for i, printed in enumerate(sizes)
    ]
    cache = case["kv_cache_dtype"]
    return "\n".join([f"kv_cache_dtype='{cache}', page_size={case['block_size'] or 1},", *lines])


def tensorrt_log(case: Case) -> str:
    told = case["reported"]
    if "kv_tokens" in told:
        return (
            f"[TensorRT-LLM][INFO] Allocate {told['kv_allocated_bytes']} bytes for k/v cache. \n"
            f"[TensorRT-LLM][INFO] Using {told['kv_tokens']} tokens in paged KV cache."
        )
    return (
        "[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: "
        f"total: 39.39 GiB, available: {told['available_GiB']} GiB\n"
        f"[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: "
        f"{told['primary_pool_blocks']}\n"
        f"[TensorRT-LLM][INFO] Number of tokens per block: {case['block_size']}.\n"
    )


def llama_log(case: Case) -> str:
    told, cache = case["reported"], case["kv_cache_dtype"]
    # where the record leaves the context open, its note says how many cells the size implies
    cells = told.get("n_ctx") or 32848
    if "kv_self_size_MB" in told:
        return (
            f"llama_model_load_internal: n_ctx      = {cells}\n"
            f"llama_model_load_internal: n_embd     = {told['n_embd']}\n"
            f"llama_model_load_internal: n_layer    = {told['n_layer']}\n"
            f"llama_init_from_file: kv self size  = {told['kv_self_size_MB']:.2f} MB"
        )
    parts = f"c^KV ({cache}): {told['kv_self_size_MiB']:.2f} MiB, kv^T: not used"
    if "k_MiB" in told:
        parts = f"K ({cache}): {told['k_MiB']:.2f} MiB, V ({cache}): {told['v_MiB']:.2f} MiB"
    return (
        f"llama_new_context_with_model: n_ctx      = {cells}\n"
        f"llama_new_context_with_model: KV self size  = {told['kv_self_size_MiB']:.2f} MiB, {parts}"
    )


def log_of(name: str) -> str:
    case = CASES[name]
    if name == "vllm-45178-minimax-cudagraph-off":
        return two_runs_log(case)
    if case["engine"] == "aphrodite":
        return aphrodite_log(case)
    if case["engine"] == "vllm-ascend":
        return ascend_log(case)
    family = FAMILY[case["engine"]]
    writers = {"vllm": vllm_log, "sglang": sglang_log, "tensorrt-llm": tensorrt_log}
    return writers.get(family, llama_log)(case)


# --- the records --------------------------------------------------------------------------------


def rounds_to(value: float | None, printed: float) -> bool:
    digits = len(str(printed).partition(".")[2])
    return value is not None and abs(value - printed) <= 0.51 * 10**-digits


def is_meant(found: LogCheck, case: Case, check: Case) -> bool:
    """Whether a check of the log recomputes what a check of the record does, to its value."""
    kind, interval = check["kind"], check.get("interval")
    if kind == "capacity_from_available":
        size = case["block_size"] or 16
        tokens = size if found.quantity == "gpu_blocks" else 1
        return (
            found.quantity in ("tokens", "gpu_blocks")
            and found.interval is not None
            and [end * tokens for end in found.interval] == interval
            and found.recomputed is not None
            and found.recomputed * tokens == check["predicted_tokens"]
        )
    if kind == "estimated_max_model_len":
        return found.quantity == kind and list(found.interval or ()) == interval
    quantity = {
        "cpu_blocks_from_swap_space": "cpu_blocks",
        "concurrency_eq_tokens_over_max_len": "max_concurrency",
        "needed_GiB_for_max_len": "needed",
        "tokens_eq_blocks_x_block_size": "tokens",
        "budget_identity": "available",
        "budget_identity_with_150MiB_margin": "suggested",
        "ceil_blocks_from_fraction": "gpu_blocks",
        "exact": "kv_size",
    }[kind]
    if kind == "exact" and case["engine"] == "sglang":
        # the records leave out the page that SGLang keeps for padded tokens: a digit more
        return found.quantity == quantity and rounds_to(found.recomputed, check["reported"])
    return (
        found.quantity == quantity
        and rounds_to(found.reported, check["reported"])
        and rounds_to(found.recomputed, check["predicted"])
    )


@pytest.mark.parametrize(("name", "number"), CHECKS, ids=[f"{n}-{i}" for n, i in CHECKS])
def test_record(name: str, number: int) -> None:
    case, log = CASES[name], log_of(name)
    check = case["checks"][number]
    found = [c for c in explain_log(log, spec_of(case)) if is_meant(c, case, check)]
    assert found, f"no check recomputes {check}:\n{log}\n{explain_log(log, spec_of(case))}"
    assert {c.agrees for c in found} == {check["ok"]}, found
