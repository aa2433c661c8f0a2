"""Our own decoder without paging: the attention backend that the paged ones are measured against.

Models: what `DenseCache` does, below the same fused model, operators, engine and sampler: each
sequence has one row of the cache at full length, and torch's attention reads the rows where they
are. What a paged backend takes longer is its gathering.

Assumes: every step has the same sequences in the same order, all of the same length.

Ignores: the pool, which stays empty.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from servelab.decoder.attention import ReferenceAttention, StepBatch
from servelab.decoder.cpu_operators import CpuOperators
from servelab.decoder.operators import Operators

# Shapes below: R rows, T new tokens of each, N = R T, S keys, H query heads, K KV heads, d head
# dimension.


class Gathered(ReferenceAttention):
    """The paged backend that gathers, with the operators of the others."""

    operators: Operators = CpuOperators()


class ContiguousRows:
    """Keys and values of ``rows`` sequences, each with room for ``room_tokens``."""

    name, index_bits = "contiguous", 64
    operators: Operators = CpuOperators()

    def __init__(self, rows: int, room_tokens: int) -> None:
        self.rows, self.room_tokens = rows, room_tokens
        # By the address of the layer in the pool, which is all that says which layer is meant.
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._batch: StepBatch | None = None
        self._slots = torch.empty(0)
        self._mask = torch.empty(0)

    def write(self, layer_cache: Tensor, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        """Store ``keys`` and ``values`` (N, K, d) behind those of their rows."""
        if batch is not self._batch:
            self._plan(batch, keys.dtype)
        address = layer_cache.data_ptr()
        if address not in self._layers:
            shape = (self.rows * self.room_tokens, *keys.shape[1:])  # (slots, K, d)
            self._layers[address] = keys.new_zeros(shape), keys.new_zeros(shape)
        for held, new in zip(self._layers[address], (keys, values), strict=True):
            held.index_copy_(0, self._slots, new)

    def attend(
        self, layer_cache: Tensor, q: Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> Tensor:
        """Return what the queries (N, H, d) read, in the same shape."""
        rows, keys, new = len(batch.rows), batch.max_context_len, batch.rows[0][0]
        k, v = (
            held.unflatten(0, (self.rows, self.room_tokens))[:rows, :keys].transpose(1, 2)
            for held in self._layers[layer_cache.data_ptr()]
        )  # (R, K, S, d)
        if new == 1:
            grouped = q.unflatten(1, (k.shape[1], -1))  # (R, K, G, d)
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=self._mask, scale=scale)
            return out.reshape(q.shape)
        own = q.unflatten(0, (rows, new)).transpose(1, 2)  # (R, H, T, d)
        out = F.scaled_dot_product_attention(
            own, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(q.shape)

    def _plan(self, batch: StepBatch, dtype: torch.dtype) -> None:
        new, cached = batch.rows[0]
        if any(row != (new, cached) for row in batch.rows) or (new > 1 and cached):
            raise ValueError(f"the twin takes rows of one length, got {batch.rows[:4]}")
        owner = torch.arange(len(batch.rows)).repeat_interleave(new)  # (N)
        self._slots = owner * self.room_tokens + batch.positions
        # The paged backend has one, of zeros where all rows are of one length.
        self._mask = torch.zeros((len(batch.rows), 1, 1, new + cached), dtype=dtype)
        self._batch = batch
