"""Exercises of chapter 10: what vLLM counts, prints and hands out, where it differs from ours."""

import random

from servelab import memory, models
from servelab.check.exercise import Exercise, Number, Option, Pick, Wrong
from servelab.check.function import Function
from servelab.units import GB, GiB

_LENGTH, _BLOCK = 300, 128


def _printed(available: int = GiB, kv_dtype: str = "fp32") -> int:
    """Return the tokens that vLLM 0.32 prints: its concurrency times the longest request."""
    spec = models.get("stories")
    fits = memory.capacity(spec, available, _LENGTH, _BLOCK, kv_dtype, engine="vllm")
    return fits.printed_tokens


def _blocks(available: int = GiB) -> int:
    return memory.capacity(
        models.get("stories"), available, _LENGTH, _BLOCK, "fp32", engine="vllm"
    ).blocks


def free_order(free: list[int], table: list[int], full: int) -> list[int]:
    """Return the free queue of vLLM 0.32 after a request gave its blocks back."""
    return [*table[full:][::-1], *free, *table[:full][::-1]]


def _free_inputs(rng: random.Random) -> tuple[object, ...]:
    blocks = list(range(1, 24))
    rng.shuffle(blocks)
    held = rng.randint(2, 6)
    table, free = blocks[:held], blocks[held : held + rng.randint(0, 8)]
    return free, table, held - rng.randint(0, 1)


def max_num_seqs(blocks: int, block_size: int, max_model_len: int, step_tokens: int) -> int:
    """Return the requests of full length that fit, no more than the tokens of a step."""
    return min((blocks - 1) // -(-max_model_len // block_size), step_tokens)


def _seqs_inputs(rng: random.Random) -> tuple[object, ...]:
    block_size = rng.choice([16, 32, 64, 128])
    each = rng.randint(1, 8)
    length = max(each * block_size - rng.choice([0, 0, 1, 5, block_size // 2]), 1)
    many = rng.randint(1, 40)
    blocks = many * -(-length // block_size) + rng.choice([0, 0, 1, 1, 2])
    return blocks, block_size, length, rng.choice([many - 1 or 1, 64, 2048])


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "10.1",
        "The line that vLLM prints",
        "vLLM 0.32 serves the small model of this book in fp32 with 1 GiB for its cache, blocks of "
        "128 tokens and --max-model-len 300. Which number of tokens does it print as the size of "
        "the cache?",
        "tokens",
        _printed,
        0.0,
        (
            Wrong(
                "blocks times block size",
                lambda: _blocks() * _BLOCK,
                "So many slots there are. This vLLM prints something else: its concurrency times "
                "--max-model-len.",
            ),
            Wrong(
                "no whole blocks",
                lambda: GiB // models.get("stories").kv_bytes_per_token("fp32"),
                "That divides bytes by bytes. Blocks are handed out whole, to a request as well.",
            ),
            Wrong(
                "cache in bf16",
                lambda: _printed(kv_dtype="bf16"),
                "That has two bytes per number. The cache has the format the model runs in.",
            ),
            Wrong(
                "GB for GiB",
                lambda: _printed(available=GB),
                "That is 10^9 bytes. The log's GiB is 2^30.",
            ),
            Wrong(
                "the concurrency",
                lambda: _blocks() // -(-_LENGTH // _BLOCK),
                "So many requests fit; the line prints tokens first.",
            ),
        ),
        minutes=10,
        tests="reading capacity lines by the engine's own rule",
    ),
    Pick(
        "10.2",
        "Find the errors",
        "Which of the sentences about vLLM 0.32 are wrong?",
        {
            "a": Option(
                "Four samples of one prompt share its last, partly filled block until one of them "
                "writes into it.",
                "there is no fork: each sample is a request, and finds full blocks by their hash.",
            ),
            "b": Option(
                "Two requests that compute the same full block at the same time both keep theirs.",
                "tables are append-only, so the duplicate stays until its request ends.",
            ),
            "c": Option(
                "With `--gpu-memory-utilization 0.9`, 90 per cent of the memory is cache.",
                "the share holds weights, activations and graphs too; the rest of it is cache.",
            ),
            "d": Option(
                "A pre-empted request is computed again from its tokens.",
                "its blocks are freed and its computed tokens set to 0; the prefix cache may "
                "still have some.",
            ),
            "e": Option(
                "A prompt that is cached to its end, a whole number of blocks, costs no "
                "computation.",
                "the last token is needed for its logits, so the last block is not taken.",
            ),
        },
        "ace",
        "a is vLLM before V1; the share of c holds everything; e forgets the last token.",
        minutes=10,
        tests="which rules of the paper still hold in production",
    ),
    Function(
        "10.3",
        "The free queue of vLLM 0.32",
        "Write the order of the free queue after a request gives its blocks back.",
        _free_inputs,
        free_order,
        (
            Wrong(
                "the document's rule",
                lambda free, table, full: [*free, *table[::-1]],
                "That is the rule of the design document. Since the change named in the chapter, a "
                "block without a hash is reused first: nobody can find it.",
            ),
            Wrong(
                "first block first",
                lambda free, table, full: [*table[full:], *free, *table[:full]],
                "Full blocks go back last block first, so that a prefix is eaten from its end.",
            ),
            Wrong(
                "all in front",
                lambda free, table, full: [*table[::-1], *free],
                "Only blocks without a hash go to the front. Full ones wait behind all others.",
            ),
            Wrong(
                "full blocks in front",
                lambda free, table, full: [*table[:full][::-1], *free, *table[full:][::-1]],
                "The wrong way round: the front is handed out first, and full blocks are worth "
                "keeping.",
            ),
        ),
        minutes=15,
        tests="what a free queue decides about the prefix cache",
    ),
    Function(
        "10.4",
        "The most sequences",
        "Write the --max-num-seqs that follows from a pool.",
        _seqs_inputs,
        max_num_seqs,
        (
            Wrong(
                "null block",
                lambda blocks, block_size, max_model_len, step_tokens: min(
                    blocks // -(-max_model_len // block_size), step_tokens
                ),
                "One block of the pool is the null block, which no request gets.",
            ),
            Wrong(
                "tokens over tokens",
                lambda blocks, block_size, max_model_len, step_tokens: min(
                    (blocks - 1) * block_size // max_model_len, step_tokens
                ),
                "A request takes whole blocks, so round its length up before you divide.",
            ),
            Wrong(
                "rounded down",
                lambda blocks, block_size, max_model_len, step_tokens: min(
                    (blocks - 1) // max(max_model_len // block_size, 1), step_tokens
                ),
                "A request that does not fill its last block takes it nevertheless.",
            ),
            Wrong(
                "no limit of a step",
                lambda blocks, block_size, max_model_len, step_tokens: (
                    (blocks - 1) // -(-max_model_len // block_size)
                ),
                "vLLM refuses more sequences than a step has tokens: each that runs needs one.",
            ),
        ),
        minutes=10,
        tests="the null block, whole blocks and the limit of a step",
    ),
)
