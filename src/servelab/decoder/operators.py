"""What a layer consists of beside attention, in plain torch: products, norms, rotations, gates.

Models: the products with the matrices, which are read once in a step, and the operators between
them, which use each number a few times. A backend brings its own where those of torch take long
(`cpu_operators`).

Assumes: nothing of the device or the number format; torch widens inside where that matters.

Ignores: fusing one into another, which a compiler does (`compiled`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from servelab.decoder.packing import linear
from servelab.decoder.rope import Rotation, rotate

# Shapes below: N tokens, L of them to draw from, V vocabulary, M MLP width, d head_dim.


class Operators:
    """The operators of a layer.

    >>> Operators().rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0).pow(2).mean().item()
    1.0
    >>> Operators().gate(torch.tensor([[0.0, 100.0, 7.0, 0.5]]))
    tensor([[ 0., 50.]])
    >>> Operators().likeliest(torch.tensor([[1.0, 3.0, 3.0], [1.0, torch.nan, 3.0]]))
    tensor([1, 3])
    """

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None
    ) -> Tensor:
        """Return ``x`` (N, in) times ``weight`` (out, in), plus ``bias`` (out), ``added`` (N, out).

        The weight may be packed.
        """
        return linear(x, weight, bias, added)

    def likeliest(self, logits: Tensor) -> Tensor:
        """Return the place of the largest logit of each row (L, V): of equal ones the first.

        It is V where that logit is no finite number: NaN, or overflow.
        """
        top, best = logits.max(-1)  # (L) each; argmax is slower on a CPU
        return torch.where(top.isfinite(), best, logits.shape[-1])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return ``x`` (..., width) scaled to unit mean square, times ``weight`` (width)."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return ``x`` (N, heads, d) turned by its positions."""
        return rotate(x, rotation)

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, (N, M), of ``gate_up`` (N, 2 M)."""
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate) * up


TORCH = Operators()  # they have no state
