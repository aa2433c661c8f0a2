"""From cost to time: the roofline of Williams, Waterman and Patterson (2009).

Models: a chip that calculates at one peak rate and moves bytes at one peak rate. No step is faster
than the longer of its two times. If operators run one after another and only work and traffic
*within* an operator overlap, the time is at least the sum over operators of the longer time.

Assumes: one chip, data-sheet or measured peaks, everything at the peak of one dtype.

Ignores: launches, synchronisation, caches, links between chips. Real time lies above both bounds;
the gap is what chapter 9 measures.
"""

import math
from dataclasses import dataclass
from typing import Literal

from servelab.hardware import Accelerator
from servelab.roofline.cost import Cost
from servelab.units import check_count, check_positive, dtype_bits


@dataclass(frozen=True)
class Bound:
    """The least time a cost can take on a chip.

    Fields: ``seconds`` everything overlapped: the longer of ``compute_seconds`` and
    ``memory_seconds``; ``limiter`` which of the two that is; ``serial_seconds`` one operator after
    another: the sum over operators of the longer of their two times.
    """

    seconds: float
    limiter: Literal["compute", "memory"]
    compute_seconds: float
    memory_seconds: float
    serial_seconds: float


def time_bound(cost: Cost, chip: Accelerator, dtype: str) -> Bound:
    """Return the least time of ``cost`` on ``chip``, calculating in ``dtype``.

    Raises: ``ValueError`` where the chip has no peak rate for ``dtype``.

    >>> from servelab import hardware, models, roofline
    >>> decode = roofline.step_cost(models.get("llama-3-8b"), [(1, 2048)])
    >>> bound = time_bound(decode, hardware.get("h100-sxm-80gb"), "bf16")
    >>> bound.limiter, round(bound.seconds * 1e3, 2), bound.seconds <= bound.serial_seconds
    ('memory', 4.56, True)
    """
    flop_per_second, bytes_per_second = chip.peak(dtype), chip.bandwidth_bytes_per_second
    compute = cost.flop / flop_per_second
    memory = cost.bytes / bytes_per_second
    serial = math.fsum(
        operator.count
        * max(operator.cost.flop / flop_per_second, operator.cost.bytes / bytes_per_second)
        for operator in cost.parts
    )
    # summed in another order, serial can fall below the overlapped bound by a rounding error
    seconds = max(compute, memory)
    return Bound(
        seconds, "compute" if compute >= memory else "memory", compute, memory, max(serial, seconds)
    )


def attainable(intensity: float, chip: Accelerator, dtype: str) -> float:
    """Return the most FLOP/s a kernel of ``intensity`` FLOP per byte can reach: the roof above it.

    Raises: ``ValueError`` for a non-positive intensity or a dtype without a rate.

    >>> from servelab import hardware
    >>> attainable(1.0, hardware.get("h100-sxm-80gb"), "bf16")
    3350000000000.0
    """
    return min(
        chip.peak(dtype), check_positive("intensity", intensity) * chip.bandwidth_bytes_per_second
    )


def rows_to_reach_ridge(d_in: int, d_out: int, chip: Accelerator, dtype: str) -> int:
    """Return the fewest rows for which (rows, d_in) by (d_in, d_out) is limited by compute.

    Solves ``2 B d_in d_out / (s (B d_in + d_in d_out + B d_out)) = ridge`` for B, with everything
    in ``dtype`` of s bytes.

    Raises: ``ValueError`` where no number of rows is enough, because the matrix is too narrow.

    >>> from servelab import hardware
    >>> chip = hardware.get("h100-sxm-80gb")
    >>> [rows_to_reach_ridge(d, d_out, chip, "bf16") for d, d_out in [(4096, 4096), (8192, 28672)]]
    [345, 310]
    """
    d_in, d_out = check_count("d_in", d_in), check_count("d_out", d_out)
    weights = d_in * d_out
    half_traffic = chip.ridge(dtype) * dtype_bits(dtype) / 8 / 2  # ridge x bytes per element / 2
    spare = weights - half_traffic * (d_in + d_out)
    if spare <= 0:
        limit = weights / (d_in + d_out) / (dtype_bits(dtype) / 8 / 2)  # intensity of endless rows
        raise ValueError(
            f"a {d_in} by {d_out} matrix never reaches the ridge of {chip.name} in {dtype}, "
            f"{chip.ridge(dtype):.0f} FLOP/byte: its intensity stays below {limit:.0f}"
        )
    return math.ceil(half_traffic * weights / spare)
