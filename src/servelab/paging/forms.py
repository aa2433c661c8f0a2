"""Block tables of a batch in the two forms that attention kernels read.

Models: the padded form (one row of equal width per sequence, vLLM) and the compressed form (all
rows end to end with their limits, FlashInfer: ``kv_indptr``, ``kv_page_indices``,
``last_page_len``). Both describe the same slots.

Assumes: a kernel reads no token beyond a sequence's length; padding names the null block, so that
even a kernel that loads the entry reads nobody's data.

Ignores: the device: a runner copies these integers, and may keep and update them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from servelab.paging.pool import NULL_BLOCK
from servelab.paging.table import BlockTable


def padded(tables: Sequence[BlockTable]) -> list[list[int]]:
    """Return one row of blocks per table, filled up with the null block to the longest.

    >>> from servelab.paging import BlockPool
    >>> pool = BlockPool(num_blocks=6, block_size=4)
    >>> tables = [BlockTable(pool), BlockTable(pool)]
    >>> tables[0].append(5), tables[1].append(4)
    ([], [])
    >>> padded(tables)
    [[1, 2], [3, 0]]
    """
    rows = [list(table.blocks) for table in tables]
    width = max(map(len, rows), default=0)
    return [row + [NULL_BLOCK] * (width - len(row)) for row in rows]


@dataclass(frozen=True)
class CsrTables:
    """The compressed form: row i is ``indices[indptr[i]:indptr[i + 1]]``.

    Parameters: ``last_page_len`` tokens in the last block of each row, 1 to the block size; of an
    empty row the block size, so that ``block_size * (blocks - 1) + last_page_len`` is the length
    of every row.
    """

    indptr: tuple[int, ...]
    indices: tuple[int, ...]
    last_page_len: tuple[int, ...]


def csr(tables: Sequence[BlockTable]) -> CsrTables:
    """Return the tables in compressed form.

    Source: flashinfer-ai/flashinfer, docs/tutorials/kv_layout.rst.

    >>> from servelab.paging import BlockPool
    >>> table = BlockTable(BlockPool(num_blocks=6, block_size=4))
    >>> table.append(5)
    []
    >>> csr([table, table])
    CsrTables(indptr=(0, 2, 4), indices=(1, 2, 1, 2), last_page_len=(1, 1))
    """
    rows = [table.blocks for table in tables]
    return CsrTables(
        indptr=tuple(accumulate(map(len, rows), initial=0)),
        indices=tuple(chain.from_iterable(rows)),
        last_page_len=tuple(
            table.num_tokens - table.pool.block_size * (len(row) - 1)
            for table, row in zip(tables, rows, strict=True)
        ),
    )
