"""What start-up lines say: the quantities, and the shapes of the lines that name them.

Models: lines of vLLM (the two layouts of V0, V1, a fork that prints a column), SGLang, TensorRT-LLM
and llama.cpp (older and newer), told apart by the words around a number and its unit.

Assumes: "GB" and "MB" in these logs are GiB and MiB: all four engines divide by powers of two.

Ignores: every line that names none of the quantities; what happens after the start.
"""

import re
from functools import cache

from servelab.units import GiB, KiB, MiB

#: Units as printed: what they mean, and their bytes.
UNITS = {
    "GiB": ("GiB", GiB),
    "GB": ("GiB", GiB),
    "MiB": ("MiB", MiB),
    "MB": ("MiB", MiB),
    "KiB": ("KiB", KiB),
    "bytes": ("bytes", 1),
}
_DECIMAL = r"[0-9]{1,12}(?:\.[0-9]{1,8})?"
_PATTERNS = {
    # the look-ahead keeps a count from ending inside a longer one; a command line may say 32K
    "count": r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,15})(?!\d|[.,]\d)(?:[kKmM](?![A-Za-z]))?",
    "size": rf"-?{_DECIMAL}\s*(?:GiB|GB|MiB|MB|KiB|bytes)(?![A-Za-z])",
    "ratio": rf"{_DECIMAL}(?!\d|\.\d)",
    "word": r"[A-Za-z][\w.]{0,30}(?!\w)",
}
#: Every quantity: how it is written, its unit (None: as printed), and whether it is an answer
#: (a number that engines print for people to rely on) rather than a setting that explains others.
QUANTITIES: dict[str, tuple[str, str | None, bool]] = {
    "total": ("size", None, True),
    "usable": ("size", None, True),
    "weights": ("size", None, True),
    "consumed": ("size", None, True),
    "peak_torch": ("size", None, True),
    "activation": ("size", None, True),
    "non_torch": ("size", None, True),
    "graphs": ("size", None, True),
    "estimated_graphs": ("size", None, True),
    "available": ("size", None, True),
    "free": ("size", None, True),
    "suggested": ("size", None, True),
    "suggested_bytes": ("size", None, True),
    "needed": ("size", None, True),
    "kv_size": ("size", None, True),
    "k_size": ("size", None, True),
    "v_size": ("size", None, True),
    "state_size": ("size", None, True),
    "gpu_blocks": ("count", "blocks", True),
    "cpu_blocks": ("count", "blocks", True),
    "tokens": ("count", "tokens", True),
    "cells": ("count", "cells", True),
    "max_model_len": ("count", "tokens", True),
    "estimated_max_model_len": ("count", "tokens", True),
    "max_concurrency": ("ratio", "x", True),
    "context": ("count", "tokens", False),
    "utilization": ("ratio", "", False),
    "percent": ("ratio", "%", False),
    "swap_space": ("ratio", "GiB", False),
    "block_size": ("count", "tokens", False),
    "batched_tokens": ("count", "tokens", False),
    "layers": ("count", "layers", False),
    "k_width": ("count", "elements", False),
    "v_width": ("count", "elements", False),
    "width": ("count", "elements", False),
    "tp": ("count", "ranks", False),
    "pp": ("count", "stages", False),
    "dcp": ("count", "ranks", False),
    "kv_dtype": ("word", "", False),
    "k_dtype": ("word", "", False),
    "v_dtype": ("word", "", False),
    "dtype": ("word", "", False),
    "quantization": ("word", "", False),
    "draft": ("word", "", False),
}

