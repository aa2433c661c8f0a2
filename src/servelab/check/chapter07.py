"""Exercises of chapter 7: copies on write, keys of prefixes, and what a hit is worth."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence

from servelab import hardware, models, roofline
from servelab.check.exercise import Exercise, Number, Wrong
from servelab.check.function import Function
from servelab.paging import BlockPool, BlockTable
from servelab.roofline import Bound

Key = Callable[[str | None, Sequence[int]], str]
Appended = tuple[list[int], list[tuple[int, int]]]


def _copies(samples: int, prompt: int, output: int, block_size: int) -> int:
    pool = BlockPool(num_blocks=9999, block_size=block_size)
    tables = [BlockTable(pool)]
    tables[0].append(prompt)
    tables += [tables[0].fork() for _ in range(samples - 1)]
    return sum(len(table.append(1)) for _ in range(output - 1) for table in tables)


def _bound(step: list[tuple[int, int]]) -> Bound:
    cost = roofline.step_cost(models.get("qwen3-8b"), step)
    return roofline.time_bound(cost, hardware.get("h100-sxm-80gb"), "bf16")


def _faster() -> float:
    return _bound([(8192, 0)]).seconds / _bound([(80, 8112)]).seconds


def _less_work() -> float:
    cold, warm = _bound([(8192, 0)]), _bound([(80, 8112)])
    return cold.compute_seconds / warm.compute_seconds


def append_token(
    table: Sequence[int],
    num_tokens: int,
    block_size: int,
    refs: Mapping[int, int],
    free: Sequence[int],
) -> Appended:
    """Return a table with room for one token more, and the blocks to copy first."""
    if num_tokens % block_size == 0:
        return [*table, free[0]], []
    if refs[table[-1]] > 1:
        return [*table[:-1], free[0]], [(table[-1], free[0])]
    return list(table), []


def _never_copies(
    table: Sequence[int], tokens: int, size: int, refs: Mapping[int, int], free: Sequence[int]
) -> Appended:
    return append_token(table, tokens, size, dict.fromkeys(refs, 1), free)


def _always_copies(
    table: Sequence[int], tokens: int, size: int, refs: Mapping[int, int], free: Sequence[int]
) -> Appended:
    return append_token(table, tokens, size, dict.fromkeys(refs, 2), free)


def _copies_full(
    table: Sequence[int], tokens: int, size: int, refs: Mapping[int, int], free: Sequence[int]
) -> Appended:
    if tokens % size == 0 and refs[table[-1]] > 1:
        return [*table[:-1], *free[:2]], [(table[-1], free[0])]
    return append_token(table, tokens, size, refs, free)


def _boundary(
    table: Sequence[int], tokens: int, size: int, refs: Mapping[int, int], free: Sequence[int]
) -> Appended:
    if tokens % size == size - 1:
        return [*table, free[0]], []
    if refs[table[-1]] > 1:
        return [*table[:-1], free[0]], [(table[-1], free[0])]
    return list(table), []


def _copies_all(
    table: Sequence[int], tokens: int, size: int, refs: Mapping[int, int], free: Sequence[int]
) -> Appended:
    if tokens % size and refs[table[-1]] > 1:
        shared = [block for block in table if refs[block] > 1]
        new = dict(zip(shared, free, strict=False))
        return [new.get(block, block) for block in table], list(new.items())
    return append_token(table, tokens, size, refs, free)


def _swapped(
    table: Sequence[int], tokens: int, size: int, refs: Mapping[int, int], free: Sequence[int]
) -> Appended:
    blocks, copies = append_token(table, tokens, size, refs, free)
    return blocks, [(there, here) for here, there in copies]


def _append_inputs(rng: random.Random) -> tuple[object, ...]:
    """Return the state of a real pool after forks and writes."""
    size = rng.choice([2, 3, 4])
    pool = BlockPool(num_blocks=40, block_size=size)
    tables = [BlockTable(pool)]
    tables[0].append(rng.randint(1, 4 * size))
    for _ in range(rng.randint(0, 3)):
        tables.append(rng.choice(tables).fork())
    for _ in range(rng.randint(0, 4)):
        rng.choice(tables).append(rng.choice([1, size]))
    table = rng.choice(tables)
    refs = {block: pool.refs[block] for one in tables for block in one.blocks}
    return list(table.blocks), table.num_tokens, size, refs, pool.free_order()[:8]


def block_keys(tokens: Sequence[int], block_size: int, key: Key) -> list[str]:
    """Return the key of each full block, every one behind its parent's."""
    keys: list[str] = []
    for end in range(block_size, len(tokens) + 1, block_size):
        keys.append(key(keys[-1] if keys else None, tokens[end - block_size : end]))
    return keys


