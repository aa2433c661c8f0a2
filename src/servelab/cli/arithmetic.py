"""The arithmetic of a model's cache, written out with the model's own numbers in it.

Models: one line per kind of layer: a product of factors that whoever reads can multiply again, and
what it comes to. The total is the calculators'; the factors are read from the layers, so a line
that does not multiply out shows a fault (a test multiplies all of them).

Assumes: layers whose caches have one formula and one window are one kind.

Ignores: what engines add to it; see `servelab.memory`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from servelab.memory.formats import ROW_BLOCKS, token_bytes
from servelab.models import Attention, CrossAttention, LatentAttention, LayerSpec, ModelSpec
from servelab.units import DTYPE_BITS


@dataclass(frozen=True)
class Line:
    """What layers of one kind keep.

    Fields: ``kind`` in words; ``layers`` of that kind; ``window_tokens`` they hold at most (None:
    all); ``bytes_per_token`` that they add together, ``state_bytes`` that they keep per sequence;
    ``formula`` the product, empty where they keep nothing.
    """

    kind: str
    layers: int
    window_tokens: int | None
    bytes_per_token: int
    state_bytes: int
    formula: str


def cache_lines(spec: ModelSpec, kv_dtype: str) -> list[Line]:
    """Return one line per kind of layer, in order of first appearance.

    Parameters: ``spec`` a model, or one rank of it; ``kv_dtype`` a format of the cache.
    Raises: ``ValueError`` for a format that does not fit the layers.

    >>> from servelab import models
    >>> [line] = cache_lines(models.get("qwen3-8b"), "bf16")
    >>> line.formula, line.bytes_per_token
    ('2 x 36 layers x 8 KV heads x 128 x 2 B', 147456)
    """
    kinds: dict[tuple[str, str, int | None], list[tuple[int, LayerSpec]]] = {}
    for layer, count in spec.layer_counts.items():
        for kind, factors in _parts(layer, kv_dtype):
            window = spec.window(layer) if factors and not kind.endswith("state") else None
            kinds.setdefault((kind, factors, window), []).append((count, layer))
    return [
        _line(kind, factors, window, alike, kv_dtype)
        for (kind, factors, window), alike in kinds.items()
    ]


def _line(
    kind: str,
    factors: str,
    window: int | None,
    alike: list[tuple[int, LayerSpec]],
    kv_dtype: str,
) -> Line:
    layers = sum(count for count, _ in alike)
    formula = factors.format(layers=f"{layers:,} layer" + "s" * (layers != 1))
    if kind.endswith("state"):
        state = sum(count * layer.state_bytes for count, layer in alike)
        return Line(kind, layers, None, 0, state, formula)
    cached = sum(count * token_bytes(layer, kv_dtype) for count, layer in alike)
    return Line(kind, layers, window, cached, 0, formula)


def _parts(layer: LayerSpec, kv_dtype: str) -> list[tuple[str, str]]:
    """Return what a layer keeps: the kind of it, and its factors with ``{layers}`` to fill in."""
    found = []
    heads = layer.attention
    if isinstance(heads, LatentAttention):
        found.append(("latent attention", _latent(heads, kv_dtype)))
    elif isinstance(heads, Attention):
        found.append((_kind(heads), _heads(heads, kv_dtype)))
    elif isinstance(heads, CrossAttention):
        found.append(("attention to an image", ""))
    if layer.state is not None:
        found.append((f"{layer.state.kind} state", _state(layer)))
    return found or [("no attention", "")]


def _kind(heads: Attention) -> str:
    if heads.shares_kv:
        return "reads an earlier layer's cache"
    if heads.window is None:
        return "full attention"
    return "chunked attention" if heads.chunked else "sliding window"


def _heads(heads: Attention, kv_dtype: str) -> str:
    index = _index(heads, kv_dtype)
    if heads.shares_kv:
        return f"{{layers}} x {index}" if index else ""
    plural = "s" * (heads.num_kv_heads != 1)
    kv_heads = f"{heads.num_kv_heads} KV head{plural}"
    if heads.head_dim == heads.value_dim and not index:
        return f"2 x {{layers}} x {kv_heads} x {_vector(heads.head_dim, kv_dtype)}"
    key, value = (_vector(width, kv_dtype) for width in (heads.head_dim, heads.value_dim))
    own = f"{kv_heads} x ({key} + {value})"
    return f"{{layers}} x ({own} + {index})" if index else f"{{layers}} x {own}"


def _latent(heads: LatentAttention, kv_dtype: str) -> str:
    latent, rope = heads.kv_lora_rank, heads.qk_rope_head_dim
    index = _index(heads, kv_dtype)
    if kv_dtype == "fp8_ds_mla":
        parts = [f"{latent} x 1 B", f"{latent}/128 x 4 B", f"{rope} x 2 B"]
    else:
        parts = [_vector_of(f"({latent} + {rope})", kv_dtype)]
    parts += [index] if index else []
    return f"{{layers}} x ({' + '.join(parts)})" if len(parts) > 1 else f"{{layers}} x {parts[0]}"


def _index(heads: Attention | LatentAttention, kv_dtype: str) -> str:
    if heads.indexer is None:
        return ""
    width = heads.indexer.head_dim
    if kv_dtype == "fp8_ds_mla":
        return f"{width} x 1 B + 4 B"
    return _vector(width, kv_dtype)


def _vector(width: int, kv_dtype: str) -> str:
    return _vector_of(str(width), kv_dtype)


def _vector_of(width: str, kv_dtype: str) -> str:
    """Return the bytes of one head's key or value, scales included, as factors."""
    if kv_dtype in ROW_BLOCKS:
        group, group_bytes = ROW_BLOCKS[kv_dtype]
        return f"{width} x {group_bytes}/{group} B"
    if kv_dtype == "nvfp4":
        return f"{width} x 9/16 B"  # half a byte, and a byte of scale per 16
    if kv_dtype not in DTYPE_BITS:  # a scale per token and head
        return f"({width} x 1 B + 4 B)"
    bits = DTYPE_BITS[kv_dtype]
    return f"{width} x {bits // 8} B" if bits % 8 == 0 else f"{width} x {bits}/8 B"


