"""Start-up logs as users paste them: lines of many versions, each with what must be said of it.

The numbers are those of the source named, unless it says otherwise; the lines are composed in the
shape that was pasted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from servelab import models
from servelab.logs import LogCheck, explain_log
from servelab.models import Attention, LatentAttention, LayerSpec, ModelSpec

Numbers = dict[tuple[str, float], bool | None]
LLAMA_8B = models.get("llama-3-8b")
UNKNOWN = {"hidden_size": "only the cache is meant"}


def cache_of(layers: int, attention: Attention | LatentAttention, **fields: Any) -> ModelSpec:
    """A model of which only the cache is known."""
    every = (LayerSpec(attention, None, 0),) * layers
    return ModelSpec("cache", 1, 1, every, True, 1, 131072, unknown=UNKNOWN, **fields)


def heads(layers: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return cache_of(layers, Attention(kv_heads, kv_heads, head_dim))


def windows(sliding: tuple[int, Attention], full: tuple[int, Attention]) -> ModelSpec:
    """A model of which only the cache is known, with layers of two kinds."""
    layers = tuple(LayerSpec(a, None, 0) for n, a in (sliding, full) for _ in range(n))
    return ModelSpec("cache", 1, 1, layers, True, 1, 131072, unknown=UNKNOWN)


GPT_OSS_20B = windows((12, Attention(64, 8, 64, window=128)), (12, Attention(64, 8, 64)))
MIMO_V2_FLASH = windows(
    (39, Attention(64, 8, 192, v_head_dim=128, window=128)),
    (9, Attention(64, 4, 192, v_head_dim=128)),
)
DEEPSEEK_V3 = cache_of(61, LatentAttention(128, 512, 128, 64, 128))


@dataclass(frozen=True)
class Pasted:
    """A log: where its numbers are from, the model if it is known, what must be said of them."""

    source: str
    text: str
    numbers: Numbers
    spec: ModelSpec | None = None


LOGS = {
    "a column of tabs": Pasted(
        "https://github.com/vllm-project/vllm/pull/10511",
        "INFO 12-13 19:54:18 worker.py:243] Memory profiling results:\n"
        "INFO 12-13 19:54:18 worker.py:243] total_gpu_memory     79.22GiB\n"
        "INFO 12-13 19:54:18 worker.py:243] gpu_memory_utilization       0.90\n"
        "INFO 12-13 19:54:18 worker.py:243] the current vLLM instance can use    71.29GiB\n"
        "INFO 12-13 19:54:18 worker.py:243] model weights take   14.96GiB\n"
        "INFO 12-13 19:54:18 worker.py:243] non_torch_memory     1.79GiB\n"
        "INFO 12-13 19:54:18 worker.py:243] PyTorch activation peak memory       1.26GiB\n"
        "INFO 12-13 19:54:18 worker.py:243] available_kv_cache_memory    53.29GiB\n",
        {("usable", 71.29): True, ("available", 53.29): True, ("weights", 14.96): True},
        LLAMA_8B,
    ),
    "a swap space that the log does not state": Pasted(
        "a public notebook that runs Unsloth on a T4; its address was not recorded",
        "vLLM STDOUT: INFO 05-05 [worker.py:267] the current vLLM instance can use "
        "total_gpu_memory (14.74GiB) x gpu_memory_utilization (0.89) = 13.18GiB\n"
        "vLLM STDOUT: INFO 05-05 [worker.py:267] model weights take 6.02GiB; non_torch_memory "
        "takes 0.05GiB; PyTorch activation peak memory takes 0.90GiB; the rest of the memory "
        "reserved for KV Cache is 6.22GiB.\n"
        "vLLM STDOUT: INFO 05-05 [executor_base.py:111] # cuda blocks: 3637, # CPU blocks: 1170\n"
        "vLLM STDOUT: INFO 05-05 Maximum concurrency for 2048 tokens per request: 28.41x\n",
        {
            ("available", 6.22): True,
            ("gpu_blocks", 3637): True,
            ("cpu_blocks", 1170): None,
            ("max_concurrency", 28.41): True,
        },
        heads(28, 8, 128),
    ),
    "no swap space, and no model": Pasted(
        "a public notebook that runs Unsloth; its address was not recorded",
        "INFO 08-12 [worker.py:295] the rest of the memory reserved for KV Cache is 34.81GiB.\n"
        "INFO 08-12 [executor_base.py:113] # cuda blocks: 190100, # CPU blocks: 0 \n",
        {("cpu_blocks", 0): None},
    ),
    "a length with its suffix": Pasted(
        "public notes on Qwen3-30B-A3B on two L40S, v0.10.2; their address was not recorded",
        "vllm serve Qwen/Qwen3-30B-A3B \\\n    --tensor-parallel-size 2 \\\n"
        "    --swap-space 0 \\\n    --max-model-len 32K\n"
        "(Worker_TP1_EP1 pid=2295) INFO 09-24 Available KV cache memory: 25.91 GiB\n"
        "(EngineCore_DP0 pid=2225) INFO 09-24 GPU KV cache size: 566,016 tokens\n"
        "(EngineCore_DP0 pid=2225) INFO 09-24 Maximum concurrency for 32,768 tokens per request: "
        "17.27x\n",
        {
            ("max_model_len", 32768): None,
            ("tokens", 566016): True,
            ("max_concurrency", 17.27): True,
        },
        heads(48, 4, 128),
    ),
    "a hybrid, its model not given": Pasted(
        "https://github.com/vllm-project/vllm/pull/30515",
        "(EngineCore_DP0 pid=387) INFO 03-08 Available KV cache memory: 17.36 GiB\n"
        "(EngineCore_DP0 pid=387) INFO 03-08 GPU KV cache size: 188,640 tokens\n"
        "(EngineCore_DP0 pid=387) INFO 03-08 Maximum concurrency for 131,072 tokens per request: "
        "5.23x\n",
        {("max_concurrency", 5.23): None},
    ),
    "a hybrid that is refused": Pasted(
        "public notes on vLLM on a GB10; their address was not recorded",
        "ValueError: Free memory on device cuda:0 (106.88/121.69 GiB) on startup is less than\n"
        "desired GPU memory utilization (0.89, 108.3 GiB).\n"
        "ValueError: To serve at least one request with the model's max seq len (700160),\n"
        "(6.11 GiB KV cache is needed, which is larger than the available KV cache memory\n"
        "(5.17 GiB). Based on the available memory, the estimated maximum model length is 566784."
        "\n",
        {("usable", 108.3): True, ("estimated_max_model_len", 566784): None},
    ),
    "blocks of 256 tokens": Pasted(
        "https://github.com/vllm-project/tpu-inference/pull/223",
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 "
        "GiB KV cache is needed, which is larger than the available KV cache memory (0.71 GiB). "
        "Based on the available memory, the estimated maximum model length is 5632. Try\n",
        {("needed", 16.0): True, ("estimated_max_model_len", 5632): None},
        LLAMA_8B,
    ),
    "weights smaller than any of sixteen bits": Pasted(
        "composed: half of Llama-3-8B and its embedding table",
        "INFO 01-30 gpu_model_runner.py:848] Loading model weights took 8.4600 GB\n",
        {("weights", 8.46): None},
        LLAMA_8B,
    ),
    "weights said not to be quantised": Pasted(
        "composed: as before, and the engine's own line says that nothing is quantised",
        "Initializing an LLM engine with config: tensor_parallel_size=1, quantization=None, seed=0"
        "\nINFO 01-30 gpu_model_runner.py:848] Loading model weights took 8.4600 GB\n",
        {("weights", 8.46): False},
        LLAMA_8B,
    ),
    "bytes without their unit": Pasted(
        "a public report on vllm-ascend with Qwen2.5-0.5B; its address was not recorded",
        "(EngineCore_DP0 pid=6903) INFO 10-09 [worker_v1.py:198] Available memory: 40178937036, "
        "total memory: 49602220032\n"
        "(EngineCore_DP0 pid=6903) INFO 10-09 GPU KV cache size: 3,269,760 tokens\n",
        {("available", 40178937036): None, ("tokens", 3269760): True},
        heads(24, 2, 64),
    ),
    "a suggestion in bytes alone": Pasted(
        "a public log of vLLM 0.10.2 on an H100; its address was not recorded",
        "INFO [gpu_worker.py:391] Free memory on device (78.66/79.19 GiB) on startup. Desired GPU "
        "memory utilization is (0.9, 71.27 GiB). Actual usage is 14.08 GiB for weight, 1.97 GiB "
        "for peak activation, 0.07 GiB for non-torch memory, and 0.67 GiB for CUDAGraph memory. "
        "Replace gpu_memory_utilization config with `--kv-cache-memory=58333988249` to fit into "
        "requested memory. Current kv cache memory in use is 59212694937 bytes.\n",
        {("suggested_bytes", 58333988249): True, ("available", 59212694937): True},
    ),
    "a suggestion on another device": Pasted(
        "https://github.com/vllm-project/vllm-ascend/pull/8289",
        "INFO 04-15 [worker.py:575] Free memory on device (60.86/61.27 GiB) on startup. Desired "
        "GPU memory utilization is (0.9, 55.14 GiB). Actual usage: 1.14 GiB for weights, 0.22 GiB "
        "for peak activation, 0.13 GiB for non-torch memory, 0.04 GiB for NPU graph memory. "
        "Replace gpu_memory_utilization with `--kv-cache-memory=57403864576` (53.46 GiB) to fit "
        "into requested memory\n",
        {("usable", 55.14): True, ("suggested", 53.46): True, ("weights", 1.14): None},
    ),
    "a draft model in the cache": Pasted(
        "https://github.com/noonghunna/club-3090/issues/104; the tokens are ours",
        "non-default args: {'tensor_parallel_size': 2, 'speculative_config': {'method': 'mtp'}}\n"
        "(Worker_TP0 pid=99) INFO 05-07 Available KV cache memory: 9.84 GiB\n"
        "(EngineCore pid=90) INFO 05-07 GPU KV cache size: 600,000 tokens\n",
        {("tokens", 600000): None},
        heads(16, 4, 256),
    ),
    "two engines": Pasted(
        "https://github.com/vllm-project/vllm/issues/21348",
        "On vLLM:\n```\nAvailable KV cache memory: 8.11 GiB\nGPU KV cache size: 178,880 tokens\n```"
        "\nFor SGLang:\n```\nKV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 "
        "GB\n```\n",
        {("tokens", 178880): None, ("tokens", 367404): None},
    ),
    "pools of two kinds of layers": Pasted(
        "https://github.com/sgl-project/sglang/pull/18039; the second pool's size is computed",
        "server_args=ServerArgs(model_path='MiMo-V2-Flash', tp_size=4, page_size=64, dp_size=1)\n"
        "[2026-01-31 13:50:39 TP2] Use sliding window memory pool. full_layer_tokens=375360, "
        "swa_layer_tokens=300288\n"
        "[2026-01-31 13:50:39 TP2] KV Cache is allocated. #tokens: 300288, K size: 8.38 GB, V "
        "size: 5.59 GB\n"
        "[2026-01-31 13:50:39 TP2] KV Cache is allocated. #tokens: 375360, K size: 1.21 GB, V "
        "size: 0.81 GB\n"
        "[2026-01-31 13:50:52 TP0] max_total_num_tokens=375360, context_len=262144\n",
        {
            ("tokens", 300288): None,
            ("tokens", 375360): True,
            ("k_size", 8.38): True,
            ("v_size", 5.59): True,
            ("k_size", 1.21): True,
            ("v_size", 0.81): True,
        },
        MIMO_V2_FLASH,
    ),
    "a pool without its tokens": Pasted(
        "computed for Llama-3-8B, in the shape of SGLang 0.4",
        "[2025-03-01 10:00:00 TP0] KV Cache is allocated. K size: 27.13 GB, V size: 27.13 GB.\n"
        "[2025-03-01 10:00:09 TP0] max_total_num_tokens=444472, context_len=8192\n",
        {("k_size", 27.13): True, ("v_size", 27.13): True},
        LLAMA_8B,
    ),
    "a line of SGLang wrapped": Pasted(
        "a public reader of SGLang's logs (DeepSeek-V3); its address was not recorded",
        "[2025-11-04 05:27:13 DP0 TP0 EP0] Load weight end. elapsed=1.5 s, type=DeepseekV3,\n"
        "        dtype=torch.bfloat16, avail mem=75.11 GB, mem usage=107.07 GB.\n",
        {("weights", 107.07): None},
    ),
    "a trial before the cache": Pasted(
        "https://github.com/ai-dynamo/dynamo: tests of what it reads from TensorRT-LLM's log",
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 12.50 GiB for max tokens in paged KV "
        "cache (65536).\n[TensorRT-LLM][INFO] [MemUsageChange] Allocated 43.87 GiB for max tokens "
        "in paged KV cache (229984).\n",
        {("tokens", 65536): None, ("tokens", 229984): None},
    ),
    "as many layers with windows as without": Pasted(
        "computed for gpt-oss-20b in q8_0, in the shape of llama-kv-cache.cpp",
        "llama_kv_cache_iswa: creating non-SWA KV cache, size = 4096 cells\n"
        "llama_kv_cache: size =   51.00 MiB (  4096 cells,  12 layers,  1/1 seqs), K (q8_0):   "
        "25.50 MiB, V (q8_0):   25.50 MiB\n"
        "llama_kv_cache_iswa: creating     SWA KV cache, size = 768 cells\n"
        "llama_kv_cache: size =    9.56 MiB (   768 cells,  12 layers,  1/1 seqs), K (q8_0):    "
        "4.78 MiB, V (q8_0):    4.78 MiB\n",
        {("kv_size", 51.0): True, ("kv_size", 9.56): True, ("k_size", 4.78): True},
        GPT_OSS_20B,
    ),
    "latents kept as heads": Pasted(
        "https://github.com/ggml-org/llama.cpp/pull/11397 (widths); the sizes are computed",
        "llama_init_from_model: n_ctx         = 8192\n"
        "llama_init_from_model: KV self size  = 39040.00 MiB, K (f16): 23424.00 MiB, V (f16): "
        "15616.00 MiB\n",
        {("kv_size", 39040.0): True, ("k_size", 23424.0): True, ("v_size", 15616.0): True},
        DEEPSEEK_V3,
    ),
    "latents kept again as values": Pasted(
        "https://github.com/ggml-org/llama.cpp/pull/12801: computed for 32,768 cells",
        "llama_context: n_ctx = 32768\nllama_kv_cache_unified: size = 4148.00 MiB ( 32768 cells,  "
        "61 layers,  1 seqs), K (f16): 2196.00 MiB, V (f16): 1952.00 MiB\n",
        {("kv_size", 4148.0): True, ("k_size", 2196.0): True, ("v_size", 1952.0): True},
        DEEPSEEK_V3,
    ),
    "a draft model beside the model": Pasted(
        "https://github.com/ggml-org/llama.cpp/issues/11200",
        "llama_kv_cache_init: kv_size = 32768, offload = 1, type_k = 'q8_0', n_layer = 64\n"
        "llama_new_context_with_model: KV self size  = 4352.00 MiB, K (q8_0): 2176.00 MiB, V "
        "(q8_0): 2176.00 MiB\n"
        "srv    load_model: loading draft model 'qwen2.5-coder:1.5b-instruct-q8_0.gguf'\n"
        "llama_model_loader: loaded meta data with 34 key-value pairs\n"
        "llama_kv_cache_init: kv_size = 32768, offload = 1, type_k = 'f16', n_layer = 28\n"
        "llama_new_context_with_model: KV self size  =  896.00 MiB, K (f16):  448.00 MiB, V "
        "(f16):  448.00 MiB\n",
        {("k_size", 2176.0): True, ("v_size", 2176.0): True, ("k_size", 448.0): None},
        heads(64, 8, 128),
    ),
    "layers that the model does not have": Pasted(
        "computed for 28 layers of 8 KV heads of 128",
        "llama_kv_cache: size =  448.00 MiB (  4096 cells,  28 layers,  1/1 seqs), K (f16):  "
        "224.00 MiB, V (f16):  224.00 MiB\n",
        {("k_size", 224.0): False, ("v_size", 224.0): False, ("kv_size", 448.0): False},
        heads(64, 8, 128),
    ),
    "a layer beside those of the model": Pasted(
        "computed for 64 layers of 8 KV heads of 128, and one that predicts further tokens",
        "llama_kv_cache: size = 1024.00 MiB (  4096 cells,  64 layers,  1/1 seqs), K (f16):  "
        "512.00 MiB, V (f16):  512.00 MiB\n"
        "llama_kv_cache: size =   16.00 MiB (  4096 cells,   1 layers,  1/1 seqs), K (f16):    "
        "8.00 MiB, V (f16):    8.00 MiB\n",
        {("k_size", 512.0): True, ("v_size", 512.0): True, ("k_size", 8.0): None},
        heads(64, 8, 128),
    ),
    "states beside the cache": Pasted(
        "a public log of llama.cpp with a hybrid; its address was not recorded",
        "llama_kv_cache: size =  128.00 MiB (  4096 cells,   8 layers,  4/1 seqs), K (f16):   "
        "64.00 MiB, V (f16):   64.00 MiB\n"
        "llama_memory_recurrent: size =  201.00 MiB (     4 cells,  32 layers,  4 seqs), R (f32): "
        "   9.00 MiB, S (f32):  192.00 MiB\n",
        {("kv_size", 128.0): True, ("cells", 4096): None, ("state_size", 201.0): None},
    ),
    "a pager that cut the line": Pasted(
        "a public journal of ollama, cut by its pager; its address was not recorded",
        "Apr 21 11:15:51 host ollama[3473]: llama_kv_cache: size =  448.00 MiB (  4096 cells,  28 "
        "layers,  1/1 seqs), K (f16):  224.00 MiB, V (f16):  2>\n",
        {("kv_size", 448.0): None, ("cells", 4096): None},
        heads(28, 8, 128),
    ),
}


def said_of(checks: list[LogCheck]) -> dict[tuple[str, float], set[bool | None]]:
    found: dict[tuple[str, float], set[bool | None]] = {}
    for check in checks:
        found.setdefault((check.quantity, check.reported), set()).add(check.agrees)
    return found


@pytest.mark.parametrize("name", LOGS)
def test_what_is_said_of_a_pasted_log(name: str) -> None:
    """Each number is found with its verdict, and no other is contradicted."""
    log = LOGS[name]
    found = said_of(explain_log(log.text, log.spec))
    for number, verdict in log.numbers.items():
        if verdict is None:
            assert found[number] == {None}, number
        else:
            assert verdict in found[number], number
    assert ("kv_size", 201.0) not in found  # a state is no cache
    wrong = {number for number, verdicts in found.items() if False in verdicts}
    assert wrong == {number for number, verdict in log.numbers.items() if verdict is False}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a swap space that the log does not state", "a swap space of 2 GiB, which the log does"),
        ("no swap space, and no model", "a swap space of 0 GiB"),
        ("a hybrid, its model not given", "a model with windows or states"),
        ("blocks of 256 tokens", "blocks of 256 tokens, which the log does not state"),
        ("weights smaller than any of sixteen bits", "quantised, offloaded or split"),
        ("a draft model in the cache", "a draft model has layers of its own"),
        ("a draft model beside the model", "a draft model's"),
        ("a layer beside those of the model", "beside the 64 of the model"),
        ("latents kept as heads", "latents as heads"),
    ],
)
def test_the_reason_says_what_is_not_known(name: str, words: str) -> None:
    assert any(words in check.why for check in explain_log(LOGS[name].text, LOGS[name].spec))


def test_latents_that_an_older_engine_stored_as_heads_prove_nothing() -> None:
    """vLLM before 0.7 padded DeepSeek's heads to 256 and stored them all (vllm#12067).

    The numbers are computed: 27 layers of 16 heads, 4 GiB of swap space.
    """
    lite = cache_of(27, LatentAttention(16, 512, 128, 64, 128))
    as_heads = 4 * 2**30 // (16 * 27 * 2 * 16 * 256 * 2)
    as_latents = 4 * 2**30 // (16 * 27 * 576 * 2)
    verdicts = {}
    for blocks in (as_heads, as_latents):
        log = f"INFO 12-05 09:00:00 gpu_executor.py:76] # GPU blocks: 7022, # CPU blocks: {blocks}"
        (check,) = (c for c in explain_log(log, lite) if c.quantity == "cpu_blocks")
        verdicts[blocks] = check.agrees
    assert verdicts == {as_heads: None, as_latents: True}
