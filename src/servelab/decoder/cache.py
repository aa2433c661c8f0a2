"""The dense KV cache: one tensor per layer for keys, one for values, reserved at full length.

Models: what engines did before paging: every sequence gets room for its longest possible length.

Assumes: all sequences of a batch have the same length.

Ignores: that much of the room may never be used.
"""

import torch
from torch import Tensor

from servelab.models import ModelSpec
from servelab.units import check_count

# Shapes below: B sequences, K KV heads, S tokens of room, d head_dim.


class DenseCache:
    """Keys and values of a batch, in one tensor each of full length: simple, and wasteful.

    Parameters: ``spec`` the model; ``batch`` sequences of ``max_tokens``; ``device``, ``dtype``.
    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> from servelab import models
    >>> cache = DenseCache(models.get("smollm2-135m"), batch=2, max_tokens=10, dtype=torch.bfloat16)
    >>> cache.nbytes == 2 * models.get("smollm2-135m").sequence_bytes(10)
    True
    """

    def __init__(
        self,
        spec: ModelSpec,
        batch: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        batch, max_tokens = check_count("batch", batch), check_count("max_tokens", max_tokens)
        shapes = _kv_shapes(spec, batch, max_tokens)
        self.spec = spec
        self.keys = [
            torch.zeros(shape, device=device, dtype=dtype) for shape in shapes
        ]  # per layer (B, K, S, d)
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.max_tokens = max_tokens
        self.length = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, each (B, K, T, d); return all so far, (B, K, S, d).

        ``length`` is the decoder's to advance, once every layer has stored its own.
        """
        start, stop = self.length, self.length + keys.shape[2]
        self.keys[layer][:, :, start:stop] = keys
        self.values[layer][:, :, start:stop] = values
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]

    def check_room(self, batch: int, new_tokens: int, spec: ModelSpec, dtype: torch.dtype) -> None:
        """Raise ``ValueError`` where the next step of a model does not fit this cache."""
        shapes = _kv_shapes(spec, batch, self.max_tokens)
        if [tuple(k.shape) for k in self.keys] != shapes or self.keys[0].dtype != dtype:
            raise ValueError(
                f"the cache is for {self.keys[0].shape[0]} sequences of {self.spec.name} in "
                f"{self.keys[0].dtype}, the step is {batch} sequences of {spec.name} in {dtype}"
            )
        if self.length + new_tokens > self.max_tokens:
            raise ValueError(
                f"the cache has room for {self.max_tokens} tokens: it holds {self.length}, "
                f"and {new_tokens} more do not fit"
            )

    @property
    def nbytes(self) -> int:
        """Return the bytes that the tensors occupy."""
        return sum(t.nbytes for t in self.keys + self.values)


def _kv_shapes(spec: ModelSpec, batch: int, max_tokens: int) -> list[tuple[int, int, int, int]]:
    """Return the shape of the keys, and of the values, of each layer: (B, K, S, d)."""
    return [
        (batch, heads.num_kv_heads, max_tokens, heads.head_dim)
        for heads, _ in (layer.plain() for layer in spec.layers)
    ]
