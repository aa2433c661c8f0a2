"""How keys and values are stored: the bytes of one token in one layer, scales included.

Models: plain number formats; one scale per token and head; blocks of elements that share a scale.
A scale per tensor or per channel is not counted: it does not grow with the tokens.

Assumes: each head of K and of V is stored by itself, so that a block never spans two of them, but
for llama.cpp's formats, whose rows hold all heads of one token.

Ignores: padding to pages (`servelab.memory.vllm`) and to cells (`servelab.memory.engines`).
"""

from servelab.models import Attention, LatentAttention, LayerSpec
from servelab.units import DTYPE_BITS, size_bytes

#: Formats of llama.cpp: (elements that share a scale, bytes that they take).
#: Source: ggml-org/llama.cpp ``ggml/src/ggml-common.h``, block_q8_0 and block_q4_0.
ROW_BLOCKS = {"q8_0": (32, 34), "q4_0": (32, 18)}
_SCALED = ("int8_per_token_head", "fp8_per_token_head")
_FP32_BYTES = 4
#: Formats of the cache, beside the plain dtypes of `servelab.units`.
FORMATS = (*DTYPE_BITS, *_SCALED, "fp8_ds_mla", "nvfp4", *ROW_BLOCKS)


def token_bytes(layer: LayerSpec, kv_dtype: str = "bf16") -> int:
    """Return the bytes that one token adds to the cache of one layer.

    Parameters: ``kv_dtype`` a plain dtype, or one of: ``int8_per_token_head``,
    ``fp8_per_token_head`` (one fp32 scale per token and head, K and V apart); ``fp8_ds_mla`` (a
    latent in fp8 with an fp32 scale per 128, its part with position in bf16: 656 bytes for 512 +
    64); ``nvfp4`` (half a byte per element and an fp8 scale per 16); ``q8_0``, ``q4_0`` (llama.cpp:
    34 and 18 bytes per 32 elements).
    Raises: ``ValueError`` for an unknown format, or one that does not fit the layer's heads.
    Source: vLLM ``v1/kv_cache_interface.py`` at 001cabc1; llama.cpp ``ggml-common.h``.

    >>> from servelab import models
    >>> layer = models.get("llama-3-8b").layers[0]  # 8 KV heads of 128: 2,048 elements
    >>> [token_bytes(layer, f) for f in ("bf16", "fp8", "int8_per_token_head", "nvfp4", "q8_0")]
    [4096, 2048, 2112, 1152, 2176]
    """
    return keys_bytes(layer, kv_dtype) + index_bytes(layer, kv_dtype)


def keys_bytes(layer: LayerSpec, kv_dtype: str) -> int:
    """Return the bytes of one token's keys and values (or latent) in one layer.

    Raises: as ``token_bytes``.
    """
    _check(kv_dtype)
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        return _latent_bytes(attention, kv_dtype)
    if not isinstance(attention, Attention) or attention.shares_kv:
        return 0
    return sum(
        _vectors_bytes(attention.num_kv_heads, width, kv_dtype)
        for width in (attention.head_dim, attention.value_dim)
    )


def index_bytes(layer: LayerSpec, kv_dtype: str) -> int:
    """Return the bytes of one token's index key, 0 where the layer has no indexer.

    Raises: as ``token_bytes``.
    Source: DeepSeek-V3.2 in SGLang and vLLM: 128 fp8 numbers and an fp32 scale are 132 bytes.

    >>> from servelab.models import Indexer
    >>> layer = LayerSpec(Attention(64, 8, 128, indexer=Indexer(64, 128, ())), None, 0)
    >>> index_bytes(layer, "fp8_ds_mla"), index_bytes(layer, "bf16")
    (132, 256)
    """
    _check(kv_dtype)
    indexer = getattr(layer.attention, "indexer", None)
    if indexer is None:
        return 0
    width: int = indexer.head_dim
    if kv_dtype == "fp8_ds_mla":
        return width + _FP32_BYTES * -(-width // 128)
    return _vectors_bytes(1, width, kv_dtype)


def served_bytes(layer: LayerSpec, kv_dtype: str) -> int:
    """Return ``token_bytes`` as GPU engines store them: index keys always in fp8 with a scale.

    Raises: as ``token_bytes``.
    """
    return keys_bytes(layer, kv_dtype) + index_bytes(layer, "fp8_ds_mla")


def _check(kv_dtype: str) -> None:
    if not isinstance(kv_dtype, str) or kv_dtype not in FORMATS:
        raise ValueError(f"unknown KV format {kv_dtype!r}; known: {', '.join(sorted(FORMATS))}")


def _latent_bytes(attention: LatentAttention, kv_dtype: str) -> int:
    if kv_dtype == "fp8_ds_mla":
        latent, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
        if latent % 128:
            raise ValueError(f"fp8_ds_mla scales groups of 128, which do not divide {latent}")
        return latent + _FP32_BYTES * (latent // 128) + size_bytes(rope, "bf16")
    return _vectors_bytes(1, attention.kv_width, kv_dtype)


def _vectors_bytes(heads: int, width: int, kv_dtype: str) -> int:
    """Return the bytes of one token's K (or V): one vector of ``width`` per head."""
    elements = heads * width
    if kv_dtype in _SCALED:
        return elements + _FP32_BYTES * heads
    if kv_dtype == "nvfp4":
        if width % 16:
            raise ValueError(f"nvfp4 scales groups of 16, which do not divide a head of {width}")
        return heads * (width // 2 + width // 16)
    if kv_dtype in ROW_BLOCKS:
        group, group_bytes = ROW_BLOCKS[kv_dtype]
        if elements % group:
            raise ValueError(f"{kv_dtype} packs groups of {group}, which do not divide {elements}")
        return elements // group * group_bytes
    if kv_dtype == "fp8_ds_mla":
        raise ValueError("fp8_ds_mla stores latents (MLA); this layer has keys and values per head")
    return size_bytes(elements, kv_dtype)
