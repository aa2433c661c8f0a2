"""The operators of a transformer step, each with its work and its compulsory traffic.

Models: matrix multiplication, routed experts, attention over cached keys or latents, the update of
recurrent state, the append to the cache, the embedding look-up.

Assumes: attention is fused unless said otherwise: scores stay on the chip, and each key and value
is read once per sequence, whatever the number of query heads that share it; a step's tokens choose
their experts uniformly and independently.

Ignores: norms, rotary embedding, activations and residual additions. They are below one per cent
of the FLOP, and their traffic disappears where they are fused into their neighbours.
"""

from collections import Counter
from collections.abc import Sequence

from servelab.models import (
    Attention,
    CrossAttention,
    Experts,
    Indexer,
    LatentAttention,
    RecurrentState,
)
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
        if not isinstance(pair, (tuple, list, Sequence)) or len(pair) != 2:  # the plain ones first
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


def experts(
    mixture: Experts,
    rows: int,
    hidden_size: int,
    weight_dtype: str = "bf16",
    activation_dtype: str = "bf16",
) -> list[tuple[str, Cost]]:
    """Return the cost of the routed experts' matrices, by name; the router is a matmul of its own.

    Every token meets its k experts; of the weights only those of the expected distinct experts are
    read, rounded to whole numbers of weights, never the whole table at a small batch.

    Parameters: ``mixture`` the experts of a layer; ``rows`` the tokens in the step.
    Raises: ``TypeError``, ``ValueError`` for bad counts or dtypes.
    Source: `Experts.expected_distinct`.

    >>> from servelab.models import Mlp
    >>> mixtral = Experts(8, 2, Mlp(14336))
    >>> [[round(cost.read_bytes / 1e9, 2) for _, cost in experts(mixtral, rows, 4096)]
    ...  for rows in (1, 64)]
    [[0.47, 0.23], [1.88, 0.94]]
    """
    rows = check_count("rows", rows)
    met = rows * mixture.experts_per_token
    touched = mixture.expected_distinct(rows)
    return [
        (
            f"experts_{matrix.name}",
            Cost(
                flop=2 * met * matrix.d_in * matrix.d_out,
                read_bytes=size_bytes(met * matrix.d_in, activation_dtype)
                + size_bytes(round(touched * matrix.params), weight_dtype),
                written_bytes=size_bytes(met * matrix.d_out, activation_dtype),
            ),
        )
        for matrix in mixture.expert_linears(hidden_size)
    ]


def causal_pairs(
    new_tokens: int, cached_tokens: int, window: int | None = None, chunked: bool = False
) -> int:
    """Return the (query, key) pairs of one sequence's causal attention.

    The i-th new token sees the cached tokens and the new ones up to itself, ``cached + i`` keys;
    with a window, the newest ``window`` of them; with chunks, those since the last multiple of it.

    Parameters: ``new_tokens`` from 1, ``cached_tokens`` from 0; ``window`` in tokens or None;
    ``chunked`` the window does not slide.
    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> causal_pairs(4, 0), causal_pairs(1, 2048), causal_pairs(4, 2, window=3)
    (10, 2049, 12)
    >>> causal_pairs(4, 2, window=3, chunked=True)  # positions 2 | 3, 4, 5 see 3 | 1, 2, 3 keys
    9
    """
    new, cached = _checked(new_tokens, cached_tokens)
    if window is None:
        growing, full = new, 0
    elif chunked:
        return _chunked_pairs(cached + new, window) - _chunked_pairs(cached, window)
    else:  # queries whose view still grows, then queries that see a full window
        window = check_count("window", window)
        growing = min(max(window - cached, 0), new)
        full = (new - growing) * window
    return growing * cached + growing * (growing + 1) // 2 + full


def _checked(new_tokens: int, cached_tokens: int) -> tuple[int, int]:
    return (
        check_count("new_tokens", new_tokens),
        check_count("cached_tokens", cached_tokens, minimum=0),
    )


