"""How much of the prompts a cache of so many blocks would have held, without serving them.

Models: prompts one after another as a trace names their blocks, each needing all of its blocks at
once; a hit is a block found with all before it. Two policies, both of which evict what was used
least recently: a plain one, and the engine's own, by its own pool and prefix cache.

Assumes: a block's id stands for its tokens and all before them, as Mooncake's do.

Ignores: prompts that run at the same time, the blocks of the answers, and all time.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

from servelab.paging import BlockPool, BlockTable, PrefixCache
from servelab.simulation.traces import Trace
from servelab.units import check_count


def plain_hit_rate(trace: Trace, num_blocks: int | None = None) -> float:
    """Return the share of all blocks found in a cache of ``num_blocks`` (None: without end).

    Every id counts, that of a partial last block too. A prompt uses all its blocks at once; then
    the least recently used are evicted, of a prompt larger than the cache its first.
    Raises: ``ValueError`` for a trace that names no blocks.
    """
    asked = _asked(trace)
    limit = asked if num_blocks is None else check_count("num_blocks", num_blocks)
    held: OrderedDict[int, None] = OrderedDict()  # least recently used first
    hits = 0
    for arrival in trace.arrivals:
        hits += len(list(takewhile(held.__contains__, arrival.block_ids)))
        for block in arrival.block_ids:
            held[block] = None
            held.move_to_end(block)
        for _ in range(len(held) - limit):
            held.popitem(last=False)
    return hits / asked


def engine_hit_rate(trace: Trace, num_blocks: int) -> float:
    """Return the share of all blocks that the engine's prefix cache finds in such a pool.

    Only full blocks are cached, and of a prompt that is cached to its end the last block is
    computed again; the blocks of a prompt are held until it is done, and its end is evicted first.

    Parameters: ``num_blocks`` of the pool, null block apart.
    Raises: ``ValueError`` for a trace that names no blocks; ``OutOfBlocks`` for a prompt that is
    larger than the pool.
    """
    asked, hits = _asked(trace), 0
    # One "token" stands for a block: the pool's arithmetic is that of whole blocks.
    pool = BlockPool(check_count("num_blocks", num_blocks) + 1, block_size=1)
    cache = PrefixCache(pool)
    for arrival in trace.arrivals:
        blocks = arrival.block_ids
        if not blocks:
            continue
        hit, table = cache.lookup(blocks), BlockTable(pool)
        hits += hit.num_tokens
        table.append(len(blocks) - hit.num_tokens, hit)
        cache.publish(table, blocks, arrival.prompt_tokens // trace.block_tokens)
        table.free()
    return hits / asked


def _asked(trace: Trace) -> int:
    """Return the blocks of all prompts."""
    asked = sum(len(arrival.block_ids) for arrival in trace.arrivals)
    if not asked:
        raise ValueError(f"{trace.name} does not tell which blocks its prompts share")
    return asked
