"""The bookkeeping of CUDA graphs, tested without one: buckets, padding, buffers that stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from servelab.decoder import StepBatch
from servelab.decoder.graphs import DecodeGraphs, Work, bucket_of
from tests.kernel_steps import random_step

FIELDS = ("tokens", "positions", "slots", "context_lens", "query_starts")


def decode_batch(rows: int, seed: int = 0, cached: int = 20) -> StepBatch:
    batch = random_step([(1, cached + row) for row in range(rows)], seed=seed).batch
    batch.tokens = torch.arange(rows) + 100 * (seed + 1)
    return batch


class Recorder:
    """A step that notes what it is given, and a capture that counts and freezes addresses."""

    def __init__(self) -> None:
        self.seen: list[StepBatch] = []
        self.captures = 0

    def step(self, batch: StepBatch) -> Tensor:
        self.seen.append(batch)
        last = batch.tokens[batch.query_starts[1:].long() - 1]
        columns = (last, batch.block_tables[:, 0], batch.context_lens)
        return torch.stack([column.long() for column in columns], dim=1)  # (R, 3)

    def capture(self, work: Work) -> Work:
        self.captures += 1
        return work

    def graphs(self, max_rows: int = 32, table_width: int = 8) -> DecodeGraphs:
        return DecodeGraphs(
            self.step,
            max_rows=max_rows,
            table_width=table_width,
            block_size=16,
            device="cpu",
            capture=self.capture,
        )


def fields(batch: StepBatch, rows: int) -> list[Tensor]:
    return [getattr(batch, name)[:rows].clone() for name in FIELDS]


@pytest.mark.parametrize("rows", range(1, 100))
def test_a_bucket_holds_the_batch_and_not_much_more(rows: int) -> None:
    bucket = bucket_of(rows)
    assert rows <= bucket < rows + max(rows, 16)
    assert bucket_of(bucket) == bucket


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 17, 32])
def test_a_batch_arrives_whole_and_the_rest_is_padding(rows: int) -> None:
    recorder, batch = Recorder(), decode_batch(rows)
    answer = recorder.graphs().run(batch)
    given = recorder.seen[-1]
    assert len(given.tokens) == len(given.rows) == bucket_of(rows)
    for got, expected in zip(fields(given, rows), fields(batch, rows), strict=True):
        assert torch.equal(got, expected)
    width = batch.block_tables.shape[1]
    assert torch.equal(given.block_tables[:rows, :width], batch.block_tables)
    assert torch.equal(given.query_starts, torch.arange(bucket_of(rows) + 1, dtype=torch.int32))
    assert given.max_context_len == 8 * 16
    for padding in (given.tokens, given.positions, given.slots, given.block_tables):
        assert not padding[rows:].any()  # token 0 at position 0, in the null block's first slot
    assert (given.context_lens[rows:] == 1).all()
    assert torch.equal(answer, Recorder().step(batch))


def test_a_smaller_batch_leaves_nothing_of_a_larger_one() -> None:
    recorder = Recorder()
    graphs = recorder.graphs()
    for rows in (16, 9, 15, 3, 4, 1):
        graphs.run(decode_batch(rows, seed=rows))
        given = recorder.seen[-1]
        for padding in (given.tokens, given.positions, given.slots, given.block_tables):
            assert not padding[rows:].any()
        assert (given.context_lens[rows:] == 1).all()


def test_a_bucket_is_captured_once_and_its_buffers_never_move() -> None:
    recorder = Recorder()
    graphs = recorder.graphs()
    addresses = set()
    for seed, rows in enumerate((3, 4, 3, 1, 2, 4)):
        graphs.run(decode_batch(rows, seed=seed))
        given = recorder.seen[-1]
        addresses.add((given.tokens.data_ptr(), given.block_tables.data_ptr()))
    assert recorder.captures == 3
    assert graphs.captured == [1, 2, 4]
    assert len(addresses) == 1
    four = [batch for batch in recorder.seen if len(batch.rows) == 4]
    assert all(batch is four[0] for batch in four), "a graph reads what it was captured with"


def test_what_is_no_decode_step_or_has_no_room_is_computed_as_it_is() -> None:
    recorder = Recorder()
    graphs = recorder.graphs(max_rows=4, table_width=3)
    mixed = random_step([(1, 5), (6, 0)]).batch
    for batch in (mixed, decode_batch(5), decode_batch(2, cached=60)):
        assert not graphs.accepts(batch)
        answer = graphs.run(batch)
        assert recorder.seen[-1] is batch
        assert len(answer) == len(batch.rows)
    assert recorder.captures == 0


@pytest.mark.parametrize("name", ["max_rows", "table_width", "block_size"])
def test_bad_counts_are_refused(name: str) -> None:
    options = {"max_rows": 1, "table_width": 1, "block_size": 1, name: 0}
    with pytest.raises(ValueError, match=name):
        DecodeGraphs(Recorder().step, device="cpu", **options)
