"""Requests of mixed lengths: continuous batching, padded static batching, and a peer of the first.

Models: 64 requests that arrive at once, prompts of 16 to 256 tokens, outputs of 16 to 256. Static
batching takes them 32 at a time, in order; it pads prompts to the longest of the batch and decodes
until the longest output is complete. Both run the same model in the same engine: a padded batch
is one of equal requests.

Assumes: outputs have a known length; a real static batch knows no better when to stop.

Ignores: tokens that padding changes: the time does not depend on what they are.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from engines import Transformers, engine_for, greedy, random_prompts, say
from goals import Goal

from servelab.decoder import PagedDecoder, TorchRunner
from servelab.decoder.graphs import bucket_of
from servelab.serving import Plan, StepResult

SEATS = 32
Lengths = list[tuple[int, int]]  # of prompt and output


def workload(requests: int = 64, seed: int = 7) -> Lengths:
    """Return the lengths of the requests."""
    chance = random.Random(seed)
    return [(chance.randint(16, 256), chance.randint(16, 256)) for _ in range(requests)]


class CountingRunner(TorchRunner):
    """Counts the rows of one token that it computes: ``slots``, and padded to buckets."""

    slots = padded_slots = 0

    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step."""
        rows = sum(new == 1 for _, new, _, _ in plan.rows)
        self.slots += rows
        alone = rows == len(plan.rows) > 0  # a step with a prompt in it is not compiled
        self.padded_slots += bucket_of(rows) if alone else rows
        return super().execute(plan)


def continuous(runner: TorchRunner, lengths: Lengths, seats: int = SEATS) -> float:
    """Return the seconds until all requests are answered."""
    engine = engine_for(runner, lengths, seats)
    began = perf_counter()
    for number, (prompt, output) in enumerate(lengths):
        engine.add(random_prompts(1, prompt, number)[0], greedy(output))
    while engine.unfinished:
        engine.step()
    return perf_counter() - began


def static(runner: TorchRunner, lengths: Lengths, seats: int = SEATS) -> float:
    """Return the seconds until all are answered, in padded batches."""
    seconds = 0.0
    for start in range(0, len(lengths), seats):
        batch = lengths[start : start + seats]
        longest = max(prompt for prompt, _ in batch), max(output for _, output in batch)
        seconds += continuous(runner, [longest] * len(batch), seats)
    return seconds


def compare(
    model: PagedDecoder, lengths: Lengths, rounds: int
) -> tuple[dict[str, list[float]], list[Goal], list[str]]:
    """Run both kinds of batching in turn; return seconds, goals, and lines on them."""
    runner = CountingRunner(model, "cpu")
    ways: dict[str, Callable[[TorchRunner, Lengths], float]]
    ways = {"continuous": continuous, "static, padded": static}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    slots = {}
    for turn in range(rounds):
        for name, way in ways.items():
            say(f"mixed lengths, round {turn + 1}: {name}")
            runner.slots = runner.padded_slots = 0
            seconds[name].append(way(runner, lengths))
            slots[name] = runner.slots, runner.padded_slots
    useful = sum(output - 1 for _, output in lengths)  # the prompt's step gives the first token
    tokens = sum(output for _, output in lengths)
    lines = [
        f"{name}: {statistics.median(seconds[name]):.1f} s, "
        f"{tokens / statistics.median(seconds[name]):.0f} tokens/s, {useful} of {own} decode slots "
        f"useful ({useful / own:.2f}; {useful / padded:.2f} in a compiled step's buckets)"
        for name, (own, padded) in slots.items()
    ]
    pairs = zip(seconds["static, padded"], seconds["continuous"], strict=True)
    gain = statistics.median(a / b for a, b in pairs)
    goals = [
        Goal("continuous batching: faster than static, padded by", 1.5, gain),
        Goal(
            "useful decode slots of computed ones", 0.95, useful / slots["continuous"][0], unit=""
        ),
    ]
    return seconds, goals, lines


def generate_batch(folder: Path, requests: int = 8, new_tokens: int = 16) -> str:
    """Return a line on the continuous batching of transformers, its first call shown apart.

    Its rate is so low that only a few short requests are asked for.
    """
    from transformers import GenerationConfig

    model: Any = Transformers(folder, "paged|sdpa").model
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    prompts = random_prompts(requests, 128, seed=1)
    seconds = []
    for call in ("first", "second"):
        say(f"generate_batch of transformers, {call} call")
        began = perf_counter()
        answers = model.generate_batch(inputs=prompts, generation_config=config)
        seconds.append(perf_counter() - began)
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    return (
        f"generate_batch of transformers, {requests} requests of 128 + {new_tokens} tokens: "
        f"{tokens / seconds[1]:.1f} tokens/s; the first call, warm-up included, took "
        f"{seconds[0]:.1f} s, the second {seconds[1]:.1f} s"
    )
