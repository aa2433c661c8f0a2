"""Decode steps as CUDA graphs: launched as one, whatever the number of kernels inside.

Models: a decode step of a small model is hundreds of kernels of a few microseconds, and launching
them one by one from Python takes longer than they do. A graph records them once and replays them
with a single launch; but with the same addresses and shapes every time. So each batch is copied
into buffers that never move, and padded to the next *bucket*: 1, 2, 4, 8, 16, then multiples of 16.

Assumes: the step never waits for the device, and reads lengths there: the attention backend is
`TritonAttention`, whose launches depend on the longest context that fits the tables and not on the
batch's. A padding row is a sequence of one token in the null block, whose contents are nobody's. No
table entry behind a row's context is read: what an earlier batch left there stays.

Ignores: steps with chunks of prompts: their shapes differ from one to the next, and they compute
for longer than they launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from servelab.decoder.attention import StepBatch
from servelab.paging import NULL_BLOCK
from servelab.units import check_count

# Computes the answer of a step: a tensor with one entry per row.
Work = Callable[[], Tensor]
# Records some work, and returns what repeats it with whatever its inputs contain by then.
Capture = Callable[[Work], Work]

WARMUP_STEPS = 2  # before a capture: kernels are compiled, libraries reserve their memory

# What a padding row holds: one token, in the first slot of the null block.
PADDING = {"tokens": 0, "positions": 0, "slots": 0, "context_lens": 1, "block_tables": NULL_BLOCK}

# Shapes below: R rows, B rows of a bucket, W entries of a table row.


def bucket_of(rows: int) -> int:
    """Return the batch size that a batch of so many rows is padded to.

    >>> [bucket_of(rows) for rows in (1, 3, 5, 16, 17, 40)]
    [1, 4, 8, 16, 32, 48]
    """
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16


def cuda_graphs() -> Capture:
    """Return what captures work of the current CUDA device as graphs.

    They share their memory: the answer of one is lost when another is replayed.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARMUP_STEPS):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            answer = work()

        def replay() -> Tensor:
            graph.replay()
            return answer

        return replay

    return capture


def eagerly(work: Work) -> Work:
    """Return the work itself: what stands for a graph where there is no CUDA device."""
    return work


class DecodeGraphs:
    """Runs steps of one new token per row as graphs, all others as they are.

    Parameters: ``step`` computes a batch, and answers with a tensor of one entry per row;
    ``max_rows`` of a batch, ``table_width`` blocks of a row, of ``block_size`` tokens;
    ``device`` of the batches; ``capture`` None: CUDA graphs on a CUDA device, `eagerly` elsewhere.
    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> graphs = DecodeGraphs(lambda batch: batch.tokens + batch.context_lens, max_rows=8,
    ...     table_width=4, block_size=16, device="cpu")
    >>> tables = torch.tensor([[1, 2], [3, 0], [4, 5]], dtype=torch.int32)
    >>> batch = StepBatch(tokens=torch.tensor([7, 8, 9]), positions=torch.tensor([16, 2, 20]),
    ...     slots=torch.tensor([32, 50, 84]), block_tables=tables,
    ...     query_starts=torch.arange(4, dtype=torch.int32), rows=[(1, 16), (1, 2), (1, 20)],
    ...     context_lens=torch.tensor([17, 3, 21], dtype=torch.int32))
    >>> graphs.run(batch), graphs.captured
    (tensor([24, 11, 30]), [4])
    """

    def __init__(
        self,
        step: Callable[[StepBatch], Tensor],
        *,
        max_rows: int,
        table_width: int,
        block_size: int,
        device: torch.device | str,
        capture: Capture | None = None,
    ) -> None:
        self.max_rows = check_count("max_rows", max_rows)
        self.table_width = check_count("table_width", table_width)
        self._max_context_len = self.table_width * check_count("block_size", block_size)
        self._step = step
        if capture is None:
            capture = cuda_graphs() if torch.device(device).type == "cuda" else eagerly
        self._capture = capture
        self._replays: dict[int, Work] = {}
        self._held = 0  # rows of the buffers that are no padding
        with torch.device(device):
            rows = bucket_of(max_rows)
            self._query_starts = torch.arange(rows + 1, dtype=torch.int32)  # (B + 1)
            self._buffers = {
                "tokens": torch.zeros(rows, dtype=torch.int64),  # (B), as those of one dimension
                "positions": torch.zeros(rows, dtype=torch.int64),
                "slots": torch.zeros(rows, dtype=torch.int64),
                "context_lens": torch.ones(rows, dtype=torch.int32),
                "block_tables": torch.full((rows, table_width), NULL_BLOCK, dtype=torch.int32),
            }

    @property
    def captured(self) -> list[int]:
        """Return the buckets that have been captured."""
        return sorted(self._replays)

    def accepts(self, batch: StepBatch) -> bool:
        """Return whether the batch is one for a graph: decode rows only, and room for them."""
        return (
            batch.decode_rows == len(batch.rows)
            and len(batch.rows) <= self.max_rows
            and batch.block_tables.shape[1] <= self.table_width
        )

    def run(self, batch: StepBatch) -> Tensor:
        """Return the answer of a step, the entries of the batch's rows.

        It is overwritten by the next run. A bucket is captured when it is first met.
        """
        if not self.accepts(batch):
            return self._step(batch)
        rows = len(batch.rows)
        self._fill(batch, rows)
        bucket = bucket_of(rows)
        if bucket not in self._replays:
            self._replays[bucket] = self._capture(partial(self._step, self._padded(bucket)))
        return self._replays[bucket]()[:rows]

    def _fill(self, batch: StepBatch, rows: int) -> None:
        """Copy a batch to the top of the buffers; make padding of what the last one left below."""
        for name, padding in PADDING.items():
            buffer, new = self._buffers[name], getattr(batch, name)
            buffer[tuple(map(slice, new.shape))].copy_(new)  # a table may be less wide
            if self._held > rows:
                buffer[rows : self._held] = padding
        self._held = rows

    def _padded(self, bucket: int) -> StepBatch:
        """Return the first rows of the buffers as a batch: what a graph of this bucket reads."""
        return StepBatch(
            **{name: buffer[:bucket] for name, buffer in self._buffers.items()},
            query_starts=self._query_starts[: bucket + 1],
            rows=[(1, self._max_context_len - 1)] * bucket,  # how many, only the device knows
        )
