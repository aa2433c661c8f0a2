"""Two numbers that turn a bound into a prediction, fitted on measured steps.

Models: a step takes its bound over an efficiency, the share of the bound's speed that is reached,
plus an overhead that every step pays, whatever its size: ``T = bound / efficiency + overhead``.
This is what `servelab.serving.RooflineRunner` takes.

Assumes: errors matter in proportion to the time, so the fit is that of least squares of
``predicted / measured - 1``; efficiency is at most 1 and overhead at least 0, or the bound would be
none.

Ignores: that prefill and decode, matrices and attention may have efficiencies of their own: two
numbers cannot say it. The error on steps that were not fitted shows how much that costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from servelab.units import check_positive


@dataclass(frozen=True)
class Calibration:
    """An efficiency in (0, 1] and an overhead per step.

    >>> Calibration(0.5, 1.0).seconds(4.0)
    9.0
    """

    efficiency: float
    overhead_seconds: float

    def seconds(self, bound_seconds: float) -> float:
        """Return the predicted time of a step with this bound."""
        return bound_seconds / self.efficiency + self.overhead_seconds

    def errors(self, bounds: Sequence[float], measured: Sequence[float]) -> list[float]:
        """Return predicted over measured, minus 1, of each step."""
        pairs = zip(bounds, measured, strict=True)
        return [self.seconds(bound) / seconds - 1 for bound, seconds in pairs]


def fit(bounds: Sequence[float], measured: Sequence[float]) -> Calibration:
    """Return the calibration with the least squares of relative errors.

    Parameters: ``bounds`` seconds of each step, one operator after another; ``measured`` seconds.
    Raises: ``ValueError`` for fewer than two different bounds, or seconds that are not positive.

    >>> found = fit([1e-3, 2e-3, 5e-3], [2.5e-3, 4.5e-3, 10.5e-3])
    >>> round(found.efficiency, 6), round(found.overhead_seconds, 6)
    (0.5, 0.0005)
    """
    if len(bounds) != len(measured) or len(set(bounds)) < 2:
        raise ValueError("a fit needs the measured seconds of at least two different bounds")
    for value in (*bounds, *measured):
        check_positive("seconds", value)
    # Divided by the measured time, both unknowns stand before known numbers: x / e + y * o = 1.
    xs = [bound / seconds for bound, seconds in zip(bounds, measured, strict=True)]
    ys = [1 / seconds for seconds in measured]
    xx, yy, xy = (math.fsum(a * b for a, b in zip(u, v, strict=True)) for u, v in
                  ((xs, xs), (ys, ys), (xs, ys)))  # fmt: skip
    x1, y1 = math.fsum(xs), math.fsum(ys)
    free = xx * yy - xy * xy
    slope, overhead = (x1 * yy - y1 * xy) / free, (y1 * xx - x1 * xy) / free
    if overhead < 0:
        slope, overhead = x1 / xx, 0.0
    if slope < 1:  # no faster than the bound: the overhead takes what is left
        slope, overhead = 1.0, max(0.0, (y1 - xy) / yy)
    return Calibration(1 / slope, overhead)


def halves(count: int) -> tuple[list[int], list[int]]:
    """Return the places of every other of ``count`` steps, and of those between: fit, held out.

    >>> halves(5)
    ([0, 2, 4], [1, 3])
    """
    return list(range(0, count, 2)), list(range(1, count, 2))


def cross_checked(
    bounds: Sequence[float], measured: Sequence[float]
) -> tuple[Calibration, list[float], list[float]]:
    """Fit on every other step, in order of the bounds; return the fit and the errors of each half.

    Returns: calibration; relative errors of the steps that were fitted; of those held out.
    Raises: as ``fit``.

    >>> found, own, others = cross_checked([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.8])
    >>> len(own), [round(error, 2) for error in others]
    (2, [0.0, -0.09])
    """
    pairs = sorted(zip(bounds, measured, strict=True))
    sides = [list(zip(*(pairs[i] for i in side), strict=True)) for side in halves(len(pairs))]
    if len(pairs) < 4:
        raise ValueError(f"two halves need at least four steps, got {len(pairs)}")
    found = fit(*sides[0])
    return found, found.errors(*sides[0]), found.errors(*sides[1])


def typical(errors: Sequence[float]) -> float:
    """Return the median size of errors.

    >>> typical([-0.1, 0.02, 0.3])
    0.1
    """
    return median(abs(error) for error in errors)
