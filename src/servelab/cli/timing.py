"""`servelab time`: the least time of prefill, of a decode step and of a whole request."""

from collections.abc import Iterator
from dataclasses import asdict

import click

from servelab.cli import options
from servelab.cli.output import answer, wrapped
from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.roofline import Achieved, Precision, RequestTime, Time, request_time
from servelab.units import (
    format_bandwidth,
    format_bytes,
    format_flop,
    format_flop_rate,
    format_seconds,
    table,
)

_TERMS = {
    "arithmetic": "math_seconds",
    "reading weights": "weight_seconds",
    "reading and writing KV": "kv_seconds",
    "activations": "activation_seconds",
    "recurrent state": "state_seconds",
    "between devices": "link_seconds",
}


@click.command(
    epilog=options.examples("time qwen3-8b --hw h200-sxm --batch 32 --prompt 1K --output 256")
)
@options.config_argument
@options.chip_option
@click.option(
    "--batch", type=options.COUNT, default=1, show_default=True, help="Requests that run together."
)
@options.prompt_option
@options.output_option
@click.option(
    "--kv-dtype",
    "--kv-cache-dtype",
    type=options.PLAIN_KV_FORMAT,
    default="auto",
    show_default=True,
    help="Format of the cache; auto is the model's own, bf16 for fp32.",
)
@options.weight_dtype_option
@options.compute_dtype_option
@options.tp_option
@options.pp_option
@click.option("--measured-ttft", type=options.SECONDS, help="Yours, to hold against the bound.")
@click.option("--measured-tpot", type=options.SECONDS, help="Yours, to hold against the bound.")
@options.json_option
def command(
    spec: ModelSpec,
    chip: Accelerator,
    batch: int,
    prompt: int,
    output: int,
    kv_dtype: str | None,
    weight_dtype: str | None,
    compute_dtype: str | None,
    tp: int,
    pp: int,
    measured_ttft: float | None,
    measured_tpot: float | None,
    as_json: bool,
) -> None:
    """Least times of a batch in one piece: TTFT, TPOT, whole request.

    All prompts are prefilled in one step, then all answers are decoded together, a batch in one
    piece. A bound is the longest of arithmetic, memory and link, at the peaks of the data sheet.
    """
    precision = options.precision_of(spec, kv_dtype, weight_dtype, compute_dtype)
    times = request_time(spec, chip, prompt, output, batch, precision, tp, pp)
    checks = {
        name: Achieved(bound, measured)
        for name, bound, measured in (
            ("ttft", times.ttft_seconds, measured_ttft),
            ("tpot", times.tpot_seconds, measured_tpot),
        )
        if measured is not None and bound is not None
    }
    values = {
        "model": spec.name,
        "accelerator": chip.name,
        "batch_sequences": batch,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "tensor_parallel_ranks": tp,
        "pipeline_parallel_stages": pp,
        "weight_bits": precision.bits_per_weight,
        "expert_weight_bits": precision.expert_bits,
        "kv_dtype": precision.kv,
        "compute_dtype": precision.compute,
        "ttft_seconds": times.ttft_seconds,
        "tpot_seconds": times.tpot_seconds,
        "request_seconds": times.seconds,
        "output_tokens_per_second": times.output_tokens_per_second,
        "prefill": _values(times.prefill),
        "decode": None if times.decode is None else _values(times.decode),
        "achieved_fraction": {name: check.fraction for name, check in checks.items()},
        "warnings": {name: check.warning for name, check in checks.items() if check.warning},
    }

    def text() -> Iterator[str]:
        ranks = f"{tp * pp} x " if tp * pp > 1 else ""
        shape = f"{batch:,} x ({prompt:,} + {output:,}) tokens"
        yield f"{spec.name} on {ranks}{chip.name}: {shape}"
        yield (
            f"weights in {_stored(precision)}, cache in {precision.kv}, "
            f"arithmetic in {precision.compute}"
        )
        yield ""
        yield from _terms(times)
        yield ""
        if tp > 1:
            yield f"on each of {tp} tensor-parallel ranks"
        if pp > 1:
            yield wrapped(
                f"summed over the {pp} stages, which a batch passes in one piece; split into "
                "micro-batches it can be faster"
            )
        yield from _divisions(times, chip, precision)
        yield f"first token after {format_seconds(times.ttft_seconds)} at least (TTFT)"
        if times.tpot_seconds is not None:
            yield f"{format_seconds(times.tpot_seconds)} per further token at least (TPOT)"
        rate = f"{times.output_tokens_per_second:,.0f} output tokens/s"
        yield f"{rate} at most, all requests together"
        for name, check in checks.items():
            what = f"your {name.upper()} of {format_seconds(check.measured_seconds)}"
            note = f": {check.warning}" if check.warning else ""
            yield wrapped(f"{what} reaches {check.fraction:.2f} of the bound's speed{note}")

    answer(as_json, values, text())


def _stored(precision: Precision) -> str:
    """Return how weights are stored: a dtype, or the bits that a quantisation leaves of them."""
    if precision.weight_bits is None:
        return precision.weights
    experts = precision.expert_bits
    beside = "" if experts is None else f" (experts {experts:.3g})"
    return f"{precision.weight_bits:.3g} bits each{beside} as published"


def _values(time: Time) -> dict[str, object]:
    return asdict(time) | {"memory_seconds": time.memory_seconds, "limiter": time.limiter}


def _terms(times: RequestTime) -> Iterator[str]:
    """Yield the table of terms: prefill, a mean decode step, all decode steps."""
    columns: list[tuple[str, Time, int]] = [("prefill", times.prefill, 1)]
    if times.decode is not None:
        steps = times.decode.steps
        columns.append(("decode step", times.decode, steps))
        columns.append((f"all {steps:,}", times.decode, 1))
    rows: list[list[object]] = []
    for label, field in _TERMS.items():
        seconds = [getattr(time, field) / parts for _, time, parts in columns]
        optional = field in ("state_seconds", "link_seconds")
        if any(seconds) or not optional:
            rows.append([label, *map(format_seconds, seconds)])
    rows.append(["bound", *(format_seconds(t.seconds / parts) for _, t, parts in columns)])
    yield table(rows, ["term", *(name for name, _, _ in columns)])
    yield "limited by: " + ", ".join(
        f"{time.limiter} in {name}"
        for name, time in (("prefill", times.prefill), ("decoding", times.decode))
        if time is not None
    )


def _divisions(times: RequestTime, chip: Accelerator, precision: Precision) -> Iterator[str]:
    """Yield the divisions behind the terms: what a step moves and calculates, by the peak rates."""
    name, time = ("prefill", times.prefill)
    if times.decode is not None:
        name, time = ("mean decode step", times.decode)
    bandwidth, peak = chip.bandwidth_bytes_per_second, chip.peak(precision.compute)
    for what, seconds in (("weights", time.weight_seconds), ("KV", time.kv_seconds)):
        each = seconds / time.steps
        moved = format_bytes(round(each * bandwidth), "GB", 3)
        yield wrapped(
            f"{name}, {what}: {moved} / {format_bandwidth(bandwidth)} = {format_seconds(each)}"
        )
    each = time.math_seconds / time.steps
    yield wrapped(
        f"{name}, arithmetic: {format_flop(each * peak)} / {format_flop_rate(peak)} "
        f"= {format_seconds(each)}"
    )
