"""Capacity as each engine counts it: where it floors, where it rounds up, what it pads.

Models: vLLM's pool (`servelab.memory.vllm`), SGLang's tokens, TensorRT-LLM's blocks, llama.cpp's
cells, and the exact count without an engine's additions.

Assumes: the given bytes are what the engine found for its cache (`servelab.memory.budget`); ranks
that differ are reduced to the smallest, as all engines do.

Ignores: SGLang's and TensorRT-LLM's own pools for windows, which are off unless they are asked for
or the architecture is on their lists: windows are counted at full length there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from servelab.memory import vllm
from servelab.memory.capacity import (
    Capacity,
    Settings,
    exact,
    sequence_bytes,
)
from servelab.memory.formats import served_bytes, token_bytes
from servelab.models import LayerSpec, ModelSpec
from servelab.models.parallel import rank, stages
from servelab.units import check_count

#: llama.cpp rounds contexts, and the cells of windowed layers, up to a multiple of this.
_CELLS = 256
#: Tokens per block where none are given, of engines that do not take vLLM's 16. Source: SGLang
#: ``server_args.py``, ``page_size``; TensorRT-LLM ``KvCacheConfig``, ``tokens_per_block``.
_BLOCK_SIZES = {"sglang": 1, "tensorrt-llm": 32}


def capacity(
    spec: ModelSpec,
    available_bytes: int | tuple[int, ...],
    max_model_len: int,
    block_size: int | None = None,
    kv_dtype: str = "bf16",
    *,
    engine: str = "exact",
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    max_num_batched_tokens: int | None = None,
    layers_per_stage: tuple[int, ...] | None = None,
) -> Capacity:
    """Return the blocks, tokens and full-length sequences that fit, as ``engine`` counts them.

    Parameters: ``available_bytes`` for the cache of one rank: one number for all ranks, or a tuple
    of ``tp * pp``, those of a pipeline stage together; ``engine`` one of ``ENGINES``;
    ``block_size`` None for the engine's default: 16, single tokens in SGLang, 32 in TensorRT-LLM;
    ``max_num_batched_tokens`` None for 8,192, and 512 for llama.cpp; the others as in `Settings`.
    Raises: ``TypeError``, ``ValueError`` for bad counts, an unknown format or engine, heads that do
    not divide over the ranks, and what the engine itself refuses.

    >>> from servelab import models
    >>> spec = models.get("llama-3-8b")
    >>> fits = capacity(spec, 60_466_131_041, max_model_len=8192)
    >>> fits.blocks, fits.tokens, round(fits.max_concurrency, 2), fits.sequences
    (28832, 461312, 56.31, 56)
    >>> [capacity(spec, 2**30, 8192, kv_dtype="fp8", engine=e).tokens for e in ENGINES]
    [16384, 16384, 16384, 16384, 16384]
    """
    if not isinstance(engine, str) or engine not in _COUNTS:
        raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    if block_size is None:
        block_size = _BLOCK_SIZES.get(engine, 16)
    if max_num_batched_tokens is None:
        max_num_batched_tokens = 512 if engine == "llama.cpp" else 8192
    settings = Settings(
        max_model_len,
        block_size,
        kv_dtype,
        tp,
        pp,
        dcp,
        max_num_batched_tokens,
        layers_per_stage,
    )
    if settings.dcp > 1:
        _check_context_parallel(spec, settings, engine)
    part = rank(spec, settings.tp)
    room = _per_stage(available_bytes, settings)
    return replace(
        _COUNTS[engine](part, room, settings),
        logical_sequence_bytes=sequence_bytes(part, settings.rank_tokens, kv_dtype, "logical"),
        reserved_sequence_bytes=sequence_bytes(part, settings.rank_tokens, kv_dtype, "reserved"),
    )


def _check_context_parallel(spec: ModelSpec, settings: Settings, engine: str) -> None:
    """Refuse decode-context parallelism where ranks hold different heads.

    Source: vLLM ``config/model.py``, ``verify_with_parallel_config``.
    """
    if engine not in ("exact", "vllm"):
        raise ValueError(f"dcp is known of vllm only, got {settings.dcp} for {engine}")
    heads = max(
        (getattr(layer.attention, "num_kv_heads", 1) for layer in spec.layer_counts), default=1
    )
    if settings.dcp * heads > settings.tp:
        raise ValueError(
            f"dcp shares tokens among ranks that hold the same KV heads: {heads} heads over "
            f"{settings.tp} ranks allow {max(settings.tp // heads, 1)}, got {settings.dcp}"
        )


def _per_stage(available_bytes: int | tuple[int, ...], settings: Settings) -> list[int]:
    """Return the smallest memory among the ranks of each pipeline stage."""
    ranks = settings.tp * settings.pp
    if isinstance(available_bytes, tuple):
        rooms = [check_count("available_bytes", room, minimum=0) for room in available_bytes]
        if len(rooms) != ranks:
            raise ValueError(f"available_bytes must be one count or {ranks}, got {len(rooms)}")
    else:
        rooms = [check_count("available_bytes", available_bytes, minimum=0)] * ranks
    return [min(rooms[i : i + settings.tp]) for i in range(0, ranks, settings.tp)]


def _sglang(spec: ModelSpec, available: Sequence[int], settings: Settings) -> Capacity:
    """Count whole tokens, then whole pages. Source: sgl-project/sglang#11309 for what it stores."""
    return _by_tokens("sglang", spec, available, settings, round_up=False)


