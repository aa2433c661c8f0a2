"""How a step reads and writes the paged cache: the interface, and the backend in plain torch.

Models: a step as rows of new tokens behind cached ones. Keys and values of the new tokens go to
their slots; then every query reads the keys of its own row through the row's block table, up to
its own position (aligned to the last key, not to the first) and, with a sliding window, not
further back than that.

Assumes: the runner sorts the rows: those of one token (decode) first, then chunks of prompts. Every
slot of a row's context has been written.

Ignores: speed on a GPU: gathering copies what a fused kernel reads in place (`triton_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from servelab.paging import NULL_BLOCK, BlockTable

# Shapes below: N new tokens of R rows, W blocks of the longest row, S slots that they have, H query
# heads, K KV heads, G = H / K, d head_dim; a layer's cache is (2, blocks, block_size, K, d).


@dataclass
class StepBatch:
    """One step as tensors on the device, and its sizes on the host.

    Parameters: ``tokens`` (N,) int64, of all rows, end to end; ``positions`` (N,) int64;
    ``slots`` (N,) int64, where each token's key and value go; ``block_tables`` (R, W) int32, filled
    up with the null block; ``query_starts`` (R + 1,) int32: row r is ``tokens[query_starts[r]:
    query_starts[r + 1]]``; ``context_lens`` (R,) int32, keys that a row has in the end, cached and
    new; ``rows`` (new, cached) of each, on the host; ``max_new_tokens``, ``max_context_len`` the
    largest of any row. A batch does not change once it is used.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    rows: list[tuple[int, int]]
    max_new_tokens: int
    max_context_len: int

    @classmethod
    def of(
        cls,
        rows: Sequence[tuple[int, int]],
        tables: Sequence[BlockTable],
        device: torch.device | str = "cpu",
    ) -> StepBatch:
        """Return the step of ``rows`` (new, cached) behind their block tables, every token 0.

        The plain form of what the runner keeps on the device from step to step.
        Raises: ``ValueError`` for positions that a table does not have, a table too many or few.

        >>> from servelab.paging import BlockPool
        >>> table = BlockTable(BlockPool(num_blocks=4, block_size=4))
        >>> table.append(6)
        []
        >>> batch = StepBatch.of([(2, 4)], [table])
        >>> batch.positions, batch.slots, batch.block_tables
        (tensor([4, 5]), tensor([8, 9]), tensor([[1, 2]], dtype=torch.int32))
        """
        paired = list(zip(rows, tables, strict=True))
        contexts = [new + cached for new, cached in rows]
        blocks = [
            table.blocks[: table.pool.shape.blocks_for(context)]
            for table, context in zip(tables, contexts, strict=True)
        ]
        width = max(map(len, blocks))
        padded = [[*row, *[NULL_BLOCK] * (width - len(row))] for row in blocks]
        positions = [p for new, cached in rows for p in range(cached, cached + new)]
        slots = [s for (new, cached), table in paired for s in table.slots(cached, cached + new)]
        starts = [0, *accumulate(new for new, _ in rows)]
        with torch.device(device):
            return cls(
                tokens=torch.zeros(len(positions), dtype=torch.int64),
                positions=torch.tensor(positions),
                slots=torch.tensor(slots),
                block_tables=torch.tensor(padded, dtype=torch.int32),
                query_starts=torch.tensor(starts, dtype=torch.int32),
                context_lens=torch.tensor(contexts, dtype=torch.int32),
                rows=list(rows),
                max_new_tokens=max(new for new, _ in rows),
                max_context_len=max(contexts),
            )


