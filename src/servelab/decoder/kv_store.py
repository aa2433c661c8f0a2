"""Where the keys and values of all sequences live: one tensor, cut into blocks.

Models: the pool of `servelab.paging` as memory: every layer has a tensor of keys and one of values,
``num_blocks`` blocks of ``block_size`` slots each, and one block table per sequence serves all
layers. A second pool in the CPU's memory takes the blocks of sequences that are swapped out.

Assumes: all layers have the same KV heads, as a `PagedDecoder` has; those with a sliding window
keep every token.

Ignores: who owns a block: the scheduler's tables say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from servelab.models import ModelSpec
from servelab.paging import Copy, PoolShape
from servelab.units import GiB


class KvStore:
    """Keys and values, ``data`` of shape (layers, 2, blocks, block_size, K, d), and ``swap``.

    Parameters: ``spec`` the model; ``shape`` of the pool; ``num_swap_blocks`` of the CPU's pool,
    its null block included (0: none); ``device``, ``dtype``.
    Raises: ``MemoryError`` for a pool that is too large.

    >>> from servelab import models
    >>> spec = models.get("smollm2-135m")
    >>> store = KvStore(spec, PoolShape(num_blocks=5, block_size=16), dtype=torch.bfloat16)
    >>> store.data.nbytes == 5 * 16 * spec.kv_bytes_per_token("bf16")
    True
    """

    def __init__(
        self,
        spec: ModelSpec,
        shape: PoolShape,
        num_swap_blocks: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec, self.shape = spec, shape
        self.data = self._pool(shape.num_blocks, device, dtype)
        self.swap = self._pool(num_swap_blocks, "cpu", dtype)
        if self.data.is_cuda and num_swap_blocks:
            self.swap = self.swap.pin_memory()

    def _pool(self, blocks: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        heads = self.spec.layers[0].plain()[0]
        vectors = heads.num_kv_heads, heads.head_dim
        size = (len(self.spec.layers), 2, blocks, self.shape.block_size, *vectors)
        try:
            return torch.zeros(size, device=device, dtype=dtype)
        except RuntimeError as error:  # what torch raises where there is no such memory
            wanted = torch.empty(size, device="meta", dtype=dtype).nbytes
            raise MemoryError(
                f"a pool of {blocks} blocks needs {wanted / GiB:.1f} GiB on {device}: {error}"
            ) from error

    def poison(self) -> None:
        """Fill every slot with NaN: whatever is read before it is written shows in the logits."""
        self.data.fill_(torch.nan)
        self.swap.fill_(torch.nan)


def transfer(source: Tensor, destination: Tensor, copies: Sequence[Copy]) -> None:
    """Copy blocks of one pool (first of each pair) to blocks of another, or of itself (second).

    One after the other: a later one may read what an earlier one wrote.
    """
    for old, new in copies:
        destination[:, :, new].copy_(source[:, :, old], non_blocking=True)