def _tensorrt_llm(spec: ModelSpec, available: Sequence[int], settings: Settings) -> Capacity:
    """Count tokens, then blocks that hold them all. Source: NVIDIA/TensorRT-LLM#2268."""
    return _by_tokens("tensorrt-llm", spec, available, settings, round_up=True)


def _by_tokens(
    engine: str, spec: ModelSpec, available: Sequence[int], settings: Settings, round_up: bool
) -> Capacity:
    if spec.state_bytes_per_sequence:
        raise ValueError(
            f"{spec.name}: {engine} divides memory between states and tokens by a ratio of its "
            "own, which is not modelled"
        )
    size = settings.block_size
    found = []
    parts = stages(spec, settings.pp, settings.layers_per_stage)
    for layers, room in zip(parts, available, strict=True):
        per_token = sum(served_bytes(layer, settings.kv_dtype) for layer in layers)
        if per_token:
            tokens = room // per_token
            found.append((-(-tokens // size) if round_up else tokens // size, per_token))
    if not found:
        raise ValueError(f"{spec.name} caches nothing: memory sets no limit to its sequences")
    blocks, per_token = min(found)
    needed = settings.sequence_blocks
    length = settings.max_model_len
    return Capacity(blocks, blocks * size, size * per_token, needed, length, size, engine)


def _llama_cpp(spec: ModelSpec, available: Sequence[int], settings: Settings) -> Capacity:
    """Count contexts: cells for each sequence are set aside when the program starts.

    A windowed layer has cells for its window and one micro-batch; states are kept in fp32.
    Source: ggml-org/llama.cpp at 02c28f53, ``src/llama-context.cpp``,
    ``src/llama-kv-cache-iswa.cpp``, ``src/llama-memory-recurrent.cpp``.
    """
    if settings.tp > 1:
        raise ValueError(f"llama.cpp cuts a model by layers (pp), got tp {settings.tp}")
    cells = _padded(settings.max_model_len)
    found = []
    parts = stages(spec, settings.pp, settings.layers_per_stage)
    for layers, room in zip(parts, available, strict=True):
        size = sum(_context_bytes(layer, cells, settings) for layer in layers)
        if size:
            found.append((room // size, size))
    if not found:
        raise ValueError(f"{spec.name} caches nothing: memory sets no limit to its sequences")
    contexts, size = min(found)
    length = settings.max_model_len
    return Capacity(contexts, contexts * cells, size, 1, length, cells, "llama.cpp")


def _context_bytes(layer: LayerSpec, cells: int, settings: Settings) -> int:
    window = None if layer.attention is None else layer.attention.window
    if window is not None:
        cells = _padded(min(cells, window + settings.max_num_batched_tokens))
    state = layer.state
    if state is not None:
        state = replace(state, conv_dtype="fp32", matrix_dtype="fp32")
    return cells * token_bytes(layer, settings.kv_dtype) + (state.state_bytes if state else 0)


def _padded(tokens: int) -> int:
    return -(-tokens // _CELLS) * _CELLS


_Count = Callable[[ModelSpec, Sequence[int], Settings], Capacity]
_COUNTS: Mapping[str, _Count] = MappingProxyType(
    {
        "exact": exact,
        "vllm": vllm.capacity,
        "sglang": _sglang,
        "tensorrt-llm": _tensorrt_llm,
        "llama.cpp": _llama_cpp,
    }
)
#: The engines whose counting is known; "exact" adds nothing of its own.
ENGINES = tuple(_COUNTS)