def a_key(parent: str | None, tokens: Sequence[int]) -> str:
    """Return a key of a block of tokens behind its parent's key."""
    return hashlib.sha256(repr((parent, list(tokens))).encode()).hexdigest()[:8]


def _blocks(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[end - size : end] for end in range(size, len(tokens) + 1, size)]


def _partial_too(tokens: Sequence[int], size: int, key: Key) -> list[str]:
    keys: list[str] = []
    for start in range(0, len(tokens), size):
        keys.append(key(keys[-1] if keys else None, tokens[start : start + size]))
    return keys


def _keys_inputs(rng: random.Random) -> tuple[object, ...]:
    size = rng.choice([2, 3, 4])
    length = rng.choice([size * rng.randint(1, 5), rng.randint(1, 20)])
    return [rng.randint(0, 9) for _ in range(length)], size, a_key


def hit_tokens(prompt_tokens: int, common_tokens: int, block_size: int) -> int:
    """Return the tokens of a prompt that a prefix cache holds."""
    return min(common_tokens // block_size, (prompt_tokens - 1) // block_size) * block_size


def _hit_inputs(rng: random.Random) -> tuple[object, ...]:
    size = rng.choice([2, 4, 8, 16])
    prompt = rng.choice([size * rng.randint(1, 9), rng.randint(1, 150)])
    return prompt, rng.choice([prompt, rng.randint(0, prompt)]), size


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "7.1",
        "Copies of a block",
        "Eight samples of 256 tokens each, of a prompt of 4,100 tokens, in blocks of 16: how many "
        "blocks are copied?",
        "blocks",
        lambda: _copies(8, 4100, 256, 16),
        0.0,
        (
            Wrong(
                "the last writer copies too",
                8,
                "One too many: when the last of them writes, the count is 1, and it writes in "
                "place.",
            ),
            Wrong(
                "none",
                0,
                "That is right for 4,096 tokens, a whole number of blocks. 4,100 are not.",
            ),
            Wrong(
                "the whole prompt",
                7 * 257,
                "Full blocks are never written again, so they stay shared. Only the last, partly "
                "filled one is copied.",
            ),
            Wrong(
                "tokens",
                7 * 4,
                "Those are tokens. A copy is of a block.",
            ),
            Wrong(
                "a copy for every token",
                7 * 255,
                "Once a sample has its own last block, it writes there without copying.",
            ),
        ),
        minutes=10,
        tests="when a block is copied, and by whom",
    ),
    Number(
        "7.2",
        "Found in blocks of 256",
        "A prompt of 3,000 tokens begins with a cached system prompt of 1,900: how many tokens are "
        "found with blocks of 256?",
        "tokens",
        lambda: hit_tokens(3000, 1900, 256),
        0.0,
        (
            Wrong("all in common", 1900, "Only full blocks have a key."),
            Wrong(
                "rounded up",
                2048,
                "You round up. The block in which the prompts part is different for each.",
            ),
            Wrong(
                "of the prompt",
                2816,
                "Those are the full blocks of the prompt, not of what is common.",
            ),
            Wrong("blocks", 7, "Those are blocks. Tokens are asked for."),
            Wrong("blocks of 16", 1888, "That is with blocks of 16."),
        ),
        minutes=6,
        tests="hits come in whole blocks",
    ),
    Number(
        "7.3",
        "99 per cent",
        "Of a prompt of 8,192 tokens 8,112 are found. By what factor does the least TTFT of "
        "Qwen3-8B on an H100 fall?",
        "times",
        _faster,
        0.04,
        (
            Wrong(
                "the tokens",
                100,
                "That is the tokens. The step that computes the rest still reads all weights.",
            ),
            Wrong(
                "the work",
                _less_work,
                "That is the work. With so few rows the step is limited by memory.",
            ),
            Wrong(
                "one hundredth",
                0.01,
                "That is the share of tokens that is left. Asked for is a factor of time.",
            ),
            Wrong(
                "nothing",
                1,
                "It does fall: the work of the prefill, which bound it, is gone.",
            ),
        ),
        minutes=10,
        tests="hits against work against time",
    ),
    Function(
        "7.4",
        "Copy on write",
        "Write what it takes to append one token: the new table, and the blocks to copy.",
        _append_inputs,
        append_token,
        (
            Wrong(
                "never copies",
                _never_copies,
                "You write into a block that others read. Look at its count.",
            ),
            Wrong(
                "copies when the count is 1",
                _always_copies,
                "You copy a block that nobody else reads. The last holder writes in place.",
            ),
            Wrong(
                "copies a full block",
                _copies_full,
                "You copy a shared block that is full. Nothing more is written into it: the token "
                "goes into a new block.",
            ),
            Wrong(
                "off by one at a block boundary",
                _boundary,
                "Off by one at a block boundary: you take a new block when the last slot of the "
                "old one is still empty, and none when it is full.",
            ),
            Wrong(
                "copies every shared block",
                _copies_all,
                "You copy all shared blocks. Only the one that is written into needs a copy.",
            ),
            Wrong(
                "source and destination exchanged",
                _swapped,
                "Source and destination of the copy are exchanged.",
            ),
        ),
        minutes=20,
        tests="copy-on-write: partly filled and shared, and nothing else",
    ),
    Function(
        "7.5",
        "Keys of a prefix",
        "Write the keys of a prompt's full blocks, chained.",
        _keys_inputs,
        block_keys,
        (
            Wrong(
                "not chained",
                lambda tokens, size, key: [key(None, block) for block in _blocks(tokens, size)],
                "Every block has None as its parent: the same tokens behind another beginning "
                "would get the same key.",
            ),
            Wrong(
                "partial block too",
                _partial_too,
                "You give a key to the last, partial block. It will be written on.",
            ),
            Wrong(
                "last full block left out",
                lambda tokens, size, key: block_keys(tokens[:-1], size, key),
                "A prompt that ends with a full block publishes that too. It is the look-up that "
                "leaves a token to compute.",
            ),
            Wrong(
                "whole beginning",
                lambda tokens, size, key: [
                    key(None, tokens[:end]) for end in range(size, len(tokens) + 1, size)
                ],
                "You hash the whole beginning anew for each block. Give it the parent's key "
                "instead.",
            ),
        ),
        minutes=12,
        tests="the chain of keys, and which blocks have one",
    ),
    Function(
        "7.6",
        "Tokens that are found",
        "Write how many tokens of a prompt a prefix cache finds, of which the first common ones "
        "are cached.",
        _hit_inputs,
        hit_tokens,
        (
            Wrong(
                "nothing left to compute",
                lambda prompt, common, size: common // size * size,
                "Of a prompt that is cached to its end you find all: nothing is left to compute, "
                "and no position to sample from.",
            ),
            Wrong(
                "all in common",
                lambda prompt, common, size: common,
                "Only full blocks are found.",
            ),
            Wrong(
                "one token left",
                lambda prompt, common, size: min(common, prompt - 1),
                "Only full blocks are found: it is the last block that is computed again, not one "
                "token.",
            ),
            Wrong(
                "rounded up",
                lambda prompt, common, size: -(-common // size) * size,
                "You round up. A block with one differing token has another key.",
            ),
            Wrong(
                "a block less, always",
                lambda prompt, common, size: max(0, (common - 1) // size * size),
                "The last block is given up only where the prompt ends with it, not where the "
                "common part does.",
            ),
        ),
        minutes=8,
        tests="whole blocks, and one token that must be computed",
    ),
)
