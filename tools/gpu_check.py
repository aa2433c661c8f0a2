"""Check the decoder on the GPU of this machine, and measure it beside the memory's own speed.

``python tools/gpu_check.py [--out FOLDER]``, in under five minutes and with torch, triton, numpy
and pytest alone: the tests that need a GPU; the roofs of the device; paged decode attention beside
a copy of as many bytes; a decode step of two models with and without a CUDA graph. What was
measured is stored as a record of `servelab.measure`. ``--sweep`` measures whole steps, their parts
and a workload besides, for chapter 9, some minutes more, and stores them as a record of their own.
Exit code 0: all tests passed and the records are stored; 1: a test failed; 2: there is no CUDA
device here, or a record exists already.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402

from servelab import models  # noqa: E402
from servelab.decoder import KvStore, PagedDecoder, StepBatch  # noqa: E402
from servelab.decoder.graphs import Capture, DecodeGraphs  # noqa: E402
from servelab.decoder.triton_attention import TritonAttention  # noqa: E402
from servelab.measure import Measurement, Record, roofs, sample_seconds, sweep  # noqa: E402
from servelab.measure.records import FOLDER  # noqa: E402
from servelab.models import Attention, ModelSpec  # noqa: E402
from servelab.paging import PoolShape  # noqa: E402
from servelab.roofline import attention, step_cost  # noqa: E402
from servelab.units import format_bandwidth, format_bytes, format_seconds, table  # noqa: E402

GPU_TESTS = "tests/test_triton_gpu.py"
BLOCK_SIZE = 16
ROUNDS = 3  # of each series in turn, so that a slow minute slows all of them

Work = tuple[Callable[[], object], tuple[int, ...], int]  # what to do, its shape, its bytes
Series = dict[str, Measurement]


def run_tests() -> bool:
    """Run the tests that need a GPU; they do without the other tests' plug-ins."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    words = ["-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", GPU_TESTS]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment).returncode == 0


