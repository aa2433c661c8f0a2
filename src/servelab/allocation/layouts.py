"""Where the memory of a cache goes: contiguous reservation and paging behind one interface.

Models: every slot of a cache holds a token, waits for one that will come (reserved), was allocated
and will never be used (internal fragmentation), or belongs to nobody: the rest of a region that had
to be a power of two, and what is free (together: external fragmentation, as Kwon et al. 2023
count it in Figure 2). `ContiguousCache` reserves one region for a sequence's whole life, by one of
three guesses at its length; `PagedCache` takes blocks when tokens come.

Assumes: a layout is told each sequence's output length. Only the oracle and the accounting use it:
what is reserved and what is wasted differ only in hindsight.

Ignores: time, and sharing between sequences (`servelab.allocation.sharing` measures it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Protocol

from servelab.allocation.buddy import BuddyAllocator, CorruptMemory
from servelab.paging.pool import BlockPool, OutOfBlocks
from servelab.paging.table import BlockTable
from servelab.units import check_count, check_fields, check_number


@dataclass(frozen=True)
class Occupancy:
    """The slots of a cache by what they are for, in tokens; they add up to all there are.

    Parameters: ``held`` slots with a token; ``reserved`` ones whose token will come; ``internal``
    allocated ones that will stay empty; ``rounding`` the rest of regions that had to be a power of
    two; ``free``.

    >>> Occupancy(held=20, reserved=10, internal=50, rounding=5, free=15).share("external")
    0.2
    """

    held: int
    reserved: int
    internal: int
    rounding: int
    free: int

    def __post_init__(self) -> None:
        check_fields(self, "held", "reserved", "internal", "rounding", "free", minimum=0)

    @property
    def allocated(self) -> int:
        """Return the slots that sequences have, used or not."""
        return self.held + self.reserved + self.internal

    @property
    def external(self) -> int:
        """Return the slots that no sequence has."""
        return self.rounding + self.free

    @property
    def total(self) -> int:
        """Return all slots."""
        return self.allocated + self.external

    def share(self, part: str) -> float:
        """Return a part, by its name, as a share of all slots."""
        size: int = getattr(self, part)
        return size / self.total


class CacheLayout(Protocol):
    """What the allocators have in common; a sequence is known by the number it was admitted with.

    ``admit`` returns None, and ``grow`` False, where there is no memory for it now; then nothing
    has changed. ``room`` is how many tokens a sequence can grow by before it needs more memory.
    ``unit_parts`` names, for each unit or block in order of address, the first part of
    ``Occupancy`` that has a slot there.
    """

    @property
    def num_slots(self) -> int: ...
    def admit(self, prompt_tokens: int, output_tokens: int) -> int | None: ...
    def room(self, sequence: int) -> int: ...
    def grow(self, sequence: int, num_tokens: int = 1) -> bool: ...
    def release(self, sequence: int) -> None: ...
    def occupancy(self) -> Occupancy: ...
    def unit_parts(self) -> list[str]: ...
    def check(self) -> None: ...


#: Tokens that are reserved, by policy, for a sequence of (prompt, output) in a context of (max).
RESERVATIONS: MappingProxyType[str, Callable[[int, int, int], int]] = MappingProxyType(
    {
        "max": lambda prompt, output, context: context,
        "power-of-two": lambda prompt, output, context: min(
            prompt + (1 << (output - 1).bit_length()), context
        ),
        "oracle": lambda prompt, output, context: prompt + output,
    }
)


@dataclass
class _Region:
    """A sequence in its region: where it begins, in units; its tokens now, at its end, reserved."""

    start: int
    num_tokens: int
    final_tokens: int
    reserved_tokens: int


class ContiguousCache:
    """A cache that gives each sequence one region for as long as it runs.

    Parameters: ``num_units`` of ``unit_tokens`` slots; ``policy`` one of ``RESERVATIONS``;
    ``max_tokens`` a sequence may have.
    Raises: ``ValueError`` for an unknown policy; as ``BuddyAllocator``.
    Source: Yu et al. 2022 (Orca), as Kwon et al. 2023, section 6.1, describe their three variants.

    >>> cache = ContiguousCache(num_units=12, unit_tokens=16, policy="oracle", max_tokens=128)
    >>> cache.admit(prompt_tokens=30, output_tokens=10)  # 40 tokens, 3 units, a region of 4
    0
    >>> cache.occupancy()
    Occupancy(held=30, reserved=10, internal=0, rounding=24, free=128)
    """

    def __init__(
        self, num_units: int, unit_tokens: int, policy: str, max_tokens: int = 2048
    ) -> None:
        if policy not in RESERVATIONS:
            raise ValueError(f"policy must be one of {', '.join(RESERVATIONS)}, got {policy!r}")
        self.policy = policy
        self.unit_tokens = check_count("unit_tokens", unit_tokens)
        self.max_tokens = check_count("max_tokens", max_tokens)
        longest_units = -(-max_tokens // unit_tokens)
        self.buddy = BuddyAllocator(num_units, max_units=1 << (longest_units - 1).bit_length())
        self._sequences: dict[int, _Region] = {}
        self._numbers = count()

    @property
    def num_slots(self) -> int:
        """Return all slots."""
        return self.buddy.num_units * self.unit_tokens

    def admit(self, prompt_tokens: int, output_tokens: int) -> int | None:
        """Return the number of a sequence that now holds its prompt, None if no region fits.

        Raises: ``TypeError``, ``ValueError`` for counts below 1, or more than ``max_tokens``.
        """
        final = _final_tokens(prompt_tokens, output_tokens, self.max_tokens)
        reserved = RESERVATIONS[self.policy](prompt_tokens, output_tokens, self.max_tokens)
        start = self.buddy.allocate(-(-reserved // self.unit_tokens))
        if start is None:
            return None
        number = next(self._numbers)
        self._sequences[number] = _Region(start, prompt_tokens, final, reserved)
        return number

    def room(self, sequence: int) -> int:
        """Return the tokens the sequence can grow by: to its final length, which is reserved."""
        region = self._sequences[sequence]
        return region.final_tokens - region.num_tokens

    def grow(self, sequence: int, num_tokens: int = 1) -> bool:
        """Add tokens to a sequence: always possible.

        Raises: ``ValueError`` beyond its prompt and output.
        """
        region = self._sequences[sequence]
        if region.num_tokens + num_tokens > region.final_tokens:
            raise ValueError(f"sequence {sequence} ends at {region.final_tokens} tokens")
        region.num_tokens += num_tokens
        return True

    def release(self, sequence: int) -> None:
        """Free the region of a sequence."""
        self.buddy.free(self._sequences.pop(sequence).start)

    def occupancy(self) -> Occupancy:
        """Return where the slots are now."""
        regions = self._sequences.values()
        reserved = sum(region.reserved_tokens for region in regions)
        final = sum(region.final_tokens for region in regions)
        held = sum(region.num_tokens for region in regions)
        free = self.buddy.num_free * self.unit_tokens
        return Occupancy(
            held=held,
            reserved=final - held,
            internal=reserved - final,
            rounding=self.num_slots - free - reserved,
            free=free,
        )

    def unit_parts(self) -> list[str]:
        """Return what each unit is for, by its first slot.

        >>> cache = ContiguousCache(num_units=12, unit_tokens=16, policy="oracle", max_tokens=128)
        >>> cache.admit(prompt_tokens=30, output_tokens=10)
        0
        >>> cache.unit_parts()[6:]
        ['free', 'free', 'held', 'held', 'reserved', 'rounding']
        """
        parts = ["free"] * self.buddy.num_units
        sizes = dict(self.buddy.used_regions())
        for region in self._sequences.values():
            start = region.start
            for part, end_tokens in (
                ("held", region.num_tokens),
                ("reserved", region.final_tokens),
                ("internal", region.reserved_tokens),
                ("rounding", sizes[region.start] * self.unit_tokens),
            ):
                end = region.start - (-end_tokens // self.unit_tokens)
                parts[start:end] = [part] * (end - start)
                start = max(start, end)
        return parts

    def check(self) -> None:
        """Compare the regions with the sequences and with the memory.

        Raises: ``CorruptMemory``.
        """
        self.buddy.check()
        starts = sorted(region.start for region in self._sequences.values())
        used = [start for start, _ in self.buddy.used_regions()]
        if starts != used:
            raise CorruptMemory(f"regions are used at {used}, sequences have {starts}")


class PagedCache:
    """A cache that gives each sequence a block whenever its last one is full.

    Parameters: ``num_blocks`` of ``block_size`` slots, the null block not included; ``watermark``
    the share of them, rounded down, that admission leaves free for the sequences that run.
    Raises: ``ValueError`` for a watermark outside 0 to 1; as ``BlockPool``.
    Source: Kwon et al. 2023, section 4.3; the watermark, of 0.01, from the paper's artifact
    (sosp-ae-39/sosp-ae-astra, astra/cacheflow/master/block_manager.py).

    >>> cache = PagedCache(num_blocks=12, block_size=16)
    >>> cache.admit(prompt_tokens=30, output_tokens=10)
    0
    >>> cache.occupancy()
    Occupancy(held=30, reserved=0, internal=2, rounding=0, free=160)
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: float = 0.01) -> None:
        if not 0 <= check_number("watermark", watermark) < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, got {watermark}")
        self.pool = BlockPool(check_count("num_blocks", num_blocks) + 1, block_size)
        self.kept_free = int(watermark * num_blocks)
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_slots(self) -> int:
        """Return all slots, those of the null block not included."""
        return self._slots(self.pool.shape.num_blocks - 1)

    def admit(self, prompt_tokens: int, output_tokens: int) -> int | None:
        """Return the number of a sequence that now holds its prompt, None if blocks are lacking.

        Raises: ``TypeError``, ``ValueError`` for counts below 1, or a sequence that the pool could
        never hold to its end.
        """
        _final_tokens(prompt_tokens, output_tokens, self.num_slots - self._slots(self.kept_free))
        if self.pool.shape.blocks_for(prompt_tokens) + self.kept_free > self.pool.num_free:
            return None
        table = BlockTable(self.pool)
        table.append(prompt_tokens)
        self._tables[table.id] = table
        return table.id

    def room(self, sequence: int) -> int:
        """Return the empty slots in the last block of a sequence."""
        return -self._tables[sequence].num_tokens % self.pool.block_size

    def grow(self, sequence: int, num_tokens: int = 1) -> bool:
        """Add tokens to a sequence; False where its last block is full and no other is free."""
        try:
            self._tables[sequence].append(num_tokens)
        except OutOfBlocks:
            return False
        return True

    def release(self, sequence: int) -> None:
        """Free the blocks of a sequence."""
        self._tables.pop(sequence).free()

    def occupancy(self) -> Occupancy:
        """Return where the slots are now."""
        held = sum(table.num_tokens for table in self._tables.values())
        free = self._slots(self.pool.num_free)
        return Occupancy(
            held=held, reserved=0, internal=self.num_slots - free - held, rounding=0, free=free
        )

    def unit_parts(self) -> list[str]:
        """Return what each block is for, the null block left out: held or free."""
        return ["held" if refs else "free" for refs in self.pool.refs[1:]]

    def check(self) -> None:
        """Compare the pool with the tables.

        Raises: ``CorruptMemory``.
        """
        holders = Counter(block for table in self._tables.values() for block in table.blocks)
        held = {block: refs for block, refs in enumerate(self.pool.refs) if refs}
        if held != holders:
            raise CorruptMemory(f"blocks are held as {held}, tables hold {dict(holders)}")

    def _slots(self, blocks: int) -> int:
        return blocks * self.pool.block_size


def _final_tokens(prompt_tokens: int, output_tokens: int, most: int) -> int:
    """Return the length of a sequence at its end, if it can ever be reached."""
    check_count("prompt_tokens", prompt_tokens)
    final = prompt_tokens + check_count("output_tokens", output_tokens)
    if final > most:
        raise ValueError(f"a sequence has at most {most} tokens here, {final} are asked for")
    return final


def mean_shares(samples: Iterable[Occupancy]) -> dict[str, float]:
    """Return the mean share of each part over samples of one cache; held to free add up to 1.

    Raises: ``ValueError`` for no samples.

    >>> full, empty = Occupancy(10, 0, 0, 0, 0), Occupancy(0, 0, 0, 0, 10)
    >>> mean_shares([full, empty])["held"]
    0.5
    """
    taken = list(samples)
    if not taken:
        raise ValueError("a mean needs at least one sample")
    parts = ("held", "reserved", "internal", "rounding", "free", "external")
    slots = sum(one.total for one in taken)
    return {part: sum(getattr(one, part) for one in taken) / slots for part in parts}
