"""The operators of a transformer step, each with its work and its compulsory traffic.

Models: matrix multiplication, attention over cached keys, the append to the cache, the embedding
look-up.

Assumes: attention is fused unless said otherwise: scores stay on the chip, and each key and value
is read once per sequence, whatever the number of query heads that share it.

Ignores: norms, rotary embedding, activations and residual additions. They are below one per cent
of the FLOP, and their traffic disappears where they are fused into their neighbours.
"""

from collections.abc import Sequence

from servelab.models import Attention
from servelab.roofline.cost import Cost
from servelab.units import check_count, check_flag, size_bytes

Step = Sequence[tuple[int, int]]


def checked_step(step: Step) -> list[tuple[int, int]]:
    """Return a step as pairs of Python ints: (new tokens from 1, cached tokens from 0).

    Raises: ``TypeError``, ``ValueError`` for anything else, or no pair at all.

    >>> checked_step([(1, 2048), (512, 0)])
    [(1, 2048), (512, 0)]
    """
    if not isinstance(step, Sequence) or not step:
        raise ValueError(
            f"a step is a list of at least one (new tokens, cached tokens) pair, got {step!r}"
        )
    for pair in step:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"a step is a list of (new tokens, cached tokens) pairs, got {pair!r}")
    return [
        (check_count("new tokens", new), check_count("cached tokens", cached, minimum=0))
        for new, cached in step
    ]


def matmul(
    rows: int,
    d_in: int,
    d_out: int,
    weight_dtype: str = "bf16",
    activation_dtype: str = "bf16",
    bias: bool = False,
) -> Cost:
    """Return the cost of ``Y = X W``: X is (rows, d_in), W is (d_in, d_out), Y is (rows, d_out).

    Parameters: ``rows`` the tokens in the step; dtypes of W and of X and Y; ``bias`` read if any
    (its ``rows * d_out`` additions are not counted, as in every FLOP counter).
    Raises: ``TypeError``, ``ValueError`` for bad counts or dtypes.
    Source: 2 FLOP per multiply-add; traffic as in Austin et al. (2025), "All about rooflines".

    >>> one, many = matmul(1, 4096, 4096), matmul(64, 4096, 4096)
    >>> one.flop, round(one.intensity, 3), round(many.intensity, 2)
    (33554432, 1.0, 62.06)
    """
    rows, d_in, d_out = (
        check_count(name, value)
        for name, value in (("rows", rows), ("d_in", d_in), ("d_out", d_out))
    )
    check_flag("bias", bias)
    return Cost(
        flop=2 * rows * d_in * d_out,
        read_bytes=size_bytes(rows * d_in, activation_dtype)
        + size_bytes(d_in * d_out + d_out * bias, weight_dtype),
        written_bytes=size_bytes(rows * d_out, activation_dtype),
    )


def causal_pairs(new_tokens: int, cached_tokens: int, window: int | None = None) -> int:
    """Return the (query, key) pairs of one sequence's causal attention.

    The i-th new token sees the cached tokens and the new ones up to itself, ``cached + i`` keys;
    with a window, the newest ``window`` of them.

    Parameters: ``new_tokens`` from 1, ``cached_tokens`` from 0; ``window`` in tokens or None.
    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> causal_pairs(4, 0), causal_pairs(1, 2048), causal_pairs(4, 2, window=3)
    (10, 2049, 12)
    """
    new, cached = (
        check_count("new_tokens", new_tokens),
        check_count("cached_tokens", cached_tokens, minimum=0),
    )
    if window is None:
        growing, full = new, 0
    else:  # queries whose view still grows, then queries that see a full window
        window = check_count("window", window)
        growing = min(max(window - cached, 0), new)
        full = (new - growing) * window
    return growing * cached + growing * (growing + 1) // 2 + full


def keys_read(new_tokens: int, cached_tokens: int, window: int | None = None) -> int:
    """Return the distinct keys that one sequence's new tokens attend to.

    Parameters and errors: as ``causal_pairs``.

    >>> keys_read(1, 2048), keys_read(4, 2, window=3), keys_read(1, 9999, window=4096)
    (2049, 6, 4096)
    """
    new, cached = (
        check_count("new_tokens", new_tokens),
        check_count("cached_tokens", cached_tokens, minimum=0),
    )
    return new + (cached if window is None else min(cached, check_count("window", window) - 1))


def attention(
    spec: Attention,
    step: Step,
    window: int | None = None,
    kv_dtype: str = "bf16",
    activation_dtype: str = "bf16",
    fused: bool = True,
) -> Cost:
    """Return the cost of one layer's attention for a step: scores, softmax, weighted sum.

    Parameters: ``spec`` heads and widths; ``step`` (new, cached) tokens per sequence; ``window`` in
    tokens or None; ``fused`` False: the score matrix goes through device memory, written by QKᵀ,
    read and written by the softmax, read by PV: four passes over (query heads, new, keys), in
    ``activation_dtype`` and without causal skipping, as a plain implementation does it.
    Raises: ``TypeError``, ``ValueError`` for an empty step, bad counts or dtypes.
    Source: Dao et al. (2022) for the traffic of fused and unfused attention.

    >>> cost = attention(Attention(32, 8, 128), [(1, 2047)])
    >>> cost.flop, cost.read_bytes, round(cost.intensity, 2)  # about the 4 query heads per KV head
    (33554432, 8396800, 3.99)
    """
    step = checked_step(step)
    check_flag("fused", fused)
    queries = sum(new for new, _ in step)
    head_elements = queries * spec.num_q_heads * spec.head_dim  # of Q, and of the output
    keys = sum(keys_read(new, cached, window) for new, cached in step)
    read = size_bytes(head_elements, activation_dtype) + size_bytes(
        keys * spec.kv_elements_per_token, kv_dtype
    )
    written = size_bytes(head_elements, activation_dtype)
    pairs = sum(causal_pairs(new, cached, window) for new, cached in step)
    if not fused:
        pairs = sum(
            new * keys_read(new, cached, window) for new, cached in step
        )  # the whole rectangle
        scores = size_bytes(spec.num_q_heads * pairs, activation_dtype)
        read, written = read + 2 * scores, written + 2 * scores
    return Cost(spec.flop_per_pair * pairs, read, written)


def kv_append(
    spec: Attention, new_tokens: int, kv_dtype: str = "bf16", activation_dtype: str = "bf16"
) -> Cost:
    """Return the cost of storing the keys and values of new tokens in the cache.

    Raises: ``TypeError``, ``ValueError`` for bad counts or dtypes.

    >>> kv_append(Attention(32, 8, 128), 1).written_bytes
    4096
    """
    elements = check_count("new_tokens", new_tokens) * spec.kv_elements_per_token
    return Cost(0, size_bytes(elements, activation_dtype), size_bytes(elements, kv_dtype))


def embedding(
    new_tokens: int, hidden_size: int, weight_dtype: str = "bf16", activation_dtype: str = "bf16"
) -> Cost:
    """Return the cost of looking up one embedding row per token: no FLOP, and not the whole table.

    Raises: ``TypeError``, ``ValueError`` for bad counts or dtypes.

    >>> embedding(1, 4096)
    Cost(flop=0, read_bytes=8192, written_bytes=8192, operators=())
    """
    elements = check_count("new_tokens", new_tokens) * check_count("hidden_size", hidden_size)
    return Cost(0, size_bytes(elements, weight_dtype), size_bytes(elements, activation_dtype))
