"""Paged attention on a GPU, in three Triton kernels: store, attend, merge.

Models: one layer's cache as a long row of slots, each with the keys (or values) of all KV heads of
one token: element d of KV head k in slot s is number (s K + k) head_dim + d. A block table turns
the position of a token into its slot, as ``paging.BlockTable`` does; nothing is ever gathered into
a contiguous copy. Scores never leave the chip: the softmax is computed online, a tile of keys at a
time, with a running maximum and a running sum (Milakov and Gimelshein 2018; Dao et al. 2022). A
long context is split between programs, which leave partial results to be merged (Dao et al. 2023,
"Flash-Decoding").

Assumes: 32-bit positions, 64-bit slots: no pool is too large. A row's tokens lie end to end, its
new tokens are the last of its context, and their keys and values are stored already. A table names
a block for every position of the context; what stands behind that is not read.

Ignores: quantised caches, and the newest copy engines (TMA): plain loads of 16 bytes per thread.

Source: Kwon et al. (2023), section 4; the interpreter (``TRITON_INTERPRET=1``, before this module
is imported) runs the same kernels on a CPU.
"""

# Triton reads the annotations of a kernel itself: what is no constant has none.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

# Shapes below: N new tokens, R rows, H query heads, K KV heads, S splits, d head_dim; of one tile:
# Q lines (a line is one query token and one of the query heads that share the KV head), T keys.


