"""Exercises of chapter 6: slots, gathered copies, merged splits, attention through a table."""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from servelab import models, roofline
from servelab.check.exercise import Exercise, Number, Wrong
from servelab.check.function import Function
from servelab.check.pictures import slot_grid
from servelab.paging import BlockPool, BlockTable

Part = tuple[float, float, float]  # largest score, own sum, mean


def _ratio(copies: float = 2.0, kv_heads: int = 8) -> float:
    """Return the traffic of a step with gathered caches over that in place."""
    llama = models.get("llama-3-8b")
    moved = roofline.step_cost(llama, [(1, 8191)] * 8).bytes
    return (moved + copies * 8 * llama.sequence_bytes(8192) * kv_heads / 8) / moved


def slots(block_table: Sequence[int], block_size: int, start: int, stop: int) -> list[int]:
    """Return the slot of each token position from start to before stop."""
    return [
        block_table[place // block_size] * block_size + place % block_size
        for place in range(start, stop)
    ]


def merge(parts: Sequence[Part]) -> float:
    """Return the mean over all splits, from each one's largest score, own sum and mean."""
    top = max(largest for largest, _, _ in parts)
    weights = [math.exp(largest - top) * own for largest, own, _ in parts]
    pairs = zip(weights, parts, strict=True)
    return sum(weight * mean for weight, (_, _, mean) in pairs) / sum(weights)


def _colleague(parts: Sequence[Part]) -> float:
    return sum(own * mean for _, own, mean in parts) / sum(own for _, own, _ in parts)


def _half_scaled(parts: Sequence[Part]) -> float:
    top = max(largest for largest, _, _ in parts)
    scaled = sum(math.exp(largest - top) * own * mean for largest, own, mean in parts)
    return scaled / sum(own for _, own, _ in parts)


def _sums_left_out(parts: Sequence[Part]) -> float:
    return merge([(largest, 1.0, mean) for largest, _, mean in parts])


def _not_shifted(parts: Sequence[Part]) -> float:
    weights = [math.exp(largest) * own for largest, own, _ in parts]
    return sum(w * p[2] for w, p in zip(weights, parts, strict=True)) / sum(weights)


def _overflown(parts: Sequence[Part]) -> float:
    """Return the same as an array does it, where what Python refuses is inf or nan."""
    try:
        return _not_shifted(parts)
    except (OverflowError, ZeroDivisionError):
        return math.nan


def _past(rng: random.Random, block_size: int, tokens: int) -> list[int]:
    """Return the block table of a sequence in a pool that has a past."""
    needed = -(-tokens // block_size)
    pool = BlockPool(num_blocks=1 + needed + rng.randint(0, 4), block_size=block_size)
    tables = [BlockTable(pool) for _ in range(pool.num_free)]
    for table in tables:
        table.append(1)
    rng.shuffle(tables)
    for table in tables:
        table.free()
    own = BlockTable(pool)
    own.append(tokens)
    return list(own.blocks)


def _slots_inputs(rng: random.Random) -> tuple[object, ...]:
    size, tokens = rng.choice([1, 2, 4, 5, 8]), rng.randint(1, 40)
    start = rng.randint(0, tokens - 1)
    stop = rng.choice([tokens, rng.randint(start + 1, tokens)])
    return _past(rng, size, tokens), size, start, stop


def _merge_inputs(rng: random.Random) -> tuple[object, ...]:
    wide = rng.choice([0.1, 5.0, 900.0])
    return (
        [
            (rng.uniform(-wide, wide), rng.uniform(1, 60), rng.uniform(-2, 2))
            for _ in range(rng.randint(2, 6))
        ],
    )


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Sequence[int],
    block_size: int,
    context_len: int,
) -> Tensor:
    """Return what one query token, (H, d), reads through its block table: (H, d)."""
    return _attend(query, keys, values, slots(block_table, block_size, 0, context_len))


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Sequence[int],
    scale: float | None = None,
    interleaved: bool = False,
) -> Tensor:
    group = query.shape[0] // keys.shape[1]
    k, v = keys[list(places)], values[list(places)]  # (t, K, d)
    if interleaved:
        k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)  # (t, H, d)
    else:
        k, v = (one.repeat_interleave(group, dim=1) for one in (k, v))  # (t, H, d)
    scores = torch.einsum("hd,thd->ht", query, k)  # (H, t)
    weights = (scores * (query.shape[1] ** -0.5 if scale is None else scale)).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)  # (H, d)


