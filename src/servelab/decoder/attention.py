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
from functools import cached_property
from itertools import accumulate, chain
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from servelab.decoder.operators import TORCH, Operators
from servelab.paging import BlockTable, padded

# Shapes below: N new tokens of R rows, W blocks of the longest row, S slots that they have, H query
# heads, K KV heads, G = H / K, d head_dim; a layer's cache is (2, blocks, block_size, K, d).


@dataclass
class StepBatch:
    """One step as tensors on the device, and its sizes on the host.

    Parameters: ``tokens`` (N,) int64, of all rows, end to end; ``positions`` (N,) int64;
    ``slots`` (N,) int64, where each token's key and value go; ``block_tables`` (R, W) int32, filled
    up with the null block; ``query_starts`` (R + 1,) int32: row r is ``tokens[query_starts[r]:
    query_starts[r + 1]]``; ``context_lens`` (R,) int32, keys that a row has in the end, cached and
    new; ``rows`` (new, cached) of each, on the host. A batch does not change once it is used.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    rows: list[tuple[int, int]]

    @cached_property
    def decode_rows(self) -> int:
        """Return how many rows have one new token: the first ones.

        Raises: ``ValueError`` where one of them is behind a chunk.
        """
        is_decode = [new == 1 for new, _ in self.rows]
        count = sum(is_decode)
        if not all(is_decode[:count]):
            raise ValueError(f"rows of one new token must come first, got {self.rows}")
        return count

    @cached_property
    def max_context_len(self) -> int:
        """Return the keys that the longest row has in the end."""
        return max(map(sum, self.rows))

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
        spans = [range(cached, cached + new) for new, cached in rows]
        slots = [table.slots(own.start, own.stop) for own, table in zip(spans, tables, strict=True)]
        starts = accumulate(map(len, spans), initial=0)
        with torch.device(device):
            positions = torch.tensor([*chain(*spans)])
            return cls(
                tokens=torch.zeros_like(positions),
                positions=positions,
                slots=torch.tensor([*chain(*slots)]),
                block_tables=torch.tensor(padded(tables), dtype=torch.int32),
                query_starts=torch.tensor([*starts], dtype=torch.int32),
                context_lens=torch.tensor([own.stop for own in spans], dtype=torch.int32),
                rows=list(rows),
            )


class AttentionBackend(Protocol):
    """Whoever writes keys and values into a layer's cache, and attends to them.

    Attributes: ``name``; ``index_bits`` of the integers with which it addresses a layer's cache;
    ``operators`` between the matrices that go with it.
    """

    name: str
    index_bits: int
    operators: Operators

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
    no key is repeated. Each chunk of a prompt is a call of its own.

    >>> cache = torch.full((2, 3, 4, 1, 2), torch.nan)  # 3 blocks of 4 slots, 1 head of width 2
    >>> one = StepBatch(
    ...     tokens=torch.tensor([7]), positions=torch.tensor([0]), slots=torch.tensor([8]),
    ...     block_tables=torch.tensor([[2]]), query_starts=torch.tensor([0, 1]),
    ...     context_lens=torch.tensor([1]), rows=[(1, 0)])
    >>> attention, key = ReferenceAttention(), torch.ones(1, 1, 2)
    >>> attention.write(cache, key, 5 * key, one)
    >>> attention.attend(cache, key, one, scale=1.0, window=None)
    tensor([[[5., 5.]]])
    """

    name = "reference"
    index_bits = 64
    operators: Operators = TORCH

    def __init__(self) -> None:
        self._batch: StepBatch | None = None  # whose readings are at hand
        self._parts: Sequence[Part] = []

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
            self._parts, self._batch = self.parts(batch, layer_cache), batch
        outs = [part.attend(layer_cache, q, scale, window) for part in self._parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)  # (N, H, d)

    def parts(self, batch: StepBatch, layer_cache: Tensor) -> Sequence[Part]:
        """Return the rows of one token, as one part, then each chunk."""
        return readings(batch, layer_cache)


