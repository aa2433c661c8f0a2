"""The paged decoder against the dense one in float64, on pools full of NaN.

A slot that was never written, or whose block belongs to somebody else, must not reach a logit.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servelab.decoder import DenseDecoder
from servelab.serving import Row
from tests.plans import SpyRunner, World, dense_logits, twins
from tests.tiny import CONFIGS

TOLERANCE = 1e-9  # DESIGN, section 5: against our own oracle in float64


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[DenseDecoder, SpyRunner]]:
    return {name: twins(name) for name in CONFIGS}


def check_rows(world: World, dense: DenseDecoder, rows: list[Row]) -> None:
    """Every sampled row's logits and token are the dense decoder's."""
    ordered = sorted((row for row in rows if row.samples), key=lambda row: row.new_tokens > 1)
    assert len(world.runner.seen_logits) == len(ordered)
    for row, logits in zip(ordered, world.runner.seen_logits, strict=True):
        tokens = row.sequence.token_ids[: row.cached_tokens + row.new_tokens]
        expected = dense_logits(dense, tokens)
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        assert expected.std() > 0.1, "logits near 0 would agree with anything"
        index = next(i for i, other in enumerate(rows) if other is row)
        assert world.result.tokens[index] == [int(expected.argmax())]


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), block_size=st.integers(1, 17))
def test_any_mixture_of_rows_equals_the_dense_decoder(
    pairs: dict[str, tuple[DenseDecoder, SpyRunner]], name: str, seed: int, block_size: int
) -> None:
    dense, runner = pairs[name]
    chance = random.Random(seed)
    world = World(runner, 120 // block_size + 12, block_size, seed)
    for _ in range(chance.randint(1, 5)):
        world.add([chance.randrange(97) for _ in range(chance.randint(1, 12))])
    for _ in range(6):
        rows = []
        for sequence in world.sequences:
            left = len(sequence.token_ids) - sequence.num_computed_tokens
            if left and chance.random() < 0.8:
                new = chance.randint(1, left)
                rows.append(world.row(sequence, new, sampled=chance.random() < 0.9))
        chance.shuffle(rows)
        if rows:
            world.step(rows)
            if any(row.samples for row in rows):
                check_rows(world, dense, rows)
