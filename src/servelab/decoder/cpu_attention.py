"""The backend for a CPU that reads the paged cache in place, by kernels in C++.

Models: what fused kernels save: rows of one token read their keys and values where they lie, once,
instead of a copy that was gathered before.

Assumes: what `cpu_kernels` does. The kernels get addresses: what they cannot see for themselves is
checked here, shapes and layouts at each call, tables and lengths once in a step.

Ignores: chunks of prompts, which multiply more than they read: they stay with the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from servelab.decoder.attention import Part, ReferenceAttention, StepBatch, readings
from servelab.decoder.cpu_kernels import built, compiler
from servelab.decoder.cpu_operators import (
    CpuOperators,
    addresses_of,
    like,
    operators_for,
    row_stride,
)
from servelab.decoder.operators import Operators
from servelab.models import ModelSpec

# Shapes below: N tokens, R rows of one token, W blocks of the longest row, H query heads, K KV
# heads, d head_dim; a layer's cache is (2, blocks, block_size, K, d).

_NO_WINDOW = 2**31 - 1  # the window that holds every position
_OPERATORS = CpuOperators()


class CpuAttention(ReferenceAttention):
    """Writes, and rows of one token, by the kernels; chunks as the reference does.

    Parameters: ``spec`` and ``dtype`` of the model, whose kernels are compiled now; those of others
    (None) when they are first needed.
    Raises: ``RuntimeError`` where this machine has no compiler; ``ValueError`` for a format without
    kernels; in a step, ``ValueError`` as `CpuOperators`, and for slots, blocks or lengths that the
    cache does not have.
    """

    name = "cpu"
    operators: Operators = _OPERATORS

    def __init__(self, spec: ModelSpec | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._slots = torch.empty(0)  # the last that were checked
        compiler()
        if spec is not None:
            heads, _ = spec.layers[0].plain()
            _OPERATORS.build(dtype)
            _attention(dtype, heads.num_q_heads, heads.num_kv_heads, heads.head_dim)

    def write(self, layer_cache: Tensor, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        """Store ``keys`` and ``values`` (N, K, d): each slot is assigned, nothing is added."""
        _, blocks, block_size, kv_heads, head_dim = layer_cache.shape
        if batch.slots is not self._slots:
            _check_slots(batch.slots, len(keys), blocks * block_size)
            _check_cache(layer_cache)
            self._slots = batch.slots
        addresses = addresses_of(layer_cache.dtype, keys, values, layer_cache)
        sizes = (
            len(keys),
            kv_heads * head_dim,
            row_stride(keys),
            row_stride(values),
            blocks * block_size,
        )
        operators_for(keys.dtype).store(*addresses, batch.slots.data_ptr(), *sizes)

    def parts(self, batch: StepBatch, layer_cache: Tensor) -> Sequence[Part]:
        """Return the rows of one token, as one part, then each chunk."""
        _check_cache(layer_cache)
        found: list[Part] = [InPlace(batch, layer_cache)] if batch.decode_rows else []
        if batch.decode_rows < len(batch.rows):
            found += readings(batch, layer_cache, chunks_only=True)
        return found


class InPlace:
    """The rows of one token, which read their blocks where they are: a part of a step.

    Raises: ``ValueError`` where a row's context is empty, or not in its table or the cache.
    """

    def __init__(self, batch: StepBatch, layer_cache: Tensor) -> None:
        rows, (_, blocks, block_size, *_) = batch.decode_rows, layer_cache.shape
        self.tables = batch.block_tables[:rows].to(torch.int32).contiguous()  # (R, W)
        self.lens = batch.context_lens[:rows].to(torch.int32).contiguous()  # (R)
        used = torch.arange(self.tables.shape[1]) * block_size < self.lens[:, None]  # (R, W)
        named = self.tables[used]
        if not 0 < self.lens.min() <= self.lens.max() <= self.tables.shape[1] * block_size:
            raise ValueError(f"contexts of {self.lens.tolist()} tokens do not fit their tables")
        if not 0 <= named.min() <= named.max() < blocks:
            raise ValueError(f"the cache has {blocks} blocks, a table names {named.max().item()}")

    def attend(self, layer_cache: Tensor, q: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the output of the rows' queries, (R, H, d)."""
        rows, width = self.tables.shape
        heads, (_, blocks, block_size, kv_heads, head_dim) = q.shape[1], layer_cache.shape
        own = q if len(q) == rows else q[:rows]
        out = like(own)
        addresses = addresses_of(layer_cache.dtype, own, out, layer_cache)
        tables = self.tables.data_ptr(), self.lens.data_ptr()
        sizes = rows, kv_heads, width, row_stride(own), blocks, block_size
        run = _attention(q.dtype, heads, kv_heads, head_dim)
        run.attend(*addresses, *tables, *sizes, scale, _NO_WINDOW if window is None else window)
        return out


def _attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> ctypes.CDLL:
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    return built("cpu_attention", dtype, GROUP=heads // kv_heads, HEAD_DIM=head_dim)


def _check_cache(layer_cache: Tensor) -> None:
    if not layer_cache.is_contiguous():
        raise ValueError(f"a layer's cache must lie in one piece, got {layer_cache.stride()}")


def _check_slots(slots: Tensor, tokens: int, room: int) -> None:
    if slots.dtype != torch.int64 or not slots.is_contiguous() or len(slots) != tokens:
        raise ValueError(
            f"slots must be {tokens} int64 in one piece, got {len(slots)} of {slots.dtype}, "
            f"strides {slots.stride()}"
        )
    if tokens and not 0 <= slots.min() <= slots.max() < room:
        raise ValueError(f"the cache has {room} slots, got slot {slots.max().item()}")
