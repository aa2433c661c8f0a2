"""Exercises of chapter 5: shares of a cache that hold tokens, and slots that hold none."""

import random
from collections.abc import Sequence
from functools import cache

from servelab import hardware, models, roofline
from servelab.allocation import fragmentation, lengths
from servelab.check.exercise import Exercise, Number, Wrong
from servelab.check.function import Function
from servelab.paging.pool import PoolShape

_BATCHES = {"max": 7, "paged": 35}  # that run at once, of the chapter's first figure


@cache
def _live(short: bool = False) -> float:
    """Return the mean length of a running sequence."""
    traffic = lengths.short_instructions() if short else lengths.sharegpt()
    return sum(t * weight for t, weight in enumerate(lengths.live_lengths(traffic)))


def _share(longest: int) -> float:
    slots = fragmentation.paper_tokens()
    return 100 * (slots // longest) * _live() / slots


@cache
def _largest_block() -> int:
    short = lengths.live_lengths(lengths.short_instructions())
    return max(b for b in range(1, 64) if lengths.fill(short, b) > 0.96)


def _rate(batch: int) -> float:
    """Return the tokens per second of a decode step at best."""
    opt, a100 = models.get("opt-13b"), hardware.get("a100-sxm-40gb")
    step = [(1, round(_live()) - 1)] * batch
    cost = roofline.step_cost(opt, step, weight_dtype="fp16", kv_dtype="fp16")
    return batch / roofline.time_bound(cost, a100, "fp16").seconds


def _gain() -> float:
    return _rate(_BATCHES["paged"]) / _rate(_BATCHES["max"])


def waste(lengths: Sequence[int], block_size: int) -> float:
    """Return the share of the slots in held blocks that hold no token."""
    shape = PoolShape(num_blocks=2, block_size=block_size)
    held = sum(shape.blocks_for(t) for t in lengths) * block_size
    return 1 - sum(lengths) / held


def _waste_inputs(rng: random.Random) -> tuple[object, ...]:
    size = rng.choice([1, 4, 8, 16, 32])
    some = [rng.choice([size * rng.randint(1, 9), rng.randint(1, 200)]) for _ in range(6)]
    return some[: rng.randint(1, 6)], size


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "5.1",
        "A longer context",
        "Which share of the cache holds tokens under max if the longest context is 4,096?",
        "percent of the cache",
        lambda: _share(4096),
        0.03,
        (
            Wrong(
                "2,048",
                lambda: _share(2048),
                "That is the share for a longest context of 2,048.",
            ),
            Wrong(
                "half of a region",
                lambda: 100 * _live() / 4096,
                "That is the share of one region that is used. Not all of the cache is regions: "
                "what is left over is too short for another.",
            ),
            Wrong(
                "requests grow with the limit",
                lambda: 2 * _share(4096),
                "What runs is as long as before; only what is reserved for it has doubled.",
            ),
            Wrong(
                "all that is reserved",
                lambda: (
                    100
                    * (fragmentation.paper_tokens() // 4096)
                    * 4096
                    / fragmentation.paper_tokens()
                ),
                "That is what is reserved. Most of a region never holds a token.",
            ),
        ),
        minutes=12,
        tests="reserved against used, and what a longer allowed context costs",
    ),
    Number(
        "5.2",
        "The largest block",
        "Which is the largest block size whose waste stays under 4 % for the short traffic, "
        "exactly?",
        "slots",
        _largest_block,
        0.0,
        (
            Wrong(
                "a power of two",
                8,
                "The largest power of two, or what a mean length rounded down gives. Any size will "
                "do here, and the mean is a little longer than it prints.",
            ),
            Wrong(
                "a full block wasted",
                lambda: int(_live(short=True) / 24) + 1,
                "That counts a whole block less one slot as wasted. On average it is half of that.",
            ),
            Wrong(
                "vLLM's",
                16,
                "That is the usual size; it wastes more than 4 % of so short sequences.",
            ),
        ),
        minutes=10,
        tests="the waste inside blocks as a function of their size",
    ),
    Number(
        "5.3",
        "Five times the batch",
        "OPT-13B on an A100 decodes 35 sequences at once instead of 7, each at the mean length: by "
        "what factor do the tokens per second grow at best?",
        "times",
        _gain,
        0.02,
        (
            Wrong(
                "the batch",
                5,
                "That is the batch. A step that reads five times the cache takes longer.",
            ),
            Wrong(
                "the step time",
                lambda: 5 / _gain(),
                "That is by how much the step gets longer. Five times the tokens come out of it.",
            ),
            Wrong("nothing", 1, "Weights are read once per step, whatever the batch."),
            Wrong(
                "the other way round",
                lambda: 1 / _gain(),
                "That is the other way round: 7 sequences over 35.",
            ),
        ),
        minutes=12,
        tests="why throughput grows less than the batch",
    ),
    Function(
        "5.4",
        "Waste inside blocks",
        "Write the share of the slots in held blocks that hold no token.",
        _waste_inputs,
        waste,
        (
            Wrong(
                "always one more block",
                lambda lengths, size: (
                    1 - sum(lengths) / sum((t // size + 1) * size for t in lengths)
                ),
                "Off by one at a block boundary: a sequence that ends with its block holds no "
                "further one.",
            ),
            Wrong(
                "whole blocks only",
                lambda lengths, size: 1 - sum(lengths) / (sum(t // size for t in lengths) * size),
                "You round down. The last block is held too, however little is in it.",
            ),
            Wrong(
                "of the tokens",
                lambda lengths, size: sum(-t % size for t in lengths) / sum(lengths),
                "You divide by the tokens. The share is of the slots that are held.",
            ),
            Wrong(
                "one table for all",
                lambda lengths, size: 1 - sum(lengths) / (-(-sum(lengths) // size) * size),
                "You fill blocks with tokens of several sequences. Each sequence has its own.",
            ),
            Wrong(
                "half a block each",
                lambda lengths, size: (
                    len(lengths) * (size - 1) / 2 / (sum(lengths) + len(lengths) * (size - 1) / 2)
                ),
                "That is the expected waste, (b - 1)/2 a sequence. These lengths are known.",
            ),
            Wrong(
                "mean of shares",
                lambda lengths, size: (
                    sum(1 - t / (-(-t // size) * size) for t in lengths) / len(lengths)
                ),
                "You average the shares of the sequences. Numerator and denominator are sums over "
                "all of them.",
            ),
            Wrong(
                "the share used",
                lambda lengths, size: 1 - waste(lengths, size),
                "That is the share that holds tokens.",
            ),
        ),
        minutes=12,
        tests="internal fragmentation, and the block at a boundary",
    ),
)
