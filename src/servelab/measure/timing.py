"""Timers and measured roofs: how fast this device really moves bytes and multiplies matrices.

Models: two memory rates (copying a buffer, counted as read plus written; reading one) and the rate
of a square matrix product per dtype, its second matrix transposed as in a linear layer. Buffers
exceed the last cache level at least fourfold, so the memory is measured and not the cache; before
each product a buffer of that size is read, so that its operands come from memory too. Matrices are
random: zeros draw less power and run faster.

Assumes: nothing else runs on the device. A GPU is timed by CUDA events, a CPU by the clock. What is
done before a sample also keeps a GPU busy while the host launches the work, so that its time is the
device's and not the launch's; `sample_seconds` without it includes a launch on an idle device. A
GPU multiplies fp32 in full precision, without TF32, as torch does by default.

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
from servelab.units import MiB, check_count, format_bytes

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_BUFFER_BYTES = {"cpu": 256 * MiB, "cuda": 2048 * MiB}  # a launch is 1 % of reading it
_WAKE_SECONDS = 0.3  # of work before the first sample on a GPU: an idle one clocks down
_SMALL_MATRIX = {"cpu": 1024, "cuda": 4096}  # large enough to keep every core busy


def sample_seconds(
    work: Callable[[], object],
    samples: int = 15,
    warmup: int = 2,
    budget_seconds: float = float("inf"),
    before: Callable[[], object] | None = None,
) -> tuple[float, ...]:
    """Return the seconds of repeated executions of ``work``, after ``warmup`` untimed ones.

    Parameters: ``samples`` to take; ``budget_seconds`` after which, with three samples, no further
    one is started; ``before`` is executed before each sample, untimed. On a GPU the time between
    two events on the device around the work; without ``before``, launching it is part of it.
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
        seconds.append(round(timed(work, before), 9))  # no clock here is finer than a nanosecond
    return tuple(seconds)


def _clock_seconds(work: Callable[[], object], before: Callable[[], object] | None) -> float:
    if before is not None:
        before()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _cuda_seconds(work: Callable[[], object], before: Callable[[], object] | None) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if before is not None:
        before()  # no synchronisation after it: the device works while the host launches
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
    _wake(device)
    samples = 7 if quick else 25
    flush = flush_buffer(device)

    def measured(
        quantity: str, dtype: str, shape: tuple[int, ...], amount: int, work: Callable[[], object]
    ) -> Measurement:
        if progress is not None:
            progress(f"{quantity} {dtype} {'x'.join(map(str, shape))}")
        budget_seconds = 1.0 if quick else 4.0
        seconds = sample_seconds(work, samples, budget_seconds=budget_seconds, before=flush.sum)
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
    device, torch_dtype = probe(), TORCH_DTYPES[dtype]
    _wake(device)
    where = device.kind
    flush = flush_buffer(device)
    generator = torch.Generator(device=where).manual_seed(0)
    weight = torch.randn((d_out, d_in), device=where, generator=generator).to(torch_dtype)
    found = []
    for count, cost in zip(rows, wanted, strict=True):
        if progress is not None:
            progress(f"linear_rate {dtype} {count}x{d_in}x{d_out}")
        x = torch.randn((count, d_in), device=where, generator=generator).to(torch_dtype)
        work = partial(torch.nn.functional.linear, x, weight)  # (count, d_out)
        seconds = sample_seconds(work, samples, 1, budget_seconds, before=flush.sum)
        found.append(Measurement("linear_rate", dtype, (count, d_in, d_out), cost.flop, seconds))
    return tuple(found)


def flush_buffer(device: Device) -> torch.Tensor:
    """Return a buffer that no cache of the device holds: read, it takes the place of all else.

    >>> flush_buffer(probe()).nbytes >= 4 * (probe().cache_bytes or 0)
    True
    """
    return torch.ones(_buffer_bytes(device) // 4, device=device.kind)  # fp32, one dimension


def _memory_rates(device: Device, measured: Callable[..., Measurement]) -> Iterator[Measurement]:
    source = torch.ones(_buffer_bytes(device) // 4, device=device.kind)  # fp32, one dimension
    target = torch.empty_like(source)
    shape = tuple(source.shape)
    yield measured("copy_bandwidth", "fp32", shape, 2 * source.nbytes, lambda: target.copy_(source))
    yield measured("read_bandwidth", "fp32", shape, source.nbytes, source.sum)


def _matmul_rates(
    device: Device, quick: bool, measured: Callable[..., Measurement]
) -> Iterator[Measurement]:
    # Few CPUs have units for fp16: on the others the rate would be an emulation's.
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
            # In the other order torch takes many times as long where it has no fast kernels.
            product = partial(torch.mm, a, b.t(), out=out)
            yield measured("matmul_rate", dtype, (n, n, n), 2 * n**3, product)


def _wake(device: Device) -> None:
    """Keep a GPU busy until its clocks have risen; a CPU needs no more than the warm-up."""
    if device.kind != "cuda":
        return
    a = torch.randn((4096, 4096), device="cuda", dtype=torch.bfloat16)
    until = time.perf_counter() + _WAKE_SECONDS
    while time.perf_counter() < until:
        torch.mm(a, a)
        torch.cuda.synchronize()


def _buffer_bytes(device: Device) -> int:
    """Return the size of a buffer that no cache holds, a multiple of the page."""
    wanted = max(_LEAST_BUFFER_BYTES[device.kind], 4 * (device.cache_bytes or 0))
    most = (device.memory_bytes or 8 * wanted) // 8  # there are three of them, and other programs
    if most < 4 * (device.cache_bytes or 0):
        raise RuntimeError(
            f"buffers of an eighth of the memory ({format_bytes(most)}) do not exceed the cache "
            f"({format_bytes(device.cache_bytes or 0)}) fourfold: a cache would be measured"
        )
    return min(wanted, most) // MiB * MiB
