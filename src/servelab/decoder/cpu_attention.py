"""The backend for a CPU that reads the paged cache in place, and its operators, by kernels in C++.

Models: what fused kernels save: rows of one token read their keys and values where they lie, once,
instead of a copy that was gathered before; what lies between the matrices is one pass each.

Assumes: what `cpu_kernels` does; a cache on the CPU.

Ignores: chunks of prompts, which multiply more than they read, and float16: the reference has both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from servelab.decoder.attention import Reads, ReferenceAttention, StepBatch, readings
from servelab.decoder.cpu_kernels import TYPES, built, compiler
from servelab.decoder.operators import Operators
from servelab.decoder.rope import Rotation
from servelab.models import ModelSpec

# Shapes below: N tokens, R rows of one token, W blocks of the longest row, H query heads, K KV
# heads, D width, M MLP width, d head_dim; a layer's cache is (2, blocks, block_size, K, d).

_NO_WINDOW = 2**31 - 1  # the window that holds every position


class CpuOperators(Operators):
    """Those of torch, but in one pass, rounded once; chosen by the first tensor's format."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return ``x`` (..., D) scaled to unit mean square, times ``weight`` (D)."""
        if x.dtype not in TYPES:
            return super().rms_norm(x, weight, eps)
        if x.dim() > 2:
            return self.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
        out = torch.empty_like(x)  # (N, D)
        _operators(x).rms_norm(*_addresses(x, weight, out), *x.shape, x.stride(0), eps)
        return out

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return ``x`` (N, heads, d), a part of qkv, turned by its positions."""
        if x.dtype not in TYPES:
            return super().rotate(x, rotation)
        out = torch.empty_like(x)
        _operators(x).rotate(*_addresses(x, *rotation, out), *x.shape, x.stride(0))
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, (N, M), of ``gate_up`` (N, 2 M)."""
        if gate_up.dtype not in TYPES:
            return super().gate(gate_up)
        tokens, both = gate_up.shape
        out = torch.empty((tokens, both // 2), dtype=gate_up.dtype)
        _operators(out).gate(*_addresses(gate_up, out), *out.shape, gate_up.stride(0))
        return out


class CpuAttention(ReferenceAttention):
    """Writes, and rows of one token, by the kernels; chunks as the reference does.

    Parameters: ``spec`` and ``dtype`` of the model, whose kernels are compiled now; those of others
    (None) when they are first needed.
    Raises: ``RuntimeError`` where this machine has no compiler.
    """

    name = "cpu"
    operators: Operators = CpuOperators()

    def __init__(self, spec: ModelSpec | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        compiler()
        if spec is not None and dtype in TYPES:
            heads, _ = spec.layers[0].plain()
            built("cpu_operators", dtype)
            _attention(dtype, heads.num_q_heads, heads.num_kv_heads, heads.head_dim)

    def write(self, layer_cache: Tensor, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        """Store ``keys`` and ``values`` (N, K, d): each slot is assigned, nothing is added."""
        if layer_cache.dtype not in TYPES:
            super().write(layer_cache, keys, values, batch)
            return
        _, blocks, block_size, kv_heads, head_dim = layer_cache.shape
        tensors = _addresses(keys, values, layer_cache, batch.slots)
        sizes = len(keys), kv_heads * head_dim, keys.stride(0), values.stride(0)
        _operators(keys).store(*tensors, *sizes, blocks * block_size)

    def reads(self, batch: StepBatch, layer_cache: Tensor) -> Sequence[Reads]:
        """Return what the rows of one token read, together, then what each chunk does."""
        if layer_cache.dtype not in TYPES or not batch.decode_rows:
            return super().reads(batch, layer_cache)
        return [InPlace(batch), *readings(batch, layer_cache, first=batch.decode_rows)]


class InPlace:
    """What the rows of one token read: alike in all layers."""

    def __init__(self, batch: StepBatch) -> None:
        rows = batch.decode_rows
        self.tables = batch.block_tables[:rows].to(torch.int32).contiguous()  # (R, W)
        self.lens = batch.context_lens[:rows].to(torch.int32)  # (R)

    def attend(self, layer_cache: Tensor, q: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the output of the rows' queries, (R, H, d)."""
        rows, width = self.tables.shape
        heads, (_, blocks, block_size, kv_heads, head_dim) = q.shape[1], layer_cache.shape
        own = q if len(q) == rows else q[:rows]
        out = torch.empty_like(own)
        sizes = rows, kv_heads, width, own.stride(0), blocks, block_size
        run = _attention(q.dtype, heads, kv_heads, head_dim)
        tensors = _addresses(own, out, layer_cache, self.tables, self.lens)
        run.attend(*tensors, *sizes, scale, window or _NO_WINDOW)
        return out


def _operators(x: Tensor) -> ctypes.CDLL:
    return built("cpu_operators", x.dtype)


def _attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> ctypes.CDLL:
    return built("cpu_attention", dtype, GROUP=heads // kv_heads, HEAD_DIM=head_dim)


def _addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
