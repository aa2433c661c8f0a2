"""Prefill and decode side by side: where the time of each goes, and where each stands.

Models: one prompt as one step, and a step that decodes one token for each of a batch of sequences
whose context is as long as the prompt, itself included; their least times by what they are spent on
(`servelab.roofline.phases`), and both on one roofline.

Assumes: weights, activations and arithmetic in one format, the cache in its own; one chip.

Ignores: chunks of prompts, mixed steps, and what a bound ignores.
"""

from __future__ import annotations

from functools import lru_cache

from servelab import hardware, memory
from servelab.explore.roof import Mark, draw_roofline, said_chip, said_intensity
from servelab.explore.split import draw_split, said_time
from servelab.hardware import Accelerator
from servelab.live.asked import (
    chip_choice,
    count_slider,
    decimal,
    format_choice,
    in_words,
    model_choice,
    model_of,
    powers,
    token_slider,
    whole,
)
from servelab.live.panel import Answer, Panel, Values, table_html
from servelab.models import ModelSpec
from servelab.roofline import Cost, Precision, Time, attainable, step_cost, step_time
from servelab.units import format_flop, format_flop_rate, format_seconds

_FORMATS = ("bf16", "fp16", "fp32", "fp8")


def panel() -> Panel:
    """Return the panel.

    >>> panel()
    Prefill and decode. Prefill, one prompt of 2,048 tokens: at least 30.0 ms, limited by ...
    """
    what = (
        model_choice(),
        chip_choice(),
        format_choice("dtype", "Weights and math in", _FORMATS, "bf16"),
        format_choice("kv_dtype", "KV cache in", _FORMATS, "bf16"),
    )
    how_much = (
        count_slider("batch", "Sequences decoding", powers(1, 512, between=True), 32),
        token_slider("context", "Prompt, and context", powers(128, 131072, between=True), 2048),
    )
    return Panel("phases", "Prefill and decode", {"": what, "The step": how_much}, answer)


@in_words
def answer(values: Values, action: str) -> Answer:
    """Return both phases: the split of their times, the roofline, the numbers.

    Raises: ``ValueError`` for a format without a rate on this chip, or a number out of range.
    """
    spec, chip = model_of(values), hardware.get(values["chip"])
    dtype, kv_dtype = values["dtype"], values["kv_dtype"]
    chip.peak(dtype)  # refuses a format that the chip does not calculate in
    batch, context = whole(values, "batch", 4096), whole(values, "context", 2**20)
    plural = "s" * (batch != 1)
    steps = {
        f"Prefill, one prompt of {context:,} tokens": (1, context, 0),
        f"Decode, {batch:,} sequence{plural} at {context:,} tokens": (batch, 1, context - 1),
    }
    times = {name: _time(spec, chip, *step, dtype, kv_dtype) for name, step in steps.items()}
    costs = {name: _cost(spec, *step, dtype, kv_dtype) for name, step in steps.items()}
    marks = [Mark(_short(name), cost) for name, cost in costs.items()]
    words = [said_time(name, time) for name, time in times.items()]
    words.append(said_chip(chip, dtype))
    words.append(_what_fits(spec, chip, batch, context, dtype, kv_dtype))
    return Answer(
        " ".join(words),
        {
            "time": draw_split(times, f"Least time of a step of {spec.name} on one {chip.label}"),
            "roofline": draw_roofline(chip, dtype, marks),
            "table": _table(times, costs, chip, dtype),
        },
    )


def _short(name: str) -> str:
    """Return the phase of a step's name."""
    return name.split(",")[0]


@lru_cache(maxsize=512)
def _time(
    spec: ModelSpec,
    chip: Accelerator,
    batch: int,
    new: int,
    cached: int,
    dtype: str,
    kv_dtype: str,
) -> Time:
    formats = Precision(weights=dtype, kv=kv_dtype, activations=dtype, compute=dtype)
    return step_time(spec, [(new, cached)] * batch, chip, formats)


@lru_cache(maxsize=512)
def _cost(spec: ModelSpec, batch: int, new: int, cached: int, dtype: str, kv_dtype: str) -> Cost:
    return step_cost(spec, [(new, cached)] * batch, "last", dtype, kv_dtype, dtype)


def _what_fits(
    spec: ModelSpec, chip: Accelerator, batch: int, context: int, dtype: str, kv_dtype: str
) -> str:
    """Return whether the caches of the batch fit, and whether the model allows the context."""
    left = memory.budget(spec, chip, weight_dtype=dtype).available_bytes
    told = "These are bounds: launches, sampling and waiting come on top."
    if left <= 0:
        told += f" The weights alone do not fit one {chip.label} of which 90% may be used."
    else:
        users = memory.max_sequences(spec, left, context, kv_dtype)
        if users < batch:
            told += (
                f" Beside the weights, 90% of one {chip.label} holds the caches of {users:,} such "
                f"sequence{'s' * (users != 1)}, not of {batch:,}."
            )
    longest = spec.max_context_tokens
    if longest is not None and context > longest:
        told += f" The configuration of {spec.name} allows {longest:,} tokens at most."
    return told


def _table(times: dict[str, Time], costs: dict[str, Cost], chip: Accelerator, dtype: str) -> str:
    terms = {
        "at least": [time.seconds for time in times.values()],
        "math": [time.math_seconds for time in times.values()],
        "memory": [time.memory_seconds for time in times.values()],
        "of it weights": [time.weight_seconds for time in times.values()],
        "of it KV cache": [time.kv_seconds for time in times.values()],
        "of it activations": [time.activation_seconds for time in times.values()],
    }
    best = [attainable(cost.intensity, chip, dtype) for cost in costs.values()]
    rows = [[what, *map(format_seconds, seconds)] for what, seconds in terms.items()]
    rows += [
        ["limited by", *(time.limiter for time in times.values())],
        ["work", *(format_flop(cost.flop) for cost in costs.values())],
        ["traffic", *(decimal(cost.bytes) for cost in costs.values())],
        ["intensity", *(said_intensity(cost.intensity) for cost in costs.values())],
        ["rate at most", *map(format_flop_rate, best)],
        ["of the roof", *(f"{rate / chip.peak(dtype):.1%}" for rate in best)],
    ]
    return table_html("Least times and what they are made of", ["", *map(_short, times)], rows)