def _attention_inputs(rng: random.Random) -> tuple[object, ...]:
    torch_rng = torch.Generator().manual_seed(rng.randrange(2**31))
    size, context = rng.choice([2, 4, 5]), rng.randint(2, 19)
    kv_heads, group, width = rng.choice([2, 3]), rng.choice([2, 4]), rng.choice([4, 6])
    table = _past(rng, size, context)

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch_rng)

    pool = ((max(table) + 1) * size, kv_heads, width)  # every slot holds something
    query = random_tensor(group * kv_heads, width)
    return query, random_tensor(*pool), random_tensor(*pool), table, size, context


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "6.1",
        "Gathered or in place",
        "Eight sequences of Llama-3-8B decode at context 8,192 on an A100: by what factor is a "
        "step longer if every cache is gathered into a copy first?",
        "times",
        _ratio,
        0.01,
        (
            Wrong(
                "copy written, not read",
                lambda: _ratio(1),
                "A copy is two passes more than reading in place: it is written, and read again.",
            ),
            Wrong(
                "attention alone",
                3,
                "That is attention alone, three passes for one. The step reads weights too.",
            ),
            Wrong(
                "three more passes",
                lambda: _ratio(3),
                "Reading in place is one of the three passes, so the copy adds two.",
            ),
            Wrong(
                "GQA ignored",
                lambda: _ratio(2, 32),
                "That copies 32 heads. The cache holds 8 KV heads.",
            ),
        ),
        minutes=12,
        tests="the traffic of a gathered copy, within a whole step",
    ),
    Number(
        "6.2",
        "Empty slots",
        "64 sequences at context 2,100 in blocks of 256 slots: how many slots that are held hold "
        "no token?",
        "slots",
        lambda: 64 * (9 * 256 - 2100),
        0.0,
        (
            Wrong("one sequence", 204, "That is one sequence."),
            Wrong(
                "the filled part",
                64 * 52,
                "That is what the last blocks do hold. Asked for is the rest of them.",
            ),
            Wrong("a whole block each", 64 * 256, "The last block of each is not quite empty."),
            Wrong(
                "the expected waste",
                64 * 255 // 2,
                "That is half a block each, the expected waste. This length is known.",
            ),
        ),
        minutes=6,
        tests="the last block of a table",
    ),
    Function(
        "6.3",
        "Merge splits",
        "Write the merge of partial attention results, each with its largest score, the sum of its "
        "exponentials relative to that, and its mean.",
        _merge_inputs,
        merge,
        (
            Wrong(
                "the colleague's",
                _colleague,
                "That is the colleague's: each sum is relative to its own largest score. Bring "
                "them to a common one first.",
            ),
            Wrong(
                "sums not brought along",
                _half_scaled,
                "You bring the numerator to a common largest score, not the denominator.",
            ),
            Wrong(
                "sums left out",
                _sums_left_out,
                "You leave out how many keys, and how heavy, each split has: its own sum.",
            ),
            Wrong(
                "mean of means",
                lambda parts: sum(mean for _, _, mean in parts) / len(parts),
                "You average the means. A split with high scores weighs more.",
            ),
            Wrong(
                "not shifted",
                _not_shifted,
                "Right on paper. Scores of several hundred overflow exp: subtract the largest "
                "first.",
            ),
            Wrong(
                "not shifted, in arrays",
                _overflown,
                "Right on paper. Of scores of several hundred an array's exp is inf or 0, and the "
                "quotient nan: subtract the largest first.",
            ),
        ),
        tolerance=1e-3,  # a tensor of them is float32 by default
        minutes=15,
        tests="the online softmax, and why its largest score travels with it",
    ),
    Function(
        "6.4",
        "Slot mapping",
        "Write the slot of each token position from start to before stop.",
        _slots_inputs,
        slots,
        (
            Wrong(
                "off by one at a block boundary",
                lambda table, size, start, stop: [
                    table[max(i - 1, 0) // size] * size + i % size for i in range(start, stop)
                ],
                "Off by one at a block boundary: the first token of a block still goes to the "
                "block before. Positions count from 0.",
            ),
            Wrong(
                "no table",
                lambda table, size, start, stop: list(range(start, stop)),
                "You return positions. The table says which block holds them.",
            ),
            Wrong(
                "position for offset",
                lambda table, size, start, stop: [
                    table[i // size] * size + i for i in range(start, stop)
                ],
                "You add the position to the block's first slot. Add its place inside the block.",
            ),
            Wrong(
                "block for slot",
                lambda table, size, start, stop: [
                    table[i // size] + i % size for i in range(start, stop)
                ],
                "Block n begins at slot n times the block size.",
            ),
            Wrong(
                "first block alone",
                lambda table, size, start, stop: [table[0] * size + i for i in range(start, stop)],
                "You go on from the first block. The next block of the table may be anywhere.",
            ),
            Wrong(
                "stop included",
                lambda table, size, start, stop: slots(table, size, start, stop + 1),
                "You include stop.",
            ),
        ),
        picture=slot_grid,
        minutes=10,
        tests="from a position through the table to a slot",
    ),
    Function(
        "6.5",
        "Attention through a table",
        "Write the attention of one query token whose keys and values lie in a pool, found through "
        "its block table.",
        _attention_inputs,
        paged_attention,
        (
            Wrong(
                "to the end of the last block",
                lambda q, k, v, table, size, t: _attend(
                    q, k, v, slots(table, size, 0, len(table) * size)
                ),
                "You attend to all slots of the last block. Behind the context lies what somebody "
                "else left.",
            ),
            Wrong(
                "not to itself",
                lambda q, k, v, table, size, t: _attend(q, k, v, slots(table, size, 0, t - 1)),
                "One key too few: the new token's own key is in the cache, and it attends to it.",
            ),
            Wrong(
                "no table",
                lambda q, k, v, table, size, t: _attend(q, k, v, range(t)),
                "You read the first slots of the pool. The table says where this sequence's are.",
            ),
            Wrong(
                "no scale",
                lambda q, k, v, table, size, t: _attend(
                    q, k, v, slots(table, size, 0, t), scale=1.0
                ),
                "The scores are not scaled: divide by the square root of head_dim.",
            ),
            Wrong(
                "scaled by head_dim",
                lambda q, k, v, table, size, t: _attend(
                    q, k, v, slots(table, size, 0, t), scale=1 / q.shape[1]
                ),
                "You divide the scores by head_dim, not by its square root.",
            ),
            Wrong(
                "heads interleaved",
                lambda q, k, v, table, size, t: _attend(
                    q, k, v, slots(table, size, 0, t), interleaved=True
                ),
                "Query head h reads KV head h // group, not h % num_kv_heads: neighbours share.",
            ),
        ),
        tolerance=1e-6,
        trials=16,
        minutes=25,
        tests="paged attention: the table, the context's end, the groups of heads",
    ),
)
