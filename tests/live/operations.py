"""One thousand random operations on a pool: every event, and what is refused.

Run as it is in CPython and in the browser's Python; ends with the JSON text of the events.
"""

import json
import random

from servelab.paging import BlockPool, BlockTable, OutOfBlocks, PrefixCache

OPERATIONS = 1000
dice = random.Random(6)
events: list[str] = []
pool = BlockPool(num_blocks=24, block_size=4, sink=lambda event: events.append(repr(event)))
cache = PrefixCache(pool)
tables: list[tuple[BlockTable, list[int]]] = []


def start() -> None:
    tokens = [dice.randrange(3) for _ in range(dice.randint(1, 20))]
    table = BlockTable(pool)
    hit = cache.lookup(tokens)
    table.append(len(tokens) - hit.num_tokens, hit)
    cache.publish(table, tokens)
    tables.append((table, tokens))


def append(place: int) -> None:
    table, tokens = tables[place]
    new = [dice.randrange(3) for _ in range(dice.randint(1, 5))]
    table.append(len(new))
    tokens += new
    cache.publish(table, tokens)


def fork(place: int) -> None:
    table, tokens = tables[place]
    tables.append((table.fork(), list(tokens)))


def truncate(place: int) -> None:
    table, tokens = tables[place]
    kept = dice.randint(0, len(tokens))
    table.truncate(kept)
    del tokens[kept:]


def free(place: int) -> None:
    table, _ = tables.pop(place)
    table.free()


for _ in range(OPERATIONS):
    act = dice.choice([start, append, append, fork, truncate, free]) if tables else start
    try:
        act() if act is start else act(dice.randrange(len(tables)))
    except OutOfBlocks as full:
        events.append(f"refused: {full}")
    held = [block for table, _ in tables for block in table.blocks]
    assert pool.refs == [held.count(block) for block in range(24)]
    assert sorted({*pool.free_order(), *held}) == list(range(1, 24))
json.dumps(events)
