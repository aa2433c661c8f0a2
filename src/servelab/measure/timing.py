"""Timers and measured roofs: how fast this device really moves bytes and multiplies matrices.

Models: two memory rates (copying a buffer, counted as read plus written; reading one) and the rate
of a square matrix product per dtype. Buffers exceed the last cache level at least fourfold, so the
memory is measured and not the cache. Matrices are random: zeros draw less power and run faster.

Assumes: nothing else runs on the device. A GPU is timed by CUDA events, a CPU by the clock; a GPU
multiplies fp32 in full precision, without TF32, as torch does by default.

Ignores: what a CPU reads besides: a store to a line that is not cached may fetch it first, so a
copy can move up to half as many bytes again as are counted here.
"""

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from servelab.measure.device import Device, probe
from servelab.measure.records import Measurement, Record
from servelab.roofline import matmul
from servelab.units import MiB, check_count

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_BUFFER_BYTES = 256 * MiB
_SMALL_MATRIX = {"cpu": 1024, "cuda": 4096}  # large enough to keep every core busy


def sample_seconds(
    work: Callable[[], object],
    samples: int = 15,
    warmup: int = 2,
    budget_seconds: float = float("inf"),
) -> tuple[float, ...]:
    """Return the seconds of repeated executions of ``work``, after ``warmup`` untimed ones.

    Parameters: ``samples`` to take; ``budget_seconds`` after which, with three samples, no further
    one is started. On a GPU the time between two events on the device around the work.
    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> len(sample_seconds(lambda: sum(range(100)), samples=5))
    5
    """
    check_count("samples", samples)
    for _ in range(check_count("warmup", warmup, minimum=0)):
        work()
    timed = _cuda_seconds if torch.cuda.is_available() else _clock_seconds
    seconds: list[float] = []
    while len(seconds) < samples and (len(seconds) < 3 or sum(seconds) < budget_seconds):
        seconds.append(round(timed(work), 9))  # no clock here is finer than a nanosecond
    return tuple(seconds)


def _clock_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _cuda_seconds(work: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3  # from ms


def roofs(
    quick: bool = False, note: str = "", progress: Callable[[str], object] | None = None
) -> Record:
    """Measure the roofs of this device: memory rates in fp32, matrix products by dtype.

    Parameters: ``quick`` fewer samples and only the smaller matrices, for a notebook; ``note`` to
    keep with the record; ``progress`` called with a line before each measurement.
    Returns: a record of today; ``record.as_accelerator()`` prices with it.
    """
    device = probe()
    samples = 7 if quick else 25

    def measured(
        quantity: str, dtype: str, shape: tuple[int, ...], amount: int, work: Callable[[], object]
    ) -> Measurement:
        if progress is not None:
            progress(f"{quantity} {dtype} {'x'.join(map(str, shape))}")
        seconds = sample_seconds(work, samples, budget_seconds=1.0 if quick else 4.0)
        return Measurement(quantity, dtype, shape, amount, seconds)

    measurements = [*_memory_rates(device, measured), *_matmul_rates(device, quick, measured)]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return Record(today, device, tuple(measurements), note)


def linears(
    rows: Sequence[int],
    d_in: int,
    d_out: int,
    dtype: str,
    samples: int = 7,
    budget_seconds: float = 1.0,
    progress: Callable[[str], object] | None = None,
) -> tuple[Measurement, ...]:
    """Measure ``Y = X W`` with one W of (d_in, d_out) and as many rows of X as asked for, in turn.

    Parameters: ``rows`` the tokens of each product; ``dtype`` a key of ``TORCH_DTYPES``;
    ``samples`` of each, fewer where they take longer than ``budget_seconds``; ``progress`` called
    with a line before each.
    Raises: ``TypeError``, ``ValueError`` for bad counts or another dtype.

    >>> [m.shape for m in linears([1, 2], 64, 32, "fp32", samples=3)]
    [(1, 64, 32), (2, 64, 32)]
    """
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(TORCH_DTYPES)}, got {dtype!r}")
    wanted = [matmul(count, d_in, d_out, dtype, dtype) for count in rows]
    where, torch_dtype = probe().kind, TORCH_DTYPES[dtype]
    generator = torch.Generator(device=where).manual_seed(0)
    weight = torch.randn((d_out, d_in), device=where, generator=generator).to(torch_dtype)
    found = []
    for count, cost in zip(rows, wanted, strict=True):
        if progress is not None:
            progress(f"linear_rate {dtype} {count}x{d_in}x{d_out}")
        x = torch.randn((count, d_in), device=where, generator=generator).to(torch_dtype)
        work = partial(torch.nn.functional.linear, x, weight)  # (count, d_out)
        seconds = sample_seconds(work, samples, warmup=1, budget_seconds=budget_seconds)
        found.append(Measurement("linear_rate", dtype, (count, d_in, d_out), cost.flop, seconds))
    return tuple(found)


def _memory_rates(device: Device, measured: Callable[..., Measurement]) -> Iterator[Measurement]:
    source = torch.ones(_buffer_bytes(device) // 4, device=device.kind)  # fp32, one dimension
    target = torch.empty_like(source)
    shape = tuple(source.shape)
    yield measured("copy_bandwidth", "fp32", shape, 2 * source.nbytes, lambda: target.copy_(source))
    yield measured("read_bandwidth", "fp32", shape, source.nbytes, source.sum)


def _matmul_rates(
    device: Device, quick: bool, measured: Callable[..., Measurement]
) -> Iterator[Measurement]:
    # A CPU has no unit for fp16: the rate would be an emulation's.
    dtypes = ("fp32", "bf16", "fp16") if device.kind == "cuda" else ("fp32", "bf16")
    small = _SMALL_MATRIX[device.kind]
    generator = torch.Generator(device=device.kind).manual_seed(0)
    for dtype in dtypes:
        for n in (small,) if quick else (small, 2 * small):
            a, b = (
                torch.randn((n, n), device=device.kind, generator=generator).to(TORCH_DTYPES[dtype])
                for _ in range(2)
            )  # (n, n)
            out = torch.empty_like(a)
            product = partial(torch.mm, a, b, out=out)
            yield measured("matmul_rate", dtype, (n, n, n), 2 * n**3, product)


def _buffer_bytes(device: Device) -> int:
    """Return the size of a buffer that no cache holds, a multiple of the page."""
    wanted = max(_LEAST_BUFFER_BYTES, 4 * (device.cache_bytes or 0))
    most = (device.memory_bytes or 8 * wanted) // 8  # there are two of them, and other programs
    return min(wanted, most) // MiB * MiB
