"""Whole steps of real models on this device, over their sizes; what a prediction is held against.

Models: prompts of several lengths; decode steps over rows and context; the attention kernel alone,
behind emptied caches; the parts of a few steps (`servelab.measure.parts`); a workload of mixed
lengths (`servelab.measure.workload`). The bundled model fits a cache, SmolLM2-135M's shape does not
fit most.

Assumes: a record is made at once, so that its roofs and its steps share the state of the machine;
everything runs in bf16.

Ignores: several devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from servelab import models
from servelab.decoder import PagedDecoder, packing
from servelab.hardware import Accelerator
from servelab.measure.device import Device, probe
from servelab.measure.parts import BLOCK_SIZE, StepRunner, bookkeeping, hollow, model_of
from servelab.measure.records import Measurement, Record, fastest
from servelab.measure.timing import flush_buffer, roofs, sample_seconds
from servelab.measure.workload import Arrivals, WallClockRunner, Workload, mixed, serve
from servelab.models import Attention, ModelSpec
from servelab.roofline import Bound, attention, step_cost, time_bound
from servelab.roofline.cost import Cost

Say = Callable[[str], object]
Shape = tuple[int, int, int]  # rows, new tokens of each, context behind the step
Works = dict[str, tuple[Callable[[], object], Callable[[], object] | None]]  # what is timed; before

DTYPE = "bf16"
#: The heads of the book's running example, one layer of which is measured alone.
HEADS = Attention(num_q_heads=32, num_kv_heads=8, head_dim=128)


@dataclass(frozen=True)
class Sizes:
    """What is swept of one model: prompts, decode steps, steps that are taken apart, requests."""

    prompts: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]  # rows, context
    apart: tuple[Shape, ...]
    requests: Arrivals


SMALL = {
    "stories": Sizes(
        (16, 64, 256),
        ((1, 64), (1, 448), (8, 64), (8, 448), (32, 64)),
        ((1, 1, 64), (8, 1, 448)),
        mixed(12, rate=60, prompt=(16, 96), output=(8, 24)),
    ),
    "smollm2-135m": Sizes((32,), ((1, 128), (8, 128)), (), ()),
}
FULL = {
    "stories": Sizes(
        (16, 32, 64, 128, 256, 480),
        tuple((rows, t) for rows in (1, 4, 16, 64) for t in (64, 192, 448)),
        ((1, 1, 64), (16, 1, 448), (1, 256, 256)),
        mixed(48, rate=40, prompt=(16, 192), output=(16, 96)),
    ),
    "smollm2-135m": Sizes(
        (16, 64, 256, 1024),
        (*((rows, t) for rows in (1, 4, 16) for t in (128, 512, 1024)), (64, 128), (1, 4096)),
        ((1, 1, 128), (16, 1, 1024), (1, 256, 256)),
        mixed(24, rate=4, prompt=(16, 192), output=(8, 48)),
    ),
}
LARGE = {  # of a GPU
    "llama-3-8b": Sizes(
        (64, 512, 2048),
        tuple((rows, t) for rows in (1, 8, 64) for t in (512, 2048)),
        ((1, 1, 2048), (64, 1, 2048)),
        mixed(48, rate=20, prompt=(64, 1024), output=(16, 128)),
    )
}


def sweep(full: bool = False, note: str = "", say: Say | None = None) -> Record:
    """Return a record of today with the roofs, the steps, their parts and the workloads.

    A full sweep measures the roofs before and after, and keeps of each the faster series.

    Parameters: ``full`` as for a record that is kept, some minutes; otherwise as for a notebook,
    seconds; ``note`` to keep with it; ``say`` called with a line before each measurement.
    """
    tell, device = say or (lambda line: None), probe()
    record = roofs(not full, note, tell)
    sizes = dict(FULL if full else SMALL)
    if full and device.kind == "cuda":
        sizes |= LARGE
    found, workloads = list(attention_alone(device, full, tell)), []
    for name, wanted in sizes.items():
        if not _fits(name, device):
            tell(f"{name} does not fit: left out")
            continue
        model = model_of(name, device.kind)
        found += steps(name, model, wanted, full, tell)
        if wanted.requests:
            workloads.append(served(name, model, wanted.requests, 3 if full else 1, tell))
        del model
    if full:
        record = fastest([record, replace(roofs(False, note, tell), date=record.date)])
    return replace(
        record,
        subject="sweep",
        measurements=(*record.measurements, *found),
        workloads=tuple(workloads),
    )


def attention_alone(device: Device, full: bool, say: Say) -> Iterator[Measurement]:
    """Measure one layer's decode attention through block tables, with its keys in memory."""
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": HEADS.num_q_heads, "num_key_value_heads": HEADS.num_kv_heads,
        "head_dim": HEADS.head_dim, "vocab_size": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    model = PagedDecoder(ModelSpec.from_config(config), device=device.kind, dtype=torch.bfloat16)
    flush = flush_buffer(device)
    sizes = [(1, 512), (8, 512), (1, 4096), (8, 4096)] if full else [(1, 512), (8, 512)]
    if full and device.kind == "cuda":
        sizes.append((64, 4096))
    for rows, t in sizes:
        say(f"attention of {rows} x {t}")
        runner = StepRunner(model.initialise()).of(rows, 1, t)
        with torch.inference_mode():
            work = runner.parts()["attention"]
            seconds = sample_seconds(work, *_effort(full), before=flush.sum)
        shape = (rows, t, HEADS.num_q_heads, HEADS.num_kv_heads, HEADS.head_dim, BLOCK_SIZE)
        amount = attention(HEADS, [(1, t - 1)] * rows).bytes
        yield Measurement("paged_decode_bandwidth", DTYPE, shape, amount, seconds)


