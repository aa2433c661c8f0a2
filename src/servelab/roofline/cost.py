"""Work and traffic, as numbers that add up.

Models: FLOP (a multiply-add is two), and the bytes read from and written to one named level of
memory: here the device memory (HBM on a GPU, DRAM on a CPU).

Assumes: compulsory traffic: every operand is read once, every result written once. Real kernels may
move more, never less, so an intensity from here is an upper bound.

Ignores: caches, and FLOP on anything but numbers (indices, addresses, masks).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from servelab.units import check_fields


@dataclass(frozen=True)
class Cost:
    """The work and the traffic of an operator, or of a sum of operators.

    Parameters: ``flop``; ``read_bytes``, ``written_bytes`` of device memory; ``operators`` what a
    sum is made of (empty for a single operator).
    Raises: ``TypeError``, ``ValueError`` for anything but whole numbers from 0.

    >>> a, b = Cost(200, 60, 40), Cost(10, 100, 0)
    >>> total = a + b
    >>> total.flop, total.bytes, total.intensity
    (210, 200, 1.05)
    """

    flop: int
    read_bytes: int
    written_bytes: int
    operators: tuple[Operator, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "flop", "read_bytes", "written_bytes", minimum=0)

    @classmethod
    def total(cls, operators: Iterable[Operator]) -> Cost:
        """Return the sum of operators, each times its count, and keep them.

        >>> Cost.total([Operator("up_proj", Cost(100, 8, 2), count=3)]).flop
        300
        """
        kept = tuple(operators)
        return cls(
            sum(o.cost.flop * o.count for o in kept),
            sum(o.cost.read_bytes * o.count for o in kept),
            sum(o.cost.written_bytes * o.count for o in kept),
            kept,
        )

    def __add__(self, other: object) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost.total(self.parts + other.parts)

    @property
    def parts(self) -> tuple[Operator, ...]:
        """Return the operators of this cost; a single cost is one unnamed operator."""
        return self.operators or (Operator("", self),)

    @property
    def bytes(self) -> int:
        """Return all bytes moved: reads and writes."""
        return self.read_bytes + self.written_bytes

    @property
    def intensity(self) -> float:
        """Return FLOP per byte moved; infinite where nothing is moved.

        >>> Cost(2, 1, 1).intensity
        1.0
        """
        return self.flop / self.bytes if self.bytes else float("inf")

    def by_name(self) -> dict[str, Cost]:
        """Return the cost of all operators of one name together, in order of first appearance.

        >>> twice = Cost.total([Operator("a", Cost(1, 0, 0)), Operator("a", Cost(2, 0, 0))])
        >>> twice.by_name()["a"].flop
        3
        """
        grouped: dict[str, list[Operator]] = {}
        for operator in self.parts:
            grouped.setdefault(operator.name, []).append(operator)
        return {name: Cost.total(group) for name, group in grouped.items()}


@dataclass(frozen=True)
class Operator:
    """One kind of operator of a step: its name, the cost of one execution, and how often it runs.

    Raises: ``TypeError``, ``ValueError`` where ``count`` is not at least 1.
    """

    name: str
    cost: Cost
    count: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "count")