def interleaved(
    works: dict[str, Work],
    before: Callable[[], object] | None = None,
    samples: int = 10,
) -> Series:
    """Measure several works by name, in turn, ``ROUNDS`` times."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, (work, _, _) in works.items():
            seconds[name] += sample_seconds(work, samples, budget_seconds=2.0, before=before)
    return {
        name: Measurement(name, "bf16", shape, amount, tuple(seconds[name]))
        for name, (_, shape, amount) in works.items()
    }


def decode_batch(rows: int, context: int, device: str) -> StepBatch:
    """Return a step of ``rows`` sequences, each with ``context`` keys in blocks of random order."""
    width = -(-context // BLOCK_SIZE)
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0))
    tables = (1 + order).view(rows, width)  # (R, W), block 0 is the null block
    last = context - 1
    slots = tables[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    return StepBatch(
        tokens=torch.arange(rows, device=device),
        positions=torch.full((rows,), last, device=device),
        slots=slots.to(device),
        block_tables=tables.to(torch.int32).to(device),
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        rows=[(1, last)] * rows,
    )


def measure_attention(
    rows: int, context: int, heads: Attention, device: str = "cuda", samples: int = 10
) -> Series:
    """Measure one layer's decode attention, and a copy of as many bytes in turn with it."""
    batch = decode_batch(rows, context, device)
    blocks = 1 + batch.block_tables.numel()
    kv_heads, head_dim = heads.num_kv_heads, heads.head_dim
    shape = (2, blocks, BLOCK_SIZE, kv_heads, head_dim)
    cache = torch.randn(shape, dtype=torch.bfloat16, device=device)
    q = torch.randn((rows, heads.num_q_heads, head_dim), dtype=torch.bfloat16, device=device)
    backend = TritonAttention(device)
    work = partial(backend.attend, cache, q, batch, head_dim**-0.5, None)
    amount = attention(heads, batch.rows).bytes
    source = torch.randn(amount // 4, device=device).to(torch.bfloat16)  # half of the bytes
    target = torch.empty_like(source)
    works: dict[str, Work] = {
        "copy_bandwidth": (
            partial(target.copy_, source),
            tuple(source.shape),
            2 * source.nbytes,
        ),
        "paged_decode_bandwidth": (
            work,
            (rows, context, heads.num_q_heads, kv_heads, head_dim, BLOCK_SIZE),
            amount,
        ),
    }
    # The device reads something else while the host launches, and forgets what its cache held.
    flush = torch.ones(max(1, cache.nbytes // 8), device=device)
    return interleaved(works, before=flush.sum, samples=samples)


def measure_steps(
    spec: ModelSpec,
    rows: int,
    context: int,
    device: str = "cuda",
    capture: Capture | None = None,
    samples: int = 10,
) -> Series:
    """Measure a decode step of random weights, greedy tokens included, without and with a graph."""
    batch = decode_batch(rows, context, device)
    model = PagedDecoder(spec, device=device, dtype=torch.bfloat16).initialise()
    pool = PoolShape(1 + batch.block_tables.numel(), BLOCK_SIZE)
    store = KvStore(spec, pool, device=device, dtype=torch.bfloat16)
    backend = TritonAttention(device)

    def step(batch: StepBatch) -> torch.Tensor:
        last = batch.query_starts[1:].long() - 1  # (R)
        return model.forward(batch, store.data, backend, last).argmax(-1)  # (R)

    width = batch.block_tables.shape[1]
    sizes = {"max_rows": rows, "table_width": width, "block_size": BLOCK_SIZE, "device": device}
    graphs = DecodeGraphs(step, capture=capture, **sizes)
    shape = (rows, context, len(spec.layers), spec.hidden_size)
    amount = step_cost(spec, batch.rows).bytes
    with torch.inference_mode():
        return interleaved(
            {
                "eager_step_bandwidth": (partial(step, batch), shape, amount),
                "graph_step_bandwidth": (partial(graphs.run, batch), shape, amount),
            },
            samples=samples,
        )


def measured(free_bytes: int) -> Iterator[Series]:
    """Yield what is measured, as far as it fits ``free_bytes``, and print it."""
    yield shown(measure_attention(64, 4096, Attention(32, 8, 128)))
    yield shown(measure_attention(1, 4096, Attention(32, 8, 128)))
    for name in ("smollm2-135m", "llama-3-8b"):
        spec = models.get(name)
        for rows, context in ((1, 2048), (8, 2048), (64, 2048)):
            needed = 2 * spec.params_total + rows * spec.sequence_bytes(context)
            if needed > 0.8 * free_bytes:
                print(f"{name}, {rows} rows: {format_bytes(needed)} do not fit, not measured")
                continue
            print(f"{name}, a decode step of {rows} rows at context {context}, random weights")
            yield shown(measure_steps(spec, rows, context))
            torch.cuda.empty_cache()


def shown(series: Series) -> Series:
    """Print a table of what was measured in turn; return it."""
    header = ["quantity", "shape", "n", "median", "quartiles apart", "rate"]
    lines: list[list[object]] = [
        [
            name,
            "x".join(map(str, m.shape)),
            len(m.seconds),
            format_seconds(m.median_seconds),
            f"{m.spread:.0%}",
            format_bandwidth(m.rate),
        ]
        for name, m in series.items()
    ]
    print(table(lines, header), flush=True)
    first, second = series.values()
    print(f"{second.quantity} is {second.rate / first.rate:.2f} times {first.quantity}\n")
    return series


def main(arguments: list[str] | None = None) -> int:
    """Test, measure, store; return the exit code."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder; default: package data")
    parser.add_argument("--note", default="", help="what a reader of the record should know")
    parser.add_argument("--replace", action="store_true", help="overwrite a record of this name")
    parser.add_argument("--sweep", action="store_true", help="the sweep of chapter 9 as well")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked and nothing measured", file=sys.stderr)
        return 2
    if not run_tests():
        print("a test failed: nothing measured", file=sys.stderr)
        return 1
    record = roofs(quick=True, note=options.note, progress=partial(print, "measuring", flush=True))
    free_bytes, _ = torch.cuda.mem_get_info()
    found = [m for series in measured(free_bytes) for m in series.values()]
    code = store(replace(record, measurements=(*record.measurements, *found)), options)
    if options.sweep:  # last: if the time is over before it is, the rest is stored
        torch.cuda.empty_cache()
        say = partial(print, "measuring", flush=True)
        code = max(code, store(sweep(full=True, note=options.note, say=say), options))
    return code


def store(record: Record, options: argparse.Namespace) -> int:
    """Store a record; return the exit code."""
    try:
        print(f"stored {record.save(options.out, options.replace)}", flush=True)
    except FileExistsError as error:
        print(f"not stored: {error} (--replace, or another --out)", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
