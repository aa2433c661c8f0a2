"""Exercises of chapter 8: the capacity of a service, budgets that keep a promise, admission."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import mean

from servelab import hardware, models
from servelab.check.exercise import Exercise, Number, Option, Pick, Wrong
from servelab.check.function import Function
from servelab.roofline import Pricer
from servelab.simulation import traces

Admitted = list[tuple[int, int]]


@cache
def _pricer() -> Pricer:
    return Pricer(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"), "bf16")


def _seconds(step: list[tuple[int, int]]) -> float:
    """Return what a step takes on the chapter's clock: one operator after another."""
    return _pricer().price(step).seconds


@cache
def _arrivals(trace: str) -> tuple[traces.Arrival, ...]:
    return tuple(traces.get(trace).head(600).arrivals)


@cache
def _owed(trace: str, places: int = 128) -> tuple[float, float]:
    """Return the mean seconds that a request owes: its prefill, its share of decode steps."""
    arrivals = _arrivals(trace)
    prefill = mean(_seconds([(one.prompt_tokens, 0)]) for one in arrivals)
    decode = mean(
        (one.output_tokens - 1)
        * _seconds([(1, one.prompt_tokens + one.output_tokens // 2)] * places)
        / places
        for one in arrivals
    )
    return prefill, decode


def _capacity(trace: str = "azure_2023_code", places: int = 128) -> float:
    return 1 / sum(_owed(trace, places))


@cache
def _by_means(trace: str = "azure_2023_code", places: int = 128) -> float:
    """Return the capacity of requests that all have the mean lengths."""
    prompt = round(mean(one.prompt_tokens for one in _arrivals(trace)))
    output = mean(one.output_tokens for one in _arrivals(trace))
    step = [(1, prompt + round(output / 2))] * places
    return 1 / (_seconds([(prompt, 0)]) + (output - 1) * _seconds(step) / places)


def _chunks(budget: int, context: int, prompt: int = 16_384) -> list[list[tuple[int, int]]]:
    size = budget - 64
    return [
        [*[(1, context - 1)] * 64, (min(size, prompt - done), done)]
        for done in range(0, prompt, size)
    ]


@cache
def _largest_budget(context: int = 4096, which: str = "last") -> int:
    """Return the largest budget whose dearest step takes at most 25 ms."""

    def longest(budget: int) -> float:
        steps = _chunks(budget, context)
        if which == "full":
            size = budget - 64
            return _seconds([*[(1, context - 1)] * 64, (size, 16_384 - size)])
        asked = steps[:1] if which == "first" else steps[-2:]
        return max(_seconds(step) for step in asked)

    return max(budget for budget in range(96, 4097, 32) if longest(budget) <= 25e-3)


def admit(
    waiting: Sequence[int], seats: int, budget: int, free_blocks: int, block_size: int
) -> Admitted:
    """Return who starts in this step, as (place in the queue, tokens to compute now)."""
    return _admit(waiting, seats, budget, free_blocks, block_size)


def _admit(
    waiting: Sequence[int],
    seats: int,
    budget: int,
    free_blocks: int,
    block_size: int,
    blocks: Callable[[int, int], int] = lambda tokens, size: -(-tokens // size),
    skip: bool = False,
    chunk_only: bool = False,
    whole: bool = False,
) -> Admitted:
    admitted: Admitted = []
    for place, tokens in enumerate(waiting):
        new = min(tokens, budget)
        needed = blocks(new if chunk_only else tokens, block_size)
        if not seats or not budget:
            break
        if needed > free_blocks or (whole and tokens > budget):
            if skip:
                continue
            break
        admitted.append((place, new))
        seats, budget = seats - 1, budget - new
        free_blocks -= blocks(new, block_size)
    return admitted


def _admit_inputs(rng: random.Random) -> tuple[object, ...]:
    size = rng.choice([2, 4, 8])
    waiting = [
        rng.choice([size * rng.randint(1, 6), rng.randint(1, 40)]) for _ in range(rng.randint(1, 6))
    ]
    return waiting, rng.randint(1, 6), rng.randint(1, 120), rng.randint(1, 30), size


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "8.1",
        "The capacity for code",
        "What is the capacity of the chapter's service for the first 600 requests of "
        "azure_2023_code, with 128 places, by the formula?",
        "requests per second",
        _capacity,
        0.01,
        (
            Wrong(
                "prefill alone",
                lambda: 1 / _owed("azure_2023_code")[0],
                "That is the prefill alone. Decoding is the smaller part here, not nothing.",
            ),
            Wrong(
                "decode alone",
                lambda: 1 / _owed("azure_2023_code")[1],
                "That is decoding alone. For prompts this long the prefill decides.",
            ),
            Wrong(
                "mean lengths",
                _by_means,
                "That is a request of mean lengths. A long prompt costs more than two of half its "
                "length: take the mean of the times, as the chapter does.",
            ),
            Wrong(
                "conversation",
                lambda: _capacity("azure_2023_conv"),
                "That is the conversation trace.",
            ),
            Wrong(
                "steps not shared",
                lambda: _capacity(places=1),
                "You charge each request whole decode steps. It owes a share of each, one over "
                "the places.",
            ),
        ),
        minutes=15,
        tests="what a request owes, and which term decides",
    ),
    Number(
        "8.2",
        "A budget that keeps a promise",
        "64 users at context 4,096, prompts of 16,384 tokens, no gap above 25 ms: which is the "
        "largest budget, a multiple of 32, that keeps the promise by the bound?",
        "tokens",
        _largest_budget,
        0.0,
        (
            Wrong(
                "the chunk",
                lambda: _largest_budget() - 64,
                "That is the chunk of the prompt. The budget has room for the 64 decodes too.",
            ),
            Wrong(
                "the first chunk",
                lambda: _largest_budget(which="first"),
                "That is what the first chunk allows. The last one attends to the whole prompt, "
                "and is the dearest.",
            ),
            Wrong(
                "a full last chunk",
                lambda: _largest_budget(which="full"),
                "That charges a full chunk at the very end. The prompt is no multiple of it: the "
                "last chunk is the rest, and the full one before it attends to less.",
            ),
            Wrong(
                "half the context, or everything overlapped",
                lambda: _largest_budget(2048),
                "Two ways lead there: users at context 2,048, or steps in which everything "
                "overlaps. Asked are users at 4,096, and the chapter's clock, which runs one "
                "operator after another.",
            ),
        ),
        minutes=15,
        tests="chunked prefill: which step is the longest, and what its budget holds",
    ),
    Pick(
        "8.3",
        "The same load?",
        "Which of these sentences hold?",
        {
            "a": Option(
                "Twice as many requests at 40 per second have the same p99 TTFT.",
                "at 40 per second, does the queue have a length to settle at?",
            ),
            "b": Option(
                "Above its capacity, a service's TTFT depends on how long one sends.",
                "what happens to the queue while more comes than is served?",
            ),
            "c": Option(
                "256 places instead of 128 double the throughput.",
                "which part of a request's debt do places share, and how large is it at 128?",
            ),
            "d": Option(
                "256 places instead of 128 raise the median TPOT by about half.",
                "each further sequence brings its own cache to read in every step.",
            ),
        },
        "bd",
        "Beyond its capacity a service has no latency, and places share only the weights.",
        minutes=10,
        tests="saturation, and what more places buy",
    ),
    Function(
        "8.4",
        "Admission",
        "Write who of the queue starts in this step, and with how many tokens.",
        _admit_inputs,
        admit,
        (
            Wrong(
                "skips who does not fit",
                lambda waiting, seats, budget, free, size: _admit(
                    waiting, seats, budget, free, size, skip=True
                ),
                "You skip who does not fit and admit those behind. First come, first served: the "
                "queue waits for its head.",
            ),
            Wrong(
                "blocks of the chunk",
                lambda waiting, seats, budget, free, size: _admit(
                    waiting, seats, budget, free, size, chunk_only=True
                ),
                "You ask for the blocks of this step's tokens. All tokens of the request must fit.",
            ),
            Wrong(
                "whole prompts only",
                lambda waiting, seats, budget, free, size: _admit(
                    waiting, seats, budget, free, size, whole=True
                ),
                "A prompt longer than the rest of the budget starts with a chunk.",
            ),
            Wrong(
                "off by one at a block boundary",
                lambda waiting, seats, budget, free, size: _admit(
                    waiting, seats, budget, free, size, blocks=lambda t, b: t // b + 1
                ),
                "Off by one at a block boundary: a request whose tokens fill their last block "
                "needs no further one.",
            ),
            Wrong(
                "rounded down",
                lambda waiting, seats, budget, free, size: _admit(
                    waiting, seats, budget, free, size, blocks=lambda t, b: t // b
                ),
                "You round the blocks down. A block that is begun is a block.",
            ),
            Wrong(
                "seats ignored",
                lambda waiting, seats, budget, free, size: _admit(
                    waiting, 1000, budget, free, size
                ),
                "You admit more than there are seats for.",
            ),
            Wrong(
                "budget ignored",
                lambda waiting, seats, budget, free, size: _admit(
                    waiting, seats, 10**9, free, size
                ),
                "You compute more tokens than the budget of the step.",
            ),
        ),
        trials=120,
        minutes=25,
        tests="the scheduler's admission: order, blocks, budget, seats",
    ),
)
