"""The attention backend that reads the paged cache in place, by the kernels of `triton_kernels`.

Models: a step as at most two launches: one for the rows of one new token, one for the chunks. A
launch is cut into programs, one for each row, KV head, tile of queries and split of the keys; where
rows and heads alone are too few to keep every multiprocessor busy, the keys are split further.

Assumes: one CUDA device; or, on a CPU, Triton's interpreter: ``TRITON_INTERPRET=1`` in the
environment before the kernels are first imported. Rows of one new token come first.

Ignores: float64, which the tensor cores of most GPUs do not multiply: the reference backend does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from servelab.decoder.operators import TORCH, Operators
from servelab.units import check_count

if TYPE_CHECKING:
    from servelab.decoder.attention import StepBatch

#: Programs for each multiprocessor: several run at once, and the last to end should end early.
PROGRAMS_PER_SM = 8
MAX_SPLITS = 128  # what merges them holds all at once
MAX_HEAD_DIM = 256
NO_WINDOW = 2**31 - 1  # the window that holds every position

# Shapes below: N new tokens, R rows, W blocks of a table row, H query heads, K KV heads, S splits,
# d head_dim.


@dataclass(frozen=True)
class Tiles:
    """The sizes of one program's work, and how many warps and loads in flight it gets.

    Parameters: ``lines`` queries times heads; ``keys`` of a tile; ``dim`` head_dim up to a power of
    two; ``warps``; ``stages`` of the loop over the keys that are under way at once.
    """

    lines: int
    keys: int
    dim: int
    warps: int
    stages: int

    @classmethod
    def choose(cls, group: int, head_dim: int, element_bytes: int, is_decode: bool) -> Tiles:
        """Return the tiles for ``group`` query heads per KV head and elements of so many bytes.

        Tensor cores multiply 16 lines at least: a decode row fills the first ``group`` of them, and
        waits for memory: the next tile of keys and of values is on its way while one is multiplied
        (which takes five stages, since the table's entries come before both). A chunk has lines
        enough for larger tiles; in fp32, where three products in tf32 stand for one, fewer of them
        fit the registers.

        >>> Tiles.choose(group=4, head_dim=128, element_bytes=2, is_decode=True)
        Tiles(lines=16, keys=64, dim=128, warps=4, stages=5)
        >>> Tiles.choose(group=4, head_dim=80, element_bytes=4, is_decode=False)
        Tiles(lines=32, keys=32, dim=128, warps=4, stages=3)
        """
        dim = max(16, _power_of_two(head_dim))
        is_wide = element_bytes > 2
        keys = min(32 if is_wide else 64, 16 * 1024 // (dim * element_bytes))
        lines = 16 if is_decode else (32 if is_wide else 128) // max(1, dim // 128)
        warps = 4 if is_decode or is_wide else 8
        return cls(max(lines, _power_of_two(group)), keys, dim, warps, 5 if is_decode else 3)


def choose_splits(programs: int, max_context_len: int, tile_keys: int, multiprocessors: int) -> int:
    """Return between how many programs the keys of one tile of queries are divided.

    Enough for `PROGRAMS_PER_SM` on each multiprocessor, and never more than there are tiles of
    keys. The host decides it from the longest context that can occur, so that the shape of a launch
    is fixed inside a CUDA graph; each row then divides the keys that it really has.

    Parameters: ``programs`` without splits; ``max_context_len`` of any row.

    >>> choose_splits(programs=8, max_context_len=4096, tile_keys=64, multiprocessors=132)
    64
    >>> choose_splits(programs=64 * 8, max_context_len=4096, tile_keys=64, multiprocessors=132)
    3
    """
    wanted = -(-PROGRAMS_PER_SM * multiprocessors // programs)
    return max(1, min(wanted, -(-max_context_len // tile_keys), MAX_SPLITS))


class _Part(NamedTuple):
    """What one launch computes: rows, their tokens, and the most new tokens of any of the rows."""

    rows: range
    tokens: range
    longest: int


class TritonAttention:
    """Store and attend by the kernels of `triton_kernels`; fp32, fp16 and bf16.

    Parameters: ``device`` of every tensor (None: CUDA where there is one); ``num_splits`` None:
    `choose_splits` decides.
    Attributes: ``name``; ``index_bits`` 64: slots are computed in 64 bits, whatever the pool.
    Raises: ``RuntimeError`` where no Triton is installed, or there is neither a CUDA device nor the
    interpreter.
    """

    name = "triton"
    index_bits = 64
    operators: Operators = TORCH

    def __init__(
        self, device: torch.device | str | None = None, num_splits: int | None = None
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if num_splits is not None:
            check_count("num_splits", num_splits)
        self.num_splits = num_splits
        try:
            from servelab.decoder import triton_kernels as kernels  # decides the mode: not earlier
        except ModuleNotFoundError as error:
            raise RuntimeError(
                f"the backend 'triton' needs the package {error.name}, which is not installed; "
                "the backend 'reference' needs torch only"
            ) from None
        if kernels.INTERPRETED is not (self.device.type == "cpu"):
            raise RuntimeError(
                f"the backend 'triton' was asked for on {self.device}, but its kernels are "
                f"{'interpreted' if kernels.INTERPRETED else 'compiled'} in this process: compiled "
                "ones need a CUDA device, and on a CPU TRITON_INTERPRET=1 must be in the "
                "environment before they are first imported"
            )
        self._kernels = kernels
        self._multiprocessors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count
            if self.device.type == "cuda"
            else 1
        )

    def write(self, layer_cache: Tensor, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        """Store ``keys`` and ``values`` (N, K, d) in the batch's slots of (2, blocks, bs, K, d).

        Raises: as ``attend``.
        """
        self._check(layer_cache, keys)
        keys, values = _packed(keys), _packed(values)  # (N, K, d)
        elements = keys.shape[1] * keys.shape[2]
        self._kernels.store_kernel[(len(keys),)](
            keys,
            values,
            *layer_cache,  # of keys, of values
            batch.slots,
            keys.stride(0),
            values.stride(0),
            ELEMENTS=elements,
            TILE=_power_of_two(elements),
        )

    def attend(
        self, layer_cache: Tensor, q: Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> Tensor:
        """Return what the queries (N, H, d) read, in the same shape; the batch is written before.

        Parameters: ``scale`` of the scores; ``window`` the newest keys a query sees (None: all).
        Raises: ``TypeError`` for a dtype without a kernel, ``ValueError`` for shapes without one,
        and for rows of one token behind chunks.
        """
        self._check(layer_cache, q)
        q = _packed(q)  # (N, H, d)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in _parts(batch):
            self._launch(part, layer_cache, q, out, batch, scale, window or NO_WINDOW)
        return out

    def _launch(
        self,
        part: _Part,
        layer_cache: Tensor,
        q: Tensor,
        out: Tensor,
        batch: StepBatch,
        scale: float,
        window: int,
    ) -> None:
        """Attend for the rows and tokens of ``part``, into ``out``."""
        heads, head_dim = q.shape[1:]
        block_size, kv_heads = layer_cache.shape[2:4]
        group = heads // kv_heads
        tiles = Tiles.choose(group, head_dim, layer_cache.element_size(), part.longest == 1)
        query_tiles = -(-part.longest // (tiles.lines // group))
        splits = self.num_splits or choose_splits(
            len(part.rows) * kv_heads * query_tiles,
            min(window + part.longest - 1, batch.max_context_len),
            tiles.keys,
            self._multiprocessors,
        )
        target, log_sums = out, out  # without splits, no log-sums are stored
        if splits > 1:
            wide = {"dtype": torch.float32, "device": q.device}
            log_sums = torch.empty((len(part.tokens), heads, splits), **wide)
            target = torch.empty((len(part.tokens), heads, splits, head_dim), **wide)
        self._kernels.attend_kernel[(query_tiles * splits, kv_heads, len(part.rows))](
            q,
            *layer_cache,  # keys, values
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            target,
            log_sums,
            part.rows.start,
            part.tokens.start,
            splits,
            q.stride(0),
            batch.block_tables.stride(0),
            window,
            scale * math.log2(math.e),
            NUM_KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE_LINES=tiles.lines,
            TILE_KEYS=tiles.keys,
            TILE_DIM=tiles.dim,
            DOT_DTYPE=self._kernels.DOT_DTYPES[_name(q.dtype)],
            IS_PARTIAL=splits > 1,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if splits > 1:
            self._kernels.merge_kernel[(len(part.tokens) * heads,)](
                target,
                log_sums,
                out[part.tokens.start :],
                splits,
                HEAD_DIM=head_dim,
                TILE_SPLITS=_power_of_two(splits),
                TILE_DIM=tiles.dim,
            )

    def _check(self, layer_cache: Tensor, vectors: Tensor) -> None:
        """Refuse what the kernels do not compute, or would compute wrongly."""
        if _name(vectors.dtype) not in self._kernels.DOT_DTYPES:
            raise TypeError(
                f"the backend 'triton' computes in {', '.join(self._kernels.DOT_DTYPES)}, "
                f"got {_name(vectors.dtype)}; the backend 'reference' takes any"
            )
        if not layer_cache.is_contiguous():
            raise ValueError("a layer's cache must be contiguous: slots are counted in it")
        heads, head_dim = vectors.shape[1:]
        kv_heads, cached_dim = layer_cache.shape[3:]
        if head_dim != cached_dim or head_dim > MAX_HEAD_DIM or heads % kv_heads:
            raise ValueError(
                f"{heads} heads of {head_dim} do not go with {kv_heads} KV heads of {cached_dim}: "
                f"head_dim must be one, at most {MAX_HEAD_DIM}, and groups of heads equal"
            )


def _parts(batch: StepBatch) -> list[_Part]:
    """Return the launches of a batch."""
    decode_rows, rows = batch.decode_rows, len(batch.rows)
    parts = []
    if decode_rows:
        parts.append(_Part(range(decode_rows), range(decode_rows), longest=1))
    if decode_rows < rows:
        chunks, tokens = range(decode_rows, rows), range(decode_rows, len(batch.tokens))
        longest = max(new for new, _ in batch.rows[decode_rows:])
        parts.append(_Part(chunks, tokens, longest))
    return parts


def _packed(vectors: Tensor) -> Tensor:
    """Return (N, heads, d) with each token's vectors contiguous; tokens may lie apart."""
    inner = (vectors.shape[2], 1)
    return vectors if vectors.stride()[1:] == inner else vectors.contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _power_of_two(value: int) -> int:
    """Return the smallest power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()