def _state(layer: LayerSpec) -> str:
    state = layer.state
    assert state is not None
    parts = []
    if state.conv_channels and state.conv_kernel > 1:
        size = _vector_of(f"{state.conv_channels:,}", state.conv_dtype)
        parts.append(f"{state.conv_kernel - 1} x {size}")
    if state.matrix_elements:
        parts.append(_vector_of(f"{state.matrix_elements:,}", state.matrix_dtype))
    return f"{{layers}} x ({' + '.join(parts)})" if parts else ""


def sequence_formula(lines: list[Line], tokens: int | None = None) -> str:
    """Return the bytes of one sequence as a sum: growth, full windows, state.

    Parameters: ``tokens`` of the sequence (None: the letter T).

    >>> from servelab import models
    >>> lines = cache_lines(models.get("mistral-7b"), "bf16")
    >>> sequence_formula(lines), sequence_formula(lines, 32768)
    ('131,072 x min(T, 4,096) B', '131,072 x min(32,768, 4,096) B')
    """
    length = "T" if tokens is None else f"{tokens:,}"
    slope = sum(line.bytes_per_token for line in lines if line.window_tokens is None)
    terms = [f"{slope:,} x {length}"] if slope else []
    terms += [
        f"{line.bytes_per_token:,} x min({length}, {line.window_tokens:,})"
        for line in lines
        if line.window_tokens is not None and line.bytes_per_token
    ]
    state = sum(line.state_bytes for line in lines)
    terms += [f"{state:,}"] if state else []
    return (" + ".join(terms) or "0") + " B"


def as_values(line: Line) -> Mapping[str, object]:
    """Return a line as plain values for JSON."""
    return {
        "kind": line.kind,
        "layers": line.layers,
        "window_tokens": line.window_tokens,
        "bytes_per_token": line.bytes_per_token,
        "state_bytes_per_sequence": line.state_bytes,
        "formula": line.formula,
    }


def as_text(line: Line) -> str:
    """Return a line as a sentence: the product, and what it comes to.

    >>> from servelab import models
    >>> print(as_text(cache_lines(models.get("mistral-7b"), "fp8")[0]))
    2 x 32 layers x 8 KV heads x 128 x 1 B = 65,536 B per token, at most 4,096 kept
    """
    if not line.formula:
        plural = "s" * (line.layers != 1)
        return f"{line.layers} layer{plural}: {line.kind}, 0 B"
    if line.state_bytes:
        return f"{line.formula} = {line.state_bytes:,} B per sequence ({line.kind})"
    kept = f", at most {line.window_tokens:,} kept" if line.window_tokens is not None else ""
    return f"{line.formula} = {line.bytes_per_token:,} B per token{kept}"
