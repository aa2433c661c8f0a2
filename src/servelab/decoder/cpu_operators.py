"""The operators of a layer for a CPU, by kernels in C++.

Models: what lies between the matrices in one pass each, rounded once; and products in bf16 where
torch has no kernels for them (`packing.available`), as on an x86 with neither AVX-512 nor
AVX-NE-CONVERT.

Assumes: what `cpu_kernels` does. The kernels get addresses: formats, shapes and layouts are checked
here, at each call.

Ignores: products that torch has kernels for, packed or not.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from servelab.decoder import packing
from servelab.decoder.cpu_kernels import built
from servelab.decoder.operators import Operators
from servelab.decoder.rope import Rotation

# Shapes below: N tokens, L of them to draw from, V vocabulary, in and out widths of a matrix, D
# width, M MLP width, d head_dim.


class CpuOperators(Operators):
    """Those of torch, but in one pass, rounded once.

    Raises: ``ValueError`` for tensors of two formats, not on the CPU, or not laid out in rows.
    """

    def __init__(self) -> None:
        self.multiplies = not packing.available()  # in bf16

    def build(self, dtype: torch.dtype) -> None:
        """Compile now what a model in this format needs; else that happens at the first use."""
        operators_for(dtype)
        if self.multiplies and dtype == torch.bfloat16:
            built("cpu_linear", dtype)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None
    ) -> Tensor:
        """Return ``x`` (N, in) times ``weight`` (out, in), plus ``bias`` (out), ``added`` (N, out).

        The weight may be packed.
        """
        if not self.multiplies or weight.dtype != torch.bfloat16 or weight.is_mkldnn:
            return super().linear(x, weight, bias, added)
        (tokens, size), (width, _) = x.shape, weight.shape
        out = x.new_empty(tokens, width)
        _check_piece("weight", weight, (width, size))
        x_at, weight_at, out_at = addresses_of(weight.dtype, x, weight, out)
        bias_at = added_at = 0
        if bias is not None:
            _check_piece("bias", bias, (width,))
            (bias_at,) = addresses_of(weight.dtype, bias)
        if added is not None:
            _check_piece("added", added, (tokens, width))
            (added_at,) = addresses_of(weight.dtype, added)
        sizes = tokens, size, width, row_stride(x)
        built("cpu_linear", weight.dtype).linear(x_at, weight_at, bias_at, added_at, out_at, *sizes)
        return out

    def likeliest(self, logits: Tensor) -> Tensor:
        """Return the place of the largest logit of each row (L, V): of equal ones the first.

        It is V where that logit is no finite number: NaN, or overflow.
        """
        out = torch.empty(len(logits), dtype=torch.int64)  # (L)
        (address,) = addresses_of(logits.dtype, logits)
        sizes = *logits.shape, row_stride(logits)
        operators_for(logits.dtype).likeliest(address, out.data_ptr(), *sizes)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return ``x`` (..., D) scaled to unit mean square, times ``weight`` (D)."""
        if x.dim() != 2:
            return self.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
        out = like(x)  # (N, D)
        if weight.shape != x.shape[1:]:
            raise ValueError(f"weight must be {tuple(x.shape[1:])}, got {tuple(weight.shape)}")
        addresses = addresses_of(x.dtype, x, weight, out)
        operators_for(x.dtype).rms_norm(*addresses, *x.shape, row_stride(x), eps)
        return out

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return ``x`` (N, heads, d), a part of qkv, turned by its positions."""
        out, (tokens, _, head_dim) = like(x), x.shape
        if any(part.shape != (tokens, 1, head_dim) for part in rotation):
            raise ValueError(f"rotation must be {(tokens, 1, head_dim)}, got {rotation[0].shape}")
        addresses = addresses_of(x.dtype, x, *rotation, out)
        operators_for(x.dtype).rotate(*addresses, *x.shape, row_stride(x))
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, (N, M), of ``gate_up`` (N, 2 M)."""
        tokens, both = gate_up.shape
        out = torch.empty((tokens, both // 2), dtype=gate_up.dtype)
        addresses = addresses_of(out.dtype, gate_up, out)
        operators_for(out.dtype).gate(*addresses, *out.shape, row_stride(gate_up))
        return out


def like(x: Tensor) -> Tensor:
    """Return room for a tensor of this shape, in one piece whatever ``x`` is a part of."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def operators_for(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernels for tensors of one format."""
    return built("cpu_operators", dtype)


def addresses_of(dtype: torch.dtype, *tensors: Tensor) -> list[int]:
    """Return where tensors lie, all of one format, on the CPU."""
    for tensor in tensors:
        if tensor.dtype != dtype or not tensor.is_cpu:
            raise ValueError(
                f"all tensors must be {dtype} on the CPU, got {tensor.dtype} on {tensor.device}"
            )
    return [tensor.data_ptr() for tensor in tensors]


def row_stride(x: Tensor) -> int:
    """Return how far apart the rows of ``x`` (N, ...) lie, each in one piece, in numbers."""
    row, *within = x.stride()
    if within != ([1] if x.dim() == 2 else [x.shape[2], 1]):
        raise ValueError(f"rows must lie in one piece, got strides {x.stride()} of {x.shape}")
    return row


def _check_piece(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape or not x.is_contiguous():
        raise ValueError(
            f"{name} must be {shape} in one piece, got {tuple(x.shape)}, strides {x.stride()}"
        )