class Part(Protocol):
    """Some rows of a step, and how they attend: alike in all layers."""

    def attend(self, layer_cache: Tensor, q: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the output of the rows' queries; ``q`` (N, H, d) is that of all rows."""


def readings(batch: StepBatch, layer_cache: Tensor, chunks_only: bool = False) -> list[Reading]:
    """Return what the rows of one token read, together, then what each chunk does.

    Parameters: ``layer_cache``, any layer's; ``chunks_only``: without the first.
    """
    block_size = layer_cache.shape[2]
    # The slot of each position of each row, those behind the last block's end included.
    offsets = torch.arange(block_size, device=batch.slots.device)  # (block_size)
    slots = batch.block_tables.long()[:, :, None] * block_size + offsets  # (R, W, block_size)
    slots = slots.flatten(1)  # (R, S)
    decode_rows = batch.decode_rows
    groups = [range(decode_rows)] if decode_rows and not chunks_only else []
    groups += [range(row, row + 1) for row in range(decode_rows, len(batch.rows))]
    found, start = [], decode_rows if chunks_only else 0  # the first token
    for group in groups:
        of, new = slice(group.start, group.stop), batch.rows[group.start][0]
        longest = max(sum(batch.rows[row]) for row in group)
        own, lens = slots[of, :longest], batch.context_lens[of]
        found.append(Reading(layer_cache, own, lens, new, start))
        start += len(group) * new
    return found


class Reading:
    """What R rows of one token read, or one row of several: alike in all layers.

    Parameters: ``layer_cache``, any layer's; ``slots`` (R, S) of their keys, and how many of them
    each has, ``lens`` (R); ``new`` tokens of a row, the first of all at ``start``.
    """

    def __init__(
        self, layer_cache: Tensor, slots: Tensor, lens: Tensor, new: int, start: int
    ) -> None:
        (rows, self.keys), (_, blocks, block_size, *vectors) = slots.shape, layer_cache.shape
        self.new, self.tokens = new, slice(start, start + rows * new)
        self.shape = rows, 2, self.keys, *vectors  # of what is gathered: (R, 2, S, K, d)
        self.place = torch.arange(self.keys, device=slots.device)  # (S)
        self.lens = lens[:, None, None]  # (R, 1, 1)
        # A shorter row reads its own first token over and over, masked. A mask alone would not do:
        # 0 times NaN is NaN, and a slot that nobody wrote may hold one.
        slots = torch.where(self.place < lens[:, None], slots, slots[:, :1])  # (R, S)
        # A row's keys, then its values: a thread then attends to the rows that it copied itself.
        self.index = torch.stack((slots, slots + blocks * block_size), dim=1).flatten()  # (R 2 S)
        # Copied by 16 bytes: torch wakes its threads for more than 32,768 numbers of any size. For
        # 64 KB, so many of 2 bytes, that saves nothing, and on a busy machine takes milliseconds.
        wide = layer_cache.element_size() * vectors[1] % 16 == 0
        self.unit = torch.complex128 if wide else layer_cache.dtype
        self.masks: dict[int | None, Tensor] = {}

    def gather(self, layer_cache: Tensor) -> Tensor:
        """Return a copy of the rows' keys and of their values, (2, R, K, S, d)."""
        pool = layer_cache.view(self.unit).flatten(0, 2)  # (2 slots, K, ...): keys, then values
        both = pool.index_select(0, self.index).view(layer_cache.dtype).view(self.shape)
        return both.permute(1, 0, 3, 2, 4)  # from (R, 2, S, K, d)

    def attend(self, layer_cache: Tensor, q: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the output of the rows' queries, (R new, H, d)."""
        k, v = self.gather(layer_cache)  # (R, K, S, d)
        q = q[self.tokens]  # (R new, H, d)
        # (R, K, G, d): a group of heads is G queries of its KV head; of a chunk (1, H, new, d)
        own = q.unflatten(1, (k.shape[1], -1)) if self.new == 1 else q.transpose(0, 1)[None]
        is_causal = self.keys == self.new and (window is None or window >= self.new)
        mask = None if is_causal else self._mask(window, q.dtype)  # torch is faster without one
        out = F.scaled_dot_product_attention(
            own, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )
        return out.reshape(q.shape) if self.new == 1 else out[0].transpose(0, 1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what to add to the scores, (R, 1, new, S): 0, or minus infinity."""
        if window not in self.masks:
            behind = torch.arange(self.new - 1, -1, -1, device=self.place.device)[:, None]
            last = self.lens - 1 - behind  # (R, new, 1): the last key that a query sees is its own
            seen = self.place <= last  # (R, new, S)
            if window is not None:
                seen &= self.place > last - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self.masks[window] = mask.masked_fill_(~seen, -torch.inf)[:, None]
        return self.masks[window]
