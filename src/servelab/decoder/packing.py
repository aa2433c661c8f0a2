"""Matrices in bf16 as a CPU's kernels read them: packed once, instead of at every product.

Models: oneDNN's product of a few rows and a matrix. It reads the matrix in tiles of its own order;
from one in plain order it reads slower. torch's compiler packs what it freezes (`compiled`); these
are the operators that it uses, called without it.

Assumes: the names that these operators have in torch 2.13; they are not public. On an x86 they need
AVX-512 or AVX-NE-CONVERT; without these `cpu_operators` brings a kernel of our own.

Ignores: other formats: fp32 gains nothing for one row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The order of the tiles depends on it. Packed for 16 rows, 1 to 128 rows are served about as well
# as by an order of their own.
_ROWS = 16


def available() -> bool:
    """Return whether torch has kernels for products in bf16 on this CPU, those of oneDNN.

    >>> isinstance(available(), bool)
    True
    """
    has_them = torch.backends.mkldnn.is_available()  # oneDNN, of which a build of torch may be bare
    return has_them and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> nn.Parameter:
    """Return a weight (out, in) packed: the values are the same, their order is the kernel's.

    Raises: ``RuntimeError`` where that is not ``available``.

    >>> not available() or pack(torch.ones(32, 16, dtype=torch.bfloat16)).is_mkldnn
    True
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return nn.Parameter(packed, requires_grad=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
    """Return what a linear layer makes of ``x`` (N, in), plus ``added`` (N, out).

    Parameters: ``weight`` (out, in), packed or not; ``bias`` (out).

    >>> x, weight = torch.ones(1, 16).bfloat16(), torch.ones(1, 16).bfloat16()
    >>> linear(x, weight, None, added=torch.ones(1, 1).bfloat16())
    tensor([[17.]], dtype=torch.bfloat16)
    """
    out: Tensor  # (N, out)
    if weight.is_mkldnn and added is None:
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    elif weight.is_mkldnn:
        out = torch.ops.mkldnn._linear_pointwise.binary(x, added, weight, bias, "add")
    elif added is None:
        out = F.linear(x, weight, bias)
    else:
        out = torch.addmm(added, x, weight.t())
        out = out if bias is None else out + bias
    return out