@triton.jit
def store_kernel(
    keys,  # (N, K, d), a token's (K, d) contiguous
    values,  # (N, K, d)
    key_cache,  # (slots, K, d), contiguous
    value_cache,  # (slots, K, d)
    slots,  # (N,) int64
    key_stride,  # elements from one token to the next
    value_stride,
    ELEMENTS: tl.constexpr,  # K d
    TILE: tl.constexpr,  # ELEMENTS, up to a power of two
):
    """Store the keys and values of one token in its slot.

    One program per token. Traffic of a token, e bytes an element: 2 K d e and 8 (its slot) read,
    2 K d e written: that of ``roofline.kv_append``, and the slot.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    element = tl.arange(0, TILE)
    live = element < ELEMENTS
    key = tl.load(keys + token * key_stride + element, mask=live)
    value = tl.load(values + token * value_stride + element, mask=live)
    tl.store(key_cache + slot * ELEMENTS + element, key, mask=live)
    tl.store(value_cache + slot * ELEMENTS + element, value, mask=live)


# What differs from step to step is no reason to compile anew.
@triton.jit(
    do_not_specialize=[
        "block_tables",
        "query_starts",
        "context_lens",
        "first_row",
        "first_token",
        "num_splits",
        "table_width",
        "window",
    ]
)
def attend_kernel(
    q,  # (N, H, d), a token's (H, d) contiguous
    key_cache,  # (slots, K, d), contiguous
    value_cache,  # (slots, K, d)
    block_tables,  # (R, table_width) int32
    query_starts,  # (R + 1,) int32: row r is tokens query_starts[r] to query_starts[r + 1]
    context_lens,  # (R,) int32
    out,  # (N, H, d), or, where it is partial, (N - first_token, H, S, d) float32
    log_sums,  # (N - first_token, H, S) float32; not touched where out is not partial
    first_row,  # of this launch
    first_token,  # of that row
    num_splits,  # S: programs that share the keys of one tile of queries
    q_stride,  # elements from one token to the next
    table_width,
    window,  # newest keys that a query sees, itself included
    scale,  # of the scores, times log2(e): exponentials are powers of two here
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_LINES: tl.constexpr,  # Q, a power of two, at least 16 and at least GROUP
    TILE_KEYS: tl.constexpr,  # T, a power of two, at least 16; no relation to BLOCK_SIZE
    TILE_DIM: tl.constexpr,  # HEAD_DIM, up to a power of two
    DOT_DTYPE: tl.constexpr,  # of the factors of both products; sums are float32
    IS_PARTIAL: tl.constexpr,  # whether num_splits > 1
):
    """Attend with one tile of queries, of one row and one KV head, to one split of its keys.

    The query heads that share a KV head are lines of one tile: each key and value is loaded once
    for all of them. Traffic of a row with one new token that sees n keys, e bytes an element:
    2 n K d e (keys and values), H d e (q), 4 n K (its table, once per KV head and key, nearly all
    of it from the cache) read, H d e written: that of ``roofline.attention``, and the table. Where
    the keys are split, 4 S H (d + 1) are written instead, for ``merge_kernel``. A chunk of more new
    tokens than fit a tile reads the keys once for each of its tiles.
    """
    TILE_TOKENS: tl.constexpr = TILE_LINES // GROUP
    split = tl.program_id(0) % num_splits
    first_query = tl.program_id(0) // num_splits * TILE_TOKENS  # within the row
    kv_head = tl.program_id(1)
    row = first_row + tl.program_id(2)

    row_start = tl.load(query_starts + row)
    new_tokens = tl.load(query_starts + row + 1) - row_start
    if first_query >= new_tokens:
        return  # the launch has as many tiles for each row as its longest row needs
    context_len = tl.load(context_lens + row)
    first_position = context_len - new_tokens + first_query

    # The queries: line l is token l // GROUP of the tile, and head l % GROUP of the group.
    line = tl.arange(0, TILE_LINES)  # (Q)
    query = first_query + line // GROUP
    is_query = (line < TILE_TOKENS * GROUP) & (query < new_tokens)
    position = context_len - new_tokens + query
    token = (row_start + query).to(tl.int64)
    head = kv_head * GROUP + line % GROUP
    dim = tl.arange(0, TILE_DIM)  # (d)
    is_dim = dim < HEAD_DIM
    is_element = is_query[:, None] & is_dim[None, :]
    q_element = (token * q_stride + head * HEAD_DIM)[:, None] + dim[None, :]
    queries = tl.load(q + q_element, mask=is_element, other=0).to(DOT_DTYPE)  # (Q, d)

    # The keys that any of them sees, and this program's share of these, in whole tiles.
    first_key = tl.maximum(first_position - window + 1, 0)
    past_key = tl.minimum(first_position + TILE_TOKENS, context_len)
    share = tl.cdiv(tl.cdiv(past_key - first_key, num_splits), TILE_KEYS) * TILE_KEYS
    begin = first_key + split * share
    end = tl.minimum(begin + share, past_key)

    # The largest score so far; finite, so that a line that has seen no key yet gives no NaN.
    largest = tl.full([TILE_LINES], -1e30, tl.float32)  # (Q)
    total = tl.zeros([TILE_LINES], tl.float32)  # (Q), of the weights 2^(score - largest)
    mean = tl.zeros([TILE_LINES, TILE_DIM], tl.float32)  # (Q, d), the values times their weights
    table = block_tables + row.to(tl.int64) * table_width
    for tile_start in range(begin, end, TILE_KEYS):
        key_position = tile_start + tl.arange(0, TILE_KEYS)  # (T)
        is_key = key_position < end
        block = tl.load(table + key_position // BLOCK_SIZE, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key_position % BLOCK_SIZE
        element = ((slot * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dim[None, :]  # (T, d)
        # What is no key of this row is never read, and counts as 0, not as whatever stands there: a
        # score is replaced below, but a value is multiplied by a weight of 0, and 0 NaN is NaN.
        is_loaded = is_key[:, None] & is_dim[None, :]
        keys = tl.load(key_cache + element, mask=is_loaded, other=0).to(DOT_DTYPE)
        values = tl.load(value_cache + element, mask=is_loaded, other=0).to(DOT_DTYPE)

        scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * scale  # (Q, T)
        age = position[:, None] - key_position[None, :]  # 0: the query's own key
        is_seen = is_key[None, :] & (age >= 0) & (age < window)
        scores = tl.where(is_seen, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])  # (Q, T), 0 where not seen
        shrink = tl.exp2(largest - new_largest)  # what the old maximum was too small by
        total = total * shrink + tl.sum(weights, 1)
        mean = mean * shrink[:, None]
        mean = tl.dot(weights.to(DOT_DTYPE), values, mean, input_precision="tf32x3")
        largest = new_largest

    total = tl.where(total > 0, total, 1)  # a line that saw no key here leaves zeros ...
    mean = mean / total[:, None]
    if IS_PARTIAL:
        # ... and a log-sum of -1e30, with which they will weigh nothing.
        vector = (token - first_token) * (NUM_KV_HEADS * GROUP) + head
        vector = vector * num_splits + split
        tl.store(log_sums + vector, largest + tl.log2(total), mask=is_query)
    else:
        vector = token * (NUM_KV_HEADS * GROUP) + head
    out_element = (vector * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(out + out_element, mean.to(out.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial,  # (N, H, S, d) float32
    log_sums,  # (N, H, S) float32
    out,  # (N, H, d)
    num_splits,  # S
    HEAD_DIM: tl.constexpr,
    TILE_SPLITS: tl.constexpr,  # S, up to a power of two
    TILE_DIM: tl.constexpr,  # HEAD_DIM, up to a power of two
):
    """Merge the splits of one token and head: their means, weighted by the sums behind them.

    Traffic, e bytes an element of the result: 4 S (d + 1) read, d e written.
    """
    vector = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, TILE_SPLITS)  # (S)
    dim = tl.arange(0, TILE_DIM)  # (d)
    is_split, is_dim = split < num_splits, dim < HEAD_DIM
    index = vector * num_splits + split
    log_sum = tl.load(log_sums + index, mask=is_split, other=float("-inf"))
    weights = tl.exp2(log_sum - tl.max(log_sum, 0))  # (S)
    element = (index * HEAD_DIM)[:, None] + dim[None, :]
    means = tl.load(partial + element, mask=is_split[:, None] & is_dim[None, :], other=0)  # (S, d)
    mean = tl.sum(means * weights[:, None], 0) / tl.sum(weights, 0)  # (d)
    tl.store(out + vector * HEAD_DIM + dim, mean.to(out.dtype.element_ty), mask=is_dim)


#: Whether the kernels above are interpreted: decided once, when they were decorated.
INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)

#: What both products multiply, by the dtype of the queries. The interpreter multiplies the bits of
#: bfloat16 as if they were integers (triton-lang/triton issue 11584), hence float32 there.
DOT_DTYPES = {
    dtype: tl.float32 if INTERPRETED else getattr(tl, dtype)
    for dtype in ("float32", "float16", "bfloat16")
}
