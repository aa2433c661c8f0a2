"""Rotary positions: how fast each pair of coordinates turns, and the turning.

Models: plain rotary angles, and those of Llama 3.1 and later, which slow the long waves down so
that a model reads further than it was first trained to.

Assumes: pair i is coordinates i and i + d/2, as in published weights of the transformers library;
angles are computed in float32 or the model's dtype, whichever is wider.

Ignores: every other scaling (linear, dynamic, yarn, longrope): the checkpoint reader refuses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from servelab.units import check_count, check_positive

# Cosines and signed sines of the angles, each (T, 1, d); see ``rotate``.
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 slows rotary angles down; names as in its ``config.json``.

    Waves shorter than ``original_max_position_embeddings / high_freq_factor`` stay, those longer
    than ``original_max_position_embeddings / low_freq_factor`` are stretched by ``factor``, between
    them it is gradual.
    Raises: ``TypeError``, ``ValueError`` for values that are not positive, or factors out of order.
    Source: meta-llama/llama-models, models/llama3/model.py (``apply_scaling``).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        check_count("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be less than high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class Rope:
    """The rotary positions of a model.

    Parameters: ``theta`` base of the angles; ``scaling`` None for plain ones.

    >>> Rope(theta=10_000.0).frequencies(head_dim=4, dtype=torch.float64).tolist()
    [1.0, 0.01]
    """

    theta: float = 10_000.0
    scaling: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", check_positive("rope_theta", self.theta))

    def frequencies(
        self,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return the angle by which each pair turns from a position to the next, (d/2).

        In ``dtype`` or float32, whichever is wider.
        """
        wide = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, head_dim, 2, device=device, dtype=wide) / head_dim  # (d/2)
        plain = 1 / self.theta**exponents  # (d/2)
        if self.scaling is None:
            return plain
        by = self.scaling
        waves = by.original_max_position_embeddings * plain / (2 * math.pi)  # per context, (d/2)
        kept = (waves - by.low_freq_factor) / (by.high_freq_factor - by.low_freq_factor)
        kept = kept.clamp(0, 1)  # (d/2)
        return plain * (kept + (1 - kept) / by.factor)

    def rotation(self, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
        """Return what ``rotate`` needs for tokens at ``positions`` (T), in ``dtype``."""
        return turn(positions, self.frequencies(head_dim, dtype, positions.device), dtype)


def turn(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
    """Return the rotation of tokens at ``positions`` (T) for known ``frequencies`` (d/2)."""
    angles = positions.to(frequencies.dtype)[:, None] * frequencies  # (T, d/2)
    cos, sin = angles.cos(), angles.sin()
    cos = torch.cat((cos, cos), dim=-1)[:, None]  # (T, 1, d)
    sin = torch.cat((-sin, sin), dim=-1)[:, None]  # (T, 1, d)
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return ``x`` (..., T, heads, d) rotated: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cos, signed_sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), signed_sin)
