"""The engine on a decoder: whatever else runs, answers and logits are the dense decoder's (I15).

Pools from the smallest that serve the requests, full of NaN (I16); blocks of 1 to 17 slots; chunks,
prefix hits, pre-emption by both ways, several samples of a prompt, beams of 2 and 3. In float64; of
every choice the distance to the next best is kept, and none may be a tie.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from servelab.decoder import DenseDecoder
from servelab.serving import Engine, Plan, Request, SamplingParams, StepResult, beam_search, uniform
from tests.plans import TOLERANCE, Row, SpyRunner, dense_logits, twins
from tests.serving_world import check_pools
from tests.tiny import CONFIGS

VOCABULARY = 97
HISTORIES = 6  # of each model
SMALLEST_GAP = 1e-6  # a thousand times what logits may differ by
SEEN: Counter[str] = Counter()  # what the histories contained, to see that they contain enough


@dataclass
class Oracle:
    """The dense decoder without a cache; what it has computed once it knows."""

    dense: DenseDecoder
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The logits behind the last token, (V)."""
        key = tuple(tokens)
        if key not in self.known:
            self.known[key] = dense_logits(self.dense, key)
            assert self.known[key].std() > 0.1, "logits near 0 would agree with anything"
        return self.known[key]

    def draw(self, tokens: Sequence[int], params: SamplingParams, number: float) -> int:
        logits = self.logits(tokens)
        if params.greedy:
            first, second = logits.topk(2).values.tolist()
            self.gaps.append(first - second)
            return int(logits.argmax())
        bounds = (logits / params.temperature).softmax(-1).cumsum(-1)  # (V)
        self.gaps.append(float((bounds - number).abs().min()))
        return int((bounds <= number).sum())

    def answer(self, request: Request, child: int) -> list[int]:
        tokens = list(request.prompt_token_ids)
        for position in range(len(tokens), len(tokens) + request.max_tokens):
            number = uniform(request.seed, child, position)
            tokens.append(self.draw(tokens, request.params, number))
        return tokens[request.num_prompt_tokens :]

    def beams(
        self, prompt: Sequence[int], width: int, length: int
    ) -> list[tuple[list[int], float]]:
        """Beam search from the whole of each beam, without an end of a sequence."""
        live: list[tuple[list[int], float]] = [([], 0.0)]
        for _ in range(length):
            ways = []
            for tokens, total in live:
                logprobs = self.logits([*prompt, *tokens]).log_softmax(-1)
                best = logprobs.topk(2 * width)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                ways += [([*tokens, token], total + logprob) for token, logprob in pairs]
            ways.sort(key=lambda way: -way[1])
            for better, worse in pairwise(ways[: width + 1]):  # their order counts, too
                self.gaps.append(better[1] - worse[1])
            live = ways[:width]
        return live


class ComparedRunner(SpyRunner):
    """Compares the logits of every row that it draws from with the oracle's."""

    oracle: Oracle

    def execute(self, plan: Plan) -> StepResult:
        result = super().execute(plan)
        every = list(map(Row._make, plan.rows))
        rows = sorted((row for row in every if row.samples), key=lambda row: row.new_tokens > 1)
        for row, logits in zip(rows, self.seen_logits if rows else (), strict=True):
            seen = row.sequence.token_ids[: row.cached_tokens + row.new_tokens]
            expected = self.oracle.logits(seen)
            torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        SEEN["swapped in"] += len(plan.swap_in)
        SEEN["chunk and decode"] += len({row.new_tokens > 1 for row in every}) == 2
        return result


def history(oracle: Oracle, runner: ComparedRunner, seed: int) -> None:
    chance = random.Random(seed)
    block_size = chance.choice([1, 2, 3, 4, chance.randint(5, 17)])
    common = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 18))]

    def prompt() -> list[int]:
        shared = common[: chance.choice([0, len(common), len(common)])]
        return [*shared, *(chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 6)))]

    wanted: list[tuple[list[int], SamplingParams]] = []
    for _ in range(chance.randint(3, 5)):
        n = chance.choice([1, 2, 3])
        temperature = chance.choice([0, 0.7]) if n == 1 else 1.5
        max_tokens = chance.randint(1, 14)
        wanted.append((prompt(), SamplingParams(n, temperature, max_tokens=max_tokens)))
    beamed, width, length = prompt(), chance.choice([2, 3]), chance.randint(2, 5)
    longest = max(len(p) + q.max_tokens for p, q in wanted)
    longest = max(longest, len(beamed) + length) - 1  # the last token needs no room
    engine = Engine(
        runner,
        num_blocks=1 + -(-longest // block_size) + chance.choice([0, 0, 1, 4]),
        block_size=block_size,
        max_num_batched_tokens=chance.choice([1, 3, 7, 40]),
        max_num_seqs=chance.randint(3, 6),
        num_swap_blocks=chance.choice([0, 8, 20]),
        enable_prefix_caching=chance.random() < 0.8,
        seed=seed,
    )
    runner.store.poison()
    requests = [engine.add(*each) for each in wanted]
    for _ in range(chance.randint(0, 6)):
        engine.step()
    found = beam_search(engine, beamed, width, length)
    while engine.unfinished:
        engine.step()
    check_pools(engine.scheduler)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.shape.num_blocks - 1

    for request in requests:
        assert request.error is None
        for branch in request.sequences:
            assert branch.output_token_ids == oracle.answer(request, branch.index)
        SEEN["several samples"] += len(request.sequences) > 1
    expected = oracle.beams(beamed, width, length)
    assert [beam.token_ids for beam in found.outputs] == [tokens for tokens, _ in expected]
    for beam, (_, total) in zip(found.outputs, expected, strict=True):
        assert beam.cumulative_logprob == pytest.approx(total, abs=1e-8)
    counters = engine.counters
    SEEN["hit"] += counters.prefix_hit_tokens > 0
    SEEN["copy on write"] += counters.copied_blocks
    SEEN["pre-emption: recompute"] += counters.preemptions_by_recompute
    SEEN["pre-emption: swap"] += counters.preemptions_by_swap


@pytest.mark.parametrize("name", CONFIGS)
def test_any_history_gives_what_the_dense_decoder_gives(name: str) -> None:
    SEEN.clear()
    dense, spy = twins(name)
    oracle, runner = Oracle(dense), ComparedRunner(spy.model)
    runner.oracle = oracle
    first = HISTORIES * list(CONFIGS).index(name)
    for seed in range(first, first + HISTORIES):
        history(oracle, runner, seed)
    assert min(oracle.gaps) > SMALLEST_GAP, "a tie: either token is right; take another seed"
    kinds = ["swapped in", "chunk and decode", "several samples", "hit", "copy on write"]
    kinds += ["pre-emption: recompute", "pre-emption: swap"]
    assert not [kind for kind in kinds if not SEEN[kind]], SEEN