class AttentionBackend(Protocol):
    """Whoever writes keys and values into a layer's cache, and attends to them.

    Attributes: ``name``; ``index_bits`` of the integers with which it addresses a layer's cache.
    """

    name: str
    index_bits: int

    def write(self, layer_cache: Tensor, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        """Store ``keys`` and ``values`` (N, K, d) in the batch's slots of (2, blocks, bs, K, d)."""

    def attend(
        self, layer_cache: Tensor, q: Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> Tensor:
        """Return what the queries (N, H, d) read, in the same shape; the batch is written before.

        Parameters: ``scale`` of the scores; ``window`` the newest keys a query sees (None: all).
        """


class ReferenceAttention:
    """Gather the keys and values of a row, then torch's attention: the oracle of the kernels.

    Rows of one token are one call: their query heads stand in groups behind their KV head, so that
    no key is repeated. Where a row is shorter than the longest, it reads its own first token over
    and over, masked: a mask alone would not do, since 0 times NaN is NaN, and a slot that nobody
    wrote may hold one. Each chunk of a prompt is a call of its own.

    >>> cache = torch.full((2, 3, 4, 1, 2), torch.nan)  # 3 blocks of 4 slots, 1 head of width 2
    >>> one = StepBatch(
    ...     tokens=torch.tensor([7]), positions=torch.tensor([0]), slots=torch.tensor([8]),
    ...     block_tables=torch.tensor([[2]]), query_starts=torch.tensor([0, 1]),
    ...     context_lens=torch.tensor([1]), rows=[(1, 0)], max_new_tokens=1, max_context_len=1)
    >>> attention, key = ReferenceAttention(), torch.ones(1, 1, 2)
    >>> attention.write(cache, key, 5 * key, one)
    >>> attention.attend(cache, key, one, scale=1.0, window=None)
    tensor([[[5., 5.]]])
    """

    name = "reference"
    index_bits = 64

    def __init__(self) -> None:
        self._batch: StepBatch | None = None  # whose reading plan, below, is at hand
        self._decode: _Reading | None = None
        self._chunks: list[_Chunk] = []

    def write(self, layer_cache: Tensor, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        """Store ``keys`` and ``values`` (N, K, d): each slot is assigned, nothing is added."""
        flat = layer_cache.flatten(1, 2)  # (2, slots, K, d)
        flat[0].index_copy_(0, batch.slots, keys)
        flat[1].index_copy_(0, batch.slots, values)

    def attend(
        self, layer_cache: Tensor, q: Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> Tensor:
        """Return what the queries (N, H, d) read, in the same shape."""
        if self._batch is not batch:  # the first layer of a step: the others read alike
            self._plan(batch, layer_cache.shape[2])
        flat = layer_cache.flatten(1, 2)  # (2, slots, K, d)
        keys, values = flat[0], flat[1]
        parts = []
        if self._decode is not None:
            parts.append(self._decode.attend(keys, values, q, scale, window))
        parts += [chunk.attend(keys, values, q, scale, window) for chunk in self._chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)  # (N, H, d)

    def _plan(self, batch: StepBatch, block_size: int) -> None:
        decode_rows = sum(new == 1 for new, _ in batch.rows)
        # The slot of each position of each row, those behind the last block's end included.
        offsets = torch.arange(block_size, device=batch.slots.device)  # (block_size)
        slots = batch.block_tables.long()[:, :, None] * block_size + offsets  # (R, W, block_size)
        slots = slots.flatten(1)  # (R, S)
        self._decode, self._chunks, self._batch = None, [], batch
        if decode_rows:
            longest = max(1 + cached for _, cached in batch.rows[:decode_rows])
            lens = batch.context_lens[:decode_rows]
            self._decode = _Reading(slots[:decode_rows, :longest], lens)
        start = decode_rows
        for row in range(decode_rows, len(batch.rows)):
            new, cached = batch.rows[row]
            self._chunks.append(_Chunk(slots[row, : cached + new], start, new))
            start += new


class _Reading:
    """What the rows of one token read: ``slots`` (R, S) and how many of them, ``lens`` (R)."""

    def __init__(self, slots: Tensor, lens: Tensor) -> None:
        self.rows, self.keys = slots.shape
        self.lens = lens[:, None]  # (R, 1)
        self.place = torch.arange(self.keys, device=slots.device)  # (S)
        live = self.place < self.lens  # (R, S)
        self.index = torch.where(live, slots, slots[:, :1]).flatten()  # (R S)
        self.masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(
        self, keys: Tensor, values: Tensor, q: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return the output of the first R queries, (R, H, d)."""
        heads, head_dim = q.shape[1:]
        shape = (self.rows, self.keys, *keys.shape[1:])
        k = keys.index_select(0, self.index).view(shape).transpose(1, 2)  # (R, K, S, d)
        v = values.index_select(0, self.index).view(shape).transpose(1, 2)  # (R, K, S, d)
        grouped = q[: self.rows].unflatten(1, (k.shape[1], -1))  # (R, K, G, d)
        out = F.scaled_dot_product_attention(
            grouped, k, v, attn_mask=self._mask(window, q.dtype), scale=scale
        )
        return out.reshape(self.rows, heads, head_dim)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what to add to the scores, (R, 1, 1, S): 0, or minus infinity."""
        mask = self.masks.get((window, dtype))
        if mask is None:
            seen = self.place < self.lens  # (R, S)
            if window is not None:
                seen = seen & (self.place >= self.lens - window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            mask = mask.masked_fill_(~seen, -torch.inf)[:, None, None]
            self.masks[window, dtype] = mask
        return mask


class _Chunk:
    """What a row of several tokens reads: ``slots`` (S), for ``new`` queries from ``start`` on."""

    def __init__(self, slots: Tensor, start: int, new: int) -> None:
        self.index, self.start, self.new = slots, start, new
        self.masks: dict[int | None, Tensor] = {}

    def attend(
        self, keys: Tensor, values: Tensor, q: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return the output of the chunk's queries, (new, H, d)."""
        k = keys.index_select(0, self.index).transpose(0, 1)[None]  # (1, K, S, d)
        v = values.index_select(0, self.index).transpose(0, 1)[None]  # (1, K, S, d)
        own = q[self.start : self.start + self.new].transpose(0, 1)[None]  # (1, H, new, d)
        keys_before = len(self.index) - self.new
        if keys_before or (window is not None and window < self.new):
            out = F.scaled_dot_product_attention(
                own, k, v, attn_mask=self._mask(window), scale=scale, enable_gqa=True
            )
        else:  # top and bottom of the mask align: torch has a faster way
            out = F.scaled_dot_product_attention(
                own, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
        return out[0].transpose(0, 1)  # (new, H, d)

    def _mask(self, window: int | None) -> Tensor:
        """Return which keys each query sees, (new, S): aligned to the last key."""
        mask = self.masks.get(window)
        if mask is None:
            place = torch.arange(len(self.index), device=self.index.device)  # (S)
            query = place[len(self.index) - self.new :, None]  # (new, 1)
            mask = place <= query
            if window is not None:
                mask &= place > query - window
            self.masks[window] = mask
        return mask