# A space stands for any white space, a tilde for white space or none. Each begins with letters that
# are rare in logs: that is what makes the search fast.
_SETTING = r"['\"]?[=:\s]\s{0,12}['\"]?"
SHAPES: tuple[tuple[str, str], ...] = (
    # vLLM
    ("vllm", r"model weights took~{weights}"),
    ("vllm", r"Model loading took~{weights}"),
    ("vllm", r"model weights take~{weights}"),
    ("vllm", r"total_gpu_memory(?:=| ){total}"),
    ("vllm", r"peak_torch_memory={peak_torch}"),
    ("vllm", r"non_torch_memory(?:=| ){non_torch}"),
    ("vllm", r"kv_cache_size={available}"),
    (
        "vllm",
        r"total_gpu_memory \({total}\) x gpu_memory_utilization \({utilization}\) =~{usable}",
    ),
    ("vllm", r"current vLLM instance can use {usable}"),
    ("vllm", r"non_torch_memory takes~{non_torch}"),
    ("vllm", r"activation peak memory (?:takes)?~{activation}"),
    ("vllm", r"available_kv_cache_memory {available}"),
    ("vllm", r"reserved for KV Cache is~{available}"),
    ("vllm", r"Available KV cache memory:~{available}"),
    ("vllm", r"blocks:~{gpu_blocks},~(?:#~)?CPU blocks:~{cpu_blocks}"),
    ("vllm", r"GPU blocks:~{gpu_blocks}(?!,~(?:#~)?CPU)"),
    ("vllm", r"KV cache size:~{tokens} tokens"),
    ("vllm", r"Maximum concurrency for {max_model_len} tokens per request:~{max_concurrency}x"),
    ("vllm", r"max seq len \({max_model_len}\)(?:,~\(?{needed} KV cache is needed)?"),
    ("vllm", r"available KV cache memory \({available}\)"),
    ("vllm", r"stored in KV cache \({tokens}\)"),
    ("vllm", r"estimated maximum model length is {estimated_max_model_len}"),
    # vLLM on Ascend: bytes
    (
        "vllm",
        r"Available memory:~(?P<available>[0-9]{6,15}),~total memory:~(?P<total>[0-9]{6,15})(?!\d)",
    ),
    # vLLM on a CPU: two sizes before their unit, the second the node's
    (
        "vllm",
        rf"(?:Explicitly|Auto) set \((?=(?P<available>{_DECIMAL}/{_DECIMAL}\) GiB)){_DECIMAL}"
        rf"/(?P<total>{_DECIMAL}\) GiB) for KV cache",
    ),
    ("vllm", rf"Free memory on device (?:\w{{2,5}}:\d{{1,2}} )?\({_DECIMAL}/{{total}}\)"),
    ("vllm", r"esired GPU memory utilization (?:is )?\({utilization}, {usable}\)"),
    (
        "vllm",
        r"Actual usage is {consumed} for consumed memory \(weights \+ non-torch\), {activation}"
        r" for peak activation(?:,~(?:and )?{graphs} for CUDAGraph memory)?",
    ),
    (
        "vllm",
        r"Actual usage(?: is|:) {weights} for weights?, {activation} for peak activation"
        r"(?:, {non_torch} for non-torch memory"
        r"(?:,~(?:and )?{graphs} for (?:CUDAG|NPU g)raph memory)?)?",
    ),
    (
        "vllm",
        r"kv-cache-memory=(?P<suggested_bytes>[0-9]{4,15})[`']?(?: \({suggested}\))? to fit into",
    ),
    ("vllm", r"kv cache memory in use is {available}"),
    ("vllm", r"Estimated CUDA graph memory:~{estimated_graphs}"),
    ("vllm", r"Graph capturing finished in \d{1,6} secs?, took {graphs}"),
    # Aphrodite, a fork of vLLM: a column
    ("vllm", r"Total GPU memory:~{total}"),
    ("vllm", r"Memory utilization:~{percent}%"),
    ("vllm", r"Available for Aphrodite:~{usable}"),
    ("vllm", r"Model weights:~{weights}"),
    ("vllm", r"Reserved for KV cache:~{available}"),
    ("vllm", r"KV cache for {max_model_len} tokens:~{needed}"),
    ("vllm", r"Wasted memory:~{non_torch}"),
    ("vllm", r"Peak activations memory:~{activation}"),
    ("vllm", r"Minimum concurrency:~{max_concurrency}x"),
    ("vllm", r"Maximum sequence length allowed in the cache:~{tokens}"),
    # SGLang
    ("sglang", r"tokens:~{tokens},~K size:~{k_size},~V size:~{v_size}"),
    ("sglang", r"tokens:~{tokens},~KV size:~{kv_size}"),
    ("sglang", r"KV Cache is allocated\. K size:~{k_size},~V size:~{v_size}"),
    ("sglang", r"max_total_num_tokens={tokens}"),
    (
        "sglang",
        r"Load weight end\.(?: [A-Za-z_]{1,20}(?: mem)?=[\w.-]{1,80}(?: GB| s)?,){0,8}"
        r" mem usage={weights}",
    ),
    ("sglang", r"KV cache dtype:~(?:torch\.)?{kv_dtype}"),
    ("sglang", r"context_len={max_model_len}"),
    # TensorRT-LLM
    ("tensorrt-llm", r"KV cache primary pool:~{gpu_blocks}"),
    ("tensorrt-llm", r"tokens per block={block_size},~primary blocks={gpu_blocks}"),
    ("tensorrt-llm", r"Number of tokens per block:~{block_size}"),
    ("tensorrt-llm", r"Allocate {kv_size} for k/v cache"),
    ("tensorrt-llm", r"Using {tokens}(?: total)? tokens in paged KV cache"),
    ("tensorrt-llm", r"Allocated {kv_size} for max tokens in paged KV cache \({tokens}\)"),
    ("tensorrt-llm", r"paged kv cache: total:~{total},~available:~{free}"),
    # llama.cpp
    ("llama.cpp", r"kv self size~=~{kv_size}"),
    (
        "llama.cpp",
        r"KV self size~=~{kv_size},~K \({k_dtype}\):~{k_size},~V \({v_dtype}\):~{v_size}",
    ),
    ("llama.cpp", r"KV self size~=~{kv_size},~c\^KV \({k_dtype}\):~{k_size}"),
    (
        "llama.cpp",
        r"(?<!recurrent:[ ])size~=~{kv_size} \(~{cells} cells,~{layers} layers"
        r"(?:,~[\d/\s]{1,20} seqs)?\)(?:,~K \({k_dtype}~\):~{k_size},~V \({v_dtype}~\):~{v_size})?",
    ),
    ("llama.cpp", r"llama_memory_recurrent: size~=~{state_size}"),
    ("llama.cpp", r"llama_context: n_ctx~=~{context}"),
    ("llama.cpp", r"llama_(?:new_context_with|init_from)_model: n_ctx~=~{context}"),
    ("llama.cpp", r"llama_model_load_internal: n_ctx~=~{context}"),
    ("llama.cpp", r"kv_size~=~{context}, offload"),
    ("llama.cpp", r"n_layer~=~{layers}"),
    ("llama.cpp", r"n_embd~=~{width}"),
    ("llama.cpp", r"n_embd_k_gqa~=~{k_width}"),
    ("llama.cpp", r"n_embd_v_gqa~=~{v_width}"),
    # settings, as vLLM's and SGLang's command lines and configurations spell them
    ("", rf"tensor[-_]parallel[-_]size{_SETTING}{{tp}}"),
    ("", rf"pipeline[-_]parallel[-_]size{_SETTING}{{pp}}"),
    ("", rf"decode[-_]context[-_]parallel[-_]size{_SETTING}{{dcp}}"),
    ("", r"tp_size={tp}"),
    ("", r"-tp(?:-size)?[= ]{tp}"),
    ("", r"pp_size={pp}"),
    ("", rf"kv[-_]cache[-_]dtype{_SETTING}(?:torch\.)?{{kv_dtype}}"),
    ("", rf"block[-_]size{_SETTING}{{block_size}}"),
    ("", r"page_size={block_size}"),
    ("", rf"swap[-_]space{_SETTING}{{swap_space}}"),
    ("", rf"gpu[-_]memory[-_]utilization{_SETTING}{{utilization}}"),
    ("", rf"max[-_]model[-_]len{_SETTING}{{max_model_len}}"),
    ("", r"max_seq_len={max_model_len}"),
    ("", rf"max[-_]num[-_]batched[-_]tokens{_SETTING}{{batched_tokens}}"),
    ("", r"dtype=torch\.{dtype}"),
    ("", rf"quantization{_SETTING}{{quantization}}"),
    ("", rf"speculative[-_](?:config|model){_SETTING}[{{'\"]{{0,2}}{{draft}}"),
    ("", r"speculative_(?:algorithm|draft_model_path)='{draft}"),
    ("", r"loading (?P<draft>draft) model"),
)


def _compile(shape: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[a-z_]+\})", shape)
    for i, part in enumerate(parts):
        if i % 2:
            name = part[1:-1]
            parts[i] = f"(?P<{name}>{_PATTERNS[QUANTITIES[name][0]]})"
        else:
            parts[i] = re.sub(
                r"\[[^]]*\]| |~",
                lambda m: {" ": r"\s{1,40}", "~": r"\s{0,40}"}.get(m[0], m[0]),
                part,
            )
    return re.compile("".join(parts))


@cache
def patterns() -> tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...]:
    """Return every shape: the engine that prints it, its quantities, and a pattern, one group each.

    >>> [quantities for engine, quantities, _ in patterns() if engine == "sglang"][1]
    ('tokens', 'kv_size')
    """
    compiled = [(engine, _compile(shape)) for engine, shape in SHAPES]
    return tuple((engine, tuple(p.groupindex), p) for engine, p in compiled)
