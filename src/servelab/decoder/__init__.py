"""The decoder in torch: a dense one first, the oracle; then the paged one, and its runner.

Read: attention, operators, kv_store, paged, sampler, runner; the oracle: dense, cache; the kernels:
triton_attention, triton_kernels; cpu_attention, cpu_operators, cpu_kernels and its C++. What loads
a model: checkpoint, rope. What makes steps fast: staging and graphs on a GPU, packing and compiled
on a CPU.
"""

from servelab.decoder.attention import AttentionBackend, ReferenceAttention, StepBatch
from servelab.decoder.cache import DenseCache
from servelab.decoder.checkpoint import BUNDLED_CHECKPOINT, BadCheckpoint, Checkpoint
from servelab.decoder.dense import DenseDecoder, greedy
from servelab.decoder.kv_store import KvStore
from servelab.decoder.paged import DTYPE_NAMES, PagedDecoder
from servelab.decoder.rope import Llama3Scaling, Rope
from servelab.decoder.runner import TorchRunner

__all__ = [
    "BUNDLED_CHECKPOINT",
    "DTYPE_NAMES",
    "AttentionBackend",
    "BadCheckpoint",
    "Checkpoint",
    "DenseCache",
    "DenseDecoder",
    "KvStore",
    "Llama3Scaling",
    "PagedDecoder",
    "ReferenceAttention",
    "Rope",
    "StepBatch",
    "TorchRunner",
    "greedy",
]
