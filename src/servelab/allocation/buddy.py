"""The buddy allocator: contiguous regions of a power of two, split in halves and merged again.

Models: memory in units, as regions of 1, 2, 4, ... up to ``max_units``; a request takes the
smallest free region that holds it, halved until it fits, and a freed region merges with the other
half of its parent (its buddy) while that is free too (Knowlton 1965; Orca's allocator as rebuilt
for the vLLM paper, sosp-ae-39/sosp-ae-astra, orca/cacheflow/master/block_manager.py).

Assumes: a memory that is no power of two begins as the largest regions that fit, from the left.
The region freed last is used first.

Ignores: what is in a unit.
"""

from __future__ import annotations

from collections.abc import Iterator

from servelab.units import check_count


class CorruptMemory(RuntimeError):
    """What is held of a memory, and what its holders have, contradict each other: a bug."""


class BuddyAllocator:
    """Free and used regions of a memory, each from ``start`` to before ``start + size``, in units.

    Parameters: ``num_units`` of the whole memory; ``max_units`` of the largest region, a power of
    two.
    Raises: ``TypeError``, ``ValueError`` for counts below 1 or another ``max_units``.

    >>> memory = BuddyAllocator(num_units=11, max_units=8)
    >>> list(memory.free_regions())
    [(0, 8), (8, 2), (10, 1)]
    >>> memory.allocate(3), memory.allocate(3), memory.allocate(3)  # None: no region is left
    (0, 4, None)
    >>> memory.free(0), memory.free(4), list(memory.free_regions())
    (None, None, [(0, 8), (8, 2), (10, 1)])
    """

    def __init__(self, num_units: int, max_units: int) -> None:
        self.num_units = check_count("num_units", num_units)
        self.max_units = check_count("max_units", max_units)
        if max_units & (max_units - 1):
            raise ValueError(f"max_units must be a power of two, got {max_units}")
        self._used: dict[int, int] = {}  # size by start
        # Starts of the free regions of each size; a dict, because it keeps the order of freeing.
        self._free: dict[int, dict[int, None]] = {}
        start, size = 0, max_units
        while size:
            starts = range(start, num_units - size + 1, size)
            self._free[size] = dict.fromkeys(starts)
            start += size * len(starts)
            size //= 2

    @property
    def num_free(self) -> int:
        """Return the units in free regions."""
        return sum(size * len(starts) for size, starts in self._free.items())

    def free_regions(self) -> Iterator[tuple[int, int]]:
        """Yield start and size of each free region, in order of address."""
        yield from sorted((start, size) for size, starts in self._free.items() for start in starts)

    def used_regions(self) -> Iterator[tuple[int, int]]:
        """Yield start and size of each used region, in order of address."""
        yield from sorted(self._used.items())

    def size_for(self, units: int) -> int:
        """Return the size of the region that ``units`` take: the next power of two.

        Raises: ``TypeError``, ``ValueError`` for less than 1 or more than ``max_units``.
        """
        size = 1 << (check_count("units", units) - 1).bit_length()
        if size > self.max_units:
            raise ValueError(f"units must be at most {self.max_units}, got {units}")
        return size

    def allocate(self, units: int) -> int | None:
        """Return the start of a region of at least ``units``; None, and no change, if none is free.

        Raises: as ``size_for``.
        """
        size = found = self.size_for(units)
        while not self._free[found]:
            found *= 2
            if found > self.max_units:
                return None
        start, _ = self._free[found].popitem()
        while found > size:
            found //= 2
            self._free[found][start + found] = None
        self._used[start] = size
        return start

    def free(self, start: int) -> None:
        """Give the region that begins at ``start`` back, merged with every buddy that is free.

        Raises: ``ValueError`` where no used region begins there.
        """
        if start not in self._used:
            raise ValueError(f"no used region begins at unit {start}")
        size = self._used.pop(start)
        while size < self.max_units and (start ^ size) in self._free[size]:
            del self._free[size][start ^ size]
            start &= ~size
            size *= 2
        self._free[size][start] = None

    def check(self) -> None:
        """Compare the regions with what they must be: a tiling of the memory, merged where it can.

        Raises: ``CorruptMemory`` with all that is wrong.
        """
        problems = list(self._problems())
        if problems:
            raise CorruptMemory("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        end = 0
        for start, size in sorted([*self.free_regions(), *self.used_regions()]):
            if start != end:
                yield f"a region begins at unit {start}, the one before ends at {end}"
            if start % size or size & (size - 1):
                yield f"a region of {size} units begins at {start}"
            end = start + size
        if end != self.num_units:
            yield f"the regions end at unit {end}, the memory at {self.num_units}"
        for start, size in self.free_regions():
            if size < self.max_units and (start ^ size) in self._free[size]:
                yield f"the free regions of {size} units at {start} and {start ^ size} are buddies"
