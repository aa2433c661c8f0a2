"""Hand-made plans for runners: sequences on a shuffled pool, without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from servelab.decoder import DenseDecoder, PagedDecoder, TorchRunner
from servelab.decoder.attention import StepBatch
from servelab.paging import BlockPool, BlockTable, Copy
from servelab.serving import Plan, Request, SamplingParams
from servelab.serving.request import Sequence
from tests.tiny import CONFIGS, pair

GREEDY = SamplingParams(temperature=0)
TOLERANCE = 1e-9  # DESIGN, section 5: against our own oracle in float64


class Row(NamedTuple):
    """A row of a plan, with names."""

    sequence: Sequence
    new_tokens: int
    cached_tokens: int
    samples: tuple[float, ...]


class SpyRunner(TorchRunner):
    """Keeps the last step's logits and batch."""

    seen_logits: Tensor
    seen_batch: StepBatch

    def logits(self, batch: StepBatch, last: Tensor) -> Tensor:
        self.seen_batch = batch
        self.seen_logits = super().logits(batch, last)
        return self.seen_logits


def paged_twin(dense: DenseDecoder, **options: Any) -> PagedDecoder:
    """The paged decoder with a dense one's weights."""
    weight = dense.embed_tokens.weight
    options = {"device": weight.device, "dtype": weight.dtype} | options
    paged = PagedDecoder(dense.spec, dense.rope, dense.norm.eps, **options)
    stored = {
        k if k == "lm_head.weight" else f"model.{k}": v for k, v in dense.state_dict().items()
    }
    for name, view in paged.weights().items():
        assert view.shape == stored[name].shape
        view.copy_(stored[name])
    return paged


def twins(name: str, **options: Any) -> tuple[DenseDecoder, SpyRunner]:
    """A dense decoder of `tests.tiny` in float64, and a runner with its weights."""
    assert name in CONFIGS
    dense = pair(name)[1]
    return dense, SpyRunner(paged_twin(dense), **options)


@dataclass
class World:
    """A pool in random order, a runner bound to it and poisoned, and the sequences on it."""

    runner: SpyRunner
    num_blocks: int
    block_size: int
    seed: int = 0
    num_swap_blocks: int = 0
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.copies: list[Copy] = []  # of the rows made for the next step
        self.pool = BlockPool(self.num_blocks, self.block_size)
        blocks = [self.pool.allocate() for _ in range(self.num_blocks - 1)]
        self.random.shuffle(blocks)
        for block in blocks:
            self.pool.release(block)
        self.runner.bind(self.pool.shape, self.num_swap_blocks)
        self.runner.store.poison()

    def add(self, tokens: SequenceOf[int], params: SamplingParams = GREEDY) -> Sequence:
        number = len(self.sequences)
        request = Request(None, tuple(tokens), params, max_tokens=99, id=f"r{number}")
        request.arrival, request.seed = number, 7 * number
        sequence = request.sequences[0]
        sequence.table = BlockTable(self.pool)
        self.sequences.append(sequence)
        return sequence

    def row(self, sequence: Sequence, new: int | None = None, sampled: bool = True) -> Row:
        """The next ``new`` tokens of a sequence (None: all that are left)."""
        cached = sequence.num_computed_tokens
        new = len(sequence.token_ids) - cached if new is None else new
        assert sequence.table is not None
        self.copies += sequence.table.append(new)
        sequence.num_computed_tokens += new
        return Row(sequence, new, cached, sequence.samples() if sampled else ())

    def step(self, rows: list[Row]) -> SequenceOf[SequenceOf[int]]:
        """Run the rows; append the token of every sequence that has no other left."""
        plan = Plan([*rows], copies=self.copies)
        self.copies = []
        self.result = self.runner.execute(plan)
        for row, tokens in zip(rows, self.result.tokens, strict=True):
            sequence = row.sequence
            if tokens and sequence.num_computed_tokens == len(sequence.token_ids):
                sequence.token_ids.append(tokens[0])
        return self.result.tokens


def dense_logits(dense: DenseDecoder, token_ids: SequenceOf[int]) -> Tensor:
    """The dense decoder's logits behind the last token, (V)."""
    return dense(torch.tensor([list(token_ids)]), last_only=True)[0, -1]


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