def _chunked_pairs(tokens: int, chunk: int) -> int:
    """Return the pairs of a sequence of ``tokens`` from its start: whole chunks and a part."""
    chunk = check_count("window", chunk)
    whole, part = divmod(tokens, chunk)
    return whole * (chunk * (chunk + 1) // 2) + part * (part + 1) // 2


def keys_read(
    new_tokens: int, cached_tokens: int, window: int | None = None, chunked: bool = False
) -> int:
    """Return the distinct keys that one sequence's new tokens attend to.

    Parameters and errors: as ``causal_pairs``.

    >>> keys_read(1, 2048), keys_read(4, 2, window=3), keys_read(1, 9999, window=4096)
    (2049, 6, 4096)
    """
    new, cached = _checked(new_tokens, cached_tokens)
    if window is None:
        return new + cached
    window = check_count("window", window)
    return new + (cached % window if chunked else min(cached, window - 1))


def attention(
    spec: Attention,
    step: Step,
    kv_dtype: str = "bf16",
    activation_dtype: str = "bf16",
    fused: bool = True,
) -> Cost:
    """Return the cost of one layer's attention for a step: scores, softmax, weighted sum.

    Parameters: ``spec`` heads, widths and window; ``step`` (new, cached) tokens per sequence;
    ``fused`` False: the score matrix goes through device memory, written by QKᵀ, read and written
    by the softmax, read by PV: four passes over (query heads, new, keys), in ``activation_dtype``
    and without causal skipping, as a plain implementation does it. A layer that shares an earlier
    one's cache reads it all the same. Sparse attention sees ``top_tokens`` keys per query at most,
    and reads as many per query, or all if that is less.
    Raises: ``TypeError``, ``ValueError`` for an empty step, bad counts or dtypes.
    Source: Dao et al. (2022) for the traffic of fused and unfused attention.

    >>> cost = attention(Attention(32, 8, 128), [(1, 2047)])
    >>> cost.flop, cost.read_bytes, round(cost.intensity, 2)  # about the 4 query heads per KV head
    (33554432, 8396800, 3.99)
    """
    step = checked_step(step)
    check_flag("fused", fused)
    queries = sum(new for new, _ in step)
    alike = Counter(step).items()  # sequences of one length are one product
    keys = sum(count * visible_keys(*pair, spec) for pair, count in alike)
    if fused:
        pairs = sum(count * visible_pairs(*pair, spec) for pair, count in alike)
        return attention_cost(spec, queries, pairs, keys, kv_dtype, activation_dtype)
    # the whole rectangle of scores goes out and back twice
    pairs = sum(count * pair[0] * visible_keys(*pair, spec) for pair, count in alike)
    scores = 2 * size_bytes(spec.num_q_heads * pairs, activation_dtype)
    whole = attention_cost(spec, queries, pairs, keys, kv_dtype, activation_dtype)
    return Cost(whole.flop, whole.read_bytes + scores, whole.written_bytes + scores)


def attention_cost(
    spec: Attention,
    queries: int,
    pairs: int,
    keys: int,
    kv_dtype: str = "bf16",
    activation_dtype: str = "bf16",
) -> Cost:
    """Return the cost of fused attention by its sums: new tokens, (query, key) pairs, keys read.

    >>> spec = Attention(32, 8, 128)
    >>> attention_cost(spec, 2, 30, 30) == attention(spec, [(1, 9), (1, 19)])
    True
    """
    out = size_bytes(queries * spec.num_q_heads * spec.value_dim, activation_dtype)
    read = size_bytes(queries * spec.num_q_heads * spec.head_dim, activation_dtype)
    return Cost(spec.flop_per_pair * pairs, read + size_bytes(keys * spec.kv_width, kv_dtype), out)


def visible_pairs(new: int, cached: int, spec: Attention | LatentAttention) -> int:
    """Return the pairs of one sequence within window, chunk and the most keys of a query.

    >>> visible_pairs(4, 2, Attention(32, 8, 128, window=3))
    12
    """
    return min(
        causal_pairs(new, cached, spec.window, spec.chunked),
        causal_pairs(new, cached, spec.top_tokens),  # the newest or the best: as many pairs
    )


def visible_keys(new: int, cached: int, spec: Attention | LatentAttention) -> int:
    """Return the keys that one sequence reads.

    >>> visible_keys(4, 2, Attention(32, 8, 128, window=3))
    6
    """
    seen = keys_read(new, cached, spec.window, spec.chunked)
    return seen if spec.top_tokens is None else min(seen, new * spec.top_tokens)


def latent_attention(
    spec: LatentAttention,
    step: Step,
    kv_dtype: str = "bf16",
    activation_dtype: str = "bf16",
) -> Cost:
    """Return the cost of one layer's latent attention, for each sequence the cheaper way.

    Absorbed: queries are moved into the latent space, so a pair costs the width of the latent
    twice, for every head. Expanded: the cached latents are multiplied by ``kv_b_proj`` again and a
    pair costs a head's widths. Both start from the product of the new tokens with ``kv_b_proj``,
    which the step counts as a matrix. The least FLOP decides per sequence: absorbed in decoding,
    expanded in long prefills.

    Parameters and errors: as ``attention``.
    Source: DeepSeek-AI (2024), "DeepSeek-V2", section 2.1.

    >>> deepseek = LatentAttention(128, 512, 128, 64, 128, q_lora_rank=1536)
    >>> decode = latent_attention(deepseek, [(1, 4095)])
    >>> decode.flop == 4096 * deepseek.absorbed_flop_per_pair, round(decode.intensity)
    (True, 238)
    """
    flop = keys = queries = 0
    for new, cached in checked_step(step):
        pairs, seen = visible_pairs(new, cached, spec), visible_keys(new, cached, spec)
        flop += latent_flop(spec, new, pairs, seen)
        keys, queries = keys + seen, queries + new
    return latent_cost(spec, flop, queries, keys, kv_dtype, activation_dtype)


def latent_flop(spec: LatentAttention, new: int, pairs: int, keys: int) -> int:
    """Return the FLOP of one sequence's latent attention, absorbed or expanded: the fewer.

    >>> deepseek = LatentAttention(128, 512, 128, 64, 128, q_lora_rank=1536)
    >>> latent_flop(deepseek, 1, 4096, 4096) == 4096 * deepseek.absorbed_flop_per_pair
    True
    """
    expanded = pairs * spec.expanded_flop_per_pair
    expanded += max(keys - new, 0) * spec.expansion_flop_per_token
    return min(pairs * spec.absorbed_flop_per_pair, expanded)


def latent_cost(
    spec: LatentAttention,
    flop: int,
    queries: int,
    keys: int,
    kv_dtype: str = "bf16",
    activation_dtype: str = "bf16",
) -> Cost:
    """Return the cost of latent attention by its sums: FLOP, new tokens, keys read.

    >>> deepseek = LatentAttention(128, 512, 128, 64, 128, q_lora_rank=1536)
    >>> latent_cost(deepseek, 0, 1, 4096).read_bytes == 2 * (4096 * 576 + 128 * 192)
    True
    """
    head = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    read = size_bytes(queries * spec.num_q_heads * head, activation_dtype)
    written = size_bytes(queries * spec.num_q_heads * spec.v_head_dim, activation_dtype)
    return Cost(flop, read + size_bytes(keys * spec.kv_width, kv_dtype), written)


def index(
    spec: Indexer,
    step: Step,
    kv_dtype: str = "bf16",
    activation_dtype: str = "bf16",
) -> Cost:
    """Return the cost of scoring every key for every query with the small heads of an indexer.

    Parameters and errors: as ``attention``.

    >>> index(Indexer(64, 128, ()), [(1, 4095)]).flop == 2 * 64 * 128 * 4096
    True
    """
    step = checked_step(step)
    pairs = sum(causal_pairs(new, cached) for new, cached in step)
    queries = sum(new for new, _ in step)
    keys = sum(new + cached for new, cached in step)
    return index_cost(spec, queries, pairs, keys, kv_dtype, activation_dtype)


def index_cost(
    spec: Indexer,
    queries: int,
    pairs: int,
    keys: int,
    kv_dtype: str = "bf16",
    activation_dtype: str = "bf16",
) -> Cost:
    """Return the cost of an indexer by its sums: new tokens, (query, key) pairs, keys read.

    >>> spec = Indexer(64, 128, ())
    >>> index_cost(spec, 2, 30, 30) == index(spec, [(1, 9), (1, 19)])
    True
    """
    read = size_bytes(queries * spec.num_heads * spec.head_dim, activation_dtype)
    return Cost(spec.flop_per_pair * pairs, read + size_bytes(keys * spec.head_dim, kv_dtype), 0)


def recurrence(state: RecurrentState, step: Step) -> Cost:
    """Return the cost of carrying the state of every sequence through its new tokens.

    The state is read and written once per sequence and step, however many tokens it takes in; the
    work is `RecurrentState.flop_per_token` for each. Weights of the convolution and what passes
    between it and the matrices stay on the chip.

    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> state = RecurrentState("mamba", (), 8192, 4, 8192 * 16)
    >>> recurrence(state, [(1, 500), (1, 9)]).read_bytes == 2 * state.state_bytes
    True
    """
    step = checked_step(step)
    return recurrence_cost(state, sum(new for new, _ in step), len(step))


def recurrence_cost(state: RecurrentState, tokens: int, sequences: int) -> Cost:
    """Return the cost of recurrent state by its sums: new tokens, and sequences that have any.

    >>> state = RecurrentState("mamba", (), 8192, 4, 8192 * 16)
    >>> recurrence_cost(state, 7, 2) == recurrence(state, [(3, 0), (4, 9)])
    True
    """
    moved = sequences * state.state_bytes
    return Cost(tokens * state.flop_per_token, moved, moved)


def kv_append(
    spec: Attention | LatentAttention | CrossAttention,
    new_tokens: int,
    kv_dtype: str = "bf16",
    activation_dtype: str = "bf16",
) -> Cost:
    """Return the cost of storing what new tokens leave in the cache of one layer.

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