def steps(
    name: str, model: PagedDecoder, sizes: Sizes, full: bool, say: Say
) -> Iterator[Measurement]:
    """Measure the steps of a model, and the parts of those that are taken apart."""
    runner = StepRunner(model)
    packed = None
    if model.device.type == "cpu" and sizes.apart and packing.available():
        packed = StepRunner(model_of(name, "cpu", packed=True))
    shapes = [(1, new, new) for new in sizes.prompts] + [(rows, 1, t) for rows, t in sizes.decodes]
    for shape in dict.fromkeys([*shapes, *sizes.apart]):
        say(f"{name}: a step of {shape[0]} x {shape[1]} new tokens, context {shape[2]}")
        runner.of(*shape)
        works: Works = {"step": (runner.step, None)}
        if shape in sizes.apart:
            works |= _apart(runner, packed, shape)
        yield from in_turn(name, shape, works, full)


def _apart(runner: StepRunner, packed: StepRunner | None, shape: Shape) -> Works:
    """Return the parts of the step, each with what is to be done before it, untimed."""
    rows, new, _ = shape
    works: Works = {part: (work, None) for part, work in runner.parts().items()}
    flush = flush_buffer(probe())
    works["matrices_cold"] = runner.matrices(), flush.sum
    works["hollow"] = hollow(runner.spec, runner.device.type, rows, new), None
    ready = bookkeeping(runner.spec, rows, new)
    kept: list[Callable[[], object]] = [ready()]

    def renew() -> None:
        kept[0] = ready()

    works["bookkeeping"] = (lambda: kept[0]()), renew
    if packed is not None:
        packed.of(*shape)
        works["matrices_packed"] = packed.matrices(), None
        works["step_packed"] = packed.step, None
    if runner.device.type == "cuda":
        works["step_eager"] = runner.eager_step, None
    return works


def served(name: str, model: PagedDecoder, requests: Arrivals, runs: int, say: Say) -> Workload:
    """Serve requests ``runs`` times, after once for the warm-up; return what was measured."""
    longest = max(prompt + output for _, prompt, output in requests)
    seats = 16
    blocks = 1 + seats * -(-longest // BLOCK_SIZE)
    work = Workload(name, DTYPE, requests, blocks, BLOCK_SIZE, seats, 256)
    runner, times = WallClockRunner(model), []
    for run in range(runs + 1):
        say(f"{name}: {len(requests)} requests, " + (f"run {run}" if run else "warm-up"))
        runner.mark = None
        times.append(serve(runner, work))
    return work.at(tuple(times[1:]))


def cost_of(m: Measurement) -> Cost:
    """Return what the step of a measurement calculates and moves.

    Raises: ``ValueError`` for a measurement that is not one of a model's step.

    >>> m = Measurement("step", "bf16", (1, 1, 64), 1, (1e-3,), "stories")
    >>> cost_of(m).flop
    3461120
    """
    if m.model is None:
        raise ValueError(f"{m.quantity} has no model, so there is no step to price")
    rows, new, context = m.shape
    formats = (m.dtype, m.dtype, m.dtype)
    return step_cost(models.get(m.model), [(new, context - new)] * rows, "last", *formats)


def bound_of(m: Measurement, chip: Accelerator) -> Bound:
    """Return the least time of the step of a measurement on a chip."""
    return time_bound(cost_of(m), chip, m.dtype)


def in_turn(name: str, shape: Shape, works: Works, full: bool) -> Iterator[Measurement]:
    """Measure works that are compared, in rounds, so that what else the machine does meets all."""
    rounds = 3 if full and len(works) > 1 else 1
    samples, warmup, budget_seconds = _effort(full)
    effort = -(-samples // rounds), warmup, budget_seconds / rounds
    found: dict[str, list[float]] = {quantity: [] for quantity in works}
    with torch.inference_mode():
        for _ in range(rounds):
            for quantity, (work, before) in works.items():
                found[quantity] += sample_seconds(work, *effort, before=before)
    for quantity, seconds in found.items():
        yield Measurement(quantity, DTYPE, shape, 1, tuple(seconds), name)


def _effort(full: bool) -> tuple[int, int, float]:
    """Return samples, warm-up, and the seconds they may take."""
    return (21, 2, 1.5) if full else (5, 1, 0.4)


def _fits(name: str, device: Device) -> bool:
    needed = 2.2 * models.get(name).params_total
    return device.memory_bytes is None or needed < 0.6 * device.memory_bytes
