"""What a step sends to the device: its numbers in one copy, block tables only where they changed.

Models: a device that is reached over a link on which every transfer costs some microseconds, and
where waiting for one costs the overlap of host and device.

Assumes: a table changes only from the block of its next token on: earlier blocks are shared, cached
or full, and no longer written.

Ignores: what the numbers mean (`runner`, `sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from servelab.paging import NULL_BLOCK, BlockTable


def upload(
    device: torch.device, integers: Sequence[list[int]], reals: Sequence[list[float]] = ()
) -> list[Tensor]:
    """Return lists of numbers as int64 and float64 tensors on the device, in one copy.

    The copy starts from pinned memory and is not waited for.

    >>> upload(torch.device("cpu"), [[1, 2], [3]], [[0.5]])
    [tensor([1, 2]), tensor([3]), tensor([0.5000], dtype=torch.float64)]
    """
    parts = [np.array(numbers, np.int64) for numbers in integers]
    parts += [np.array(numbers, np.float64).view(np.int64) for numbers in reals]
    staged = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        staged = staged.pin_memory().to(device, non_blocking=True)
    sent = staged.split([len(part) for part in parts])
    return [*sent[: len(integers)], *(own.view(torch.float64) for own in sent[len(integers) :])]


class DeviceTables:
    """Block tables on the device, one row per sequence that runs; only what changed is sent.

    A row is known by the table's id, which no other table of the pool ever has. Of a known row the
    entries before the first new token's block are there already: only the last block of a table can
    be exchanged (copy on write), and it is the one that is written next. What a row does not use
    names the null block.

    Parameters: ``block_size`` of the pool; ``device``.

    >>> from servelab.paging import BlockPool
    >>> pool = BlockPool(num_blocks=8, block_size=4)
    >>> tables, table = DeviceTables(pool.block_size, torch.device("cpu")), BlockTable(pool)
    >>> table.append(6)
    []
    >>> tables.begin([table.id], width=2)
    >>> row = tables.place(table, 0, 6, last_slot=table.slot(5))
    >>> tables.write(*upload(tables.entries.device, [tables.places, tables.blocks]))
    >>> tables.entries[row].tolist()
    [1, 2, 0, 0]
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.entries = torch.zeros((0, 0), dtype=torch.int32, device=device)  # (rows, width)
        self.places: list[int] = []  # to write to, in the flattened entries ...
        self.blocks: list[int] = []  # ... and the blocks that go there
        # By table: its row, how many of the entries are not null, and the last of these.
        self._rows: dict[int, tuple[int, int, int]] = {}
        self._free: list[int] = []

    def forget(self) -> None:
        """Send every table anew from now on."""
        self.entries = self.entries.new_zeros((0, 0))

    def begin(self, ids: Sequence[int], width: int) -> None:
        """Make room for the tables of a step, by their ids, the longest of ``width`` blocks.

        Rows of other sequences are given up where there are not enough.
        """
        self.places, self.blocks = [], []
        rows, room = self.entries.shape
        if len(ids) > rows or width > room:  # twice what is needed, so that it stays rare
            size = max(rows, 2 * len(ids)), max(room, 2 * width)
            self.entries = self.entries.new_zeros(size)
            self._rows, self._free = {}, list(range(size[0]))
        elif len(set(ids).difference(self._rows)) > len(self._free):
            self._rows = {id: self._rows[id] for id in ids if id in self._rows}
            used = {row for row, *_ in self._rows.values()}
            self._free = [row for row in range(rows) if row not in used]

    def place(self, table: BlockTable, start: int, stop: int, last_slot: int) -> int:
        """Return the row of a table; note which of its entries have to be written.

        Parameters: ``start`` to before ``stop``, the positions that this step computes;
        ``last_slot`` that of the last of them.
        """
        size = self.block_size
        begin, end, block = start // size, (stop - 1) // size + 1, last_slot // size
        row, sent, _ = self._rows.get(table.id, (-1, 0, NULL_BLOCK))
        width = self.entries.shape[1]
        if row < 0:  # nothing is known of the row it gets, to its end
            row, begin, sent = self._free.pop(), 0, width
        self.places.extend(range(row * width + begin, row * width + max(end, sent)))
        self.blocks.extend((*table.blocks[begin:end], *[NULL_BLOCK] * (sent - end)))
        self._rows[table.id] = row, end, block
        return row

    def place_each(
        self, tables: Sequence[BlockTable], positions: Sequence[int], slots: Sequence[int]
    ) -> list[int]:
        """Return the rows of tables that get one new token each, as ``place`` does.

        Parameters: ``positions`` of the tokens, and their ``slots``.
        """
        size, known, rows = self.block_size, self._rows, []
        for table, position, slot in zip(tables, positions, slots, strict=True):
            row, sent, last = known.get(table.id, (-1, 0, NULL_BLOCK))
            if sent != position // size + 1 or last != slot // size:  # its block is not there yet
                row = self.place(table, position, position + 1, slot)
            rows.append(row)
        return rows

    def write(self, places: Tensor, blocks: Tensor) -> None:
        """Write what was noted, ``blocks`` to ``places``, both on the device."""
        self.entries.view(-1).index_copy_(0, places, blocks.to(torch.int32))
