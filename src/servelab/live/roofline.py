"""The roofline to play with: one matrix, and a whole step of a model, on any chip.

Models: what `servelab.roofline` says of a matrix multiplication and of a step, as marks on the
roofline of a chip; beside the exact intensity the one that counts weights alone.

Assumes: weights, activations and cache in the format in which the chip calculates.

Ignores: what `servelab.roofline` ignores: the marks are bounds.
"""

from __future__ import annotations

from servelab import hardware
from servelab.explore.roof import Mark, draw_roofline, said_chip, said_intensity, said_mark
from servelab.hardware import Accelerator
from servelab.live.asked import (
    PASTED,
    chip_choice,
    config_field,
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
from servelab.live.panel import Answer, Choice, Field, Panel, Values, table_html
from servelab.roofline import (
    Cost,
    attainable,
    matmul,
    rows_to_reach_ridge,
    step_cost,
    time_bound,
)
from servelab.units import (
    dtype_bits,
    format_flop,
    format_flop_rate,
    format_seconds,
    size_bytes,
)

_FORMATS = ("bf16", "fp16", "fp32", "fp8", "fp4", "int8")
_MOST_WIDTH = 2**20
_NONE = "none"


def panel() -> Panel:
    """Return the panel.

    >>> panel()
    The roofline. H100 SXM 80 GB in bf16: 989 TFLOP/s over 3.35 TB/s, ridge 295 FLOP/byte. ...
    """
    matrix = (
        count_slider("rows", "Rows: tokens in the step", powers(1, 8192, between=True), 64),
        Field("d_in", "d_in", "12288"),
        Field("d_out", "d_out", "4096"),
    )
    step = (
        model_choice(_NONE, (_NONE, "no step"), (PASTED, "a pasted config.json")),
        config_field(),
        Choice("phase", "Phase", (("decode", "decode"), ("prefill", "prefill")), "decode"),
        count_slider("batch", "Sequences", powers(1, 512), 64),
        token_slider("context", "Tokens of each", powers(128, 131072), 2048),
    )
    chip = (chip_choice(), format_choice("dtype", "Numbers in", _FORMATS, "bf16"))
    groups = {"": chip, "A matrix": matrix, "A whole step": step}
    return Panel("roofline", "The roofline", groups, answer)


@in_words
def answer(values: Values, action: str) -> Answer:
    """Return the roofline, its marks and their numbers.

    Raises: ``ValueError`` for a format without a rate on this chip, or a number out of range.
    """
    chip, dtype = hardware.get(values["chip"]), values["dtype"]
    chip.peak(dtype)  # refuses a format that the chip does not calculate in
    rows = whole(values, "rows", 2**20)
    d_in, d_out = (whole(values, name, _MOST_WIDTH) for name in ("d_in", "d_out"))
    exact = matmul(rows, d_in, d_out, dtype, dtype)
    weights = Cost(exact.flop, size_bytes(d_in * d_out, dtype), 0)
    marks = [Mark("exact", exact), Mark("weights only", weights)]
    words = [said_chip(chip, dtype), _of_matrix(rows, d_in, d_out, exact, weights, chip, dtype)]
    with_step = values["model"] != _NONE
    if with_step:
        marks.append(_step(values, dtype))
        words.append(_of_step(values, marks[-1], chip, dtype))
    return Answer(
        " ".join(words),
        {"roofline": draw_roofline(chip, dtype, marks), "table": _table(marks, chip, dtype)},
        off=() if with_step else ("phase", "batch", "context"),
    )


def _step(values: Values, dtype: str) -> Mark:
    spec = model_of(values)
    batch, tokens = _sequences(values)
    pair = (1, tokens - 1) if values["phase"] == "decode" else (tokens, 0)
    cost = step_cost(spec, [pair] * batch, "last", dtype, dtype, dtype)
    return Mark(f"{spec.name}, {values['phase']}", cost)


def _of_matrix(
    rows: int, d_in: int, d_out: int, exact: Cost, weights: Cost, chip: Accelerator, dtype: str
) -> str:
    try:
        fewest = f"{rows_to_reach_ridge(d_in, d_out, chip, dtype):,} rows reach the ridge"
    except ValueError:
        endless = d_in * d_out / (d_in + d_out) * 16 / dtype_bits(dtype)
        fewest = (
            "no number of rows reaches the ridge, as the intensity stays below "
            f"{said_intensity(endless)}"
        )
    said = said_mark(Mark("exact", exact), chip, dtype).removeprefix("exact: ").rstrip(".")
    return (
        f"{rows:,} row{'s' * (rows != 1)} by a {d_in:,} x {d_out:,} matrix: {said}; counting the "
        f"weights alone it would be {said_intensity(weights.intensity)}. For this matrix {fewest}."
    )


def _sequences(values: Values) -> tuple[int, int]:
    """Return how many sequences there are, and the tokens of each."""
    return whole(values, "batch", 4096), whole(values, "context", 2**20)


def _of_step(values: Values, step: Mark, chip: Accelerator, dtype: str) -> str:
    batch, tokens = _sequences(values)
    plural = "s" * (batch != 1)
    what = (
        f"one token for {batch:,} sequence{plural} at context {tokens:,}"
        if values["phase"] == "decode"
        else f"{batch:,} prompt{plural} of {tokens:,} tokens"
    )
    bound = time_bound(step.cost, chip, dtype)
    spec = model_of(values)
    longest = spec.max_context_tokens
    beyond = (
        f" The configuration of {spec.name} allows {longest:,} tokens at most."
        if longest is not None and tokens > longest
        else ""
    )
    return (
        f"{spec.name}, {what}: {said_intensity(step.cost.intensity)}, limited by {bound.limiter}, "
        f"at least {format_seconds(bound.seconds)}.{beyond}"
    )


def _table(marks: list[Mark], chip: Accelerator, dtype: str) -> str:
    bounds = [time_bound(mark.cost, chip, dtype) for mark in marks]
    costs = [mark.cost for mark in marks]
    best = [attainable(cost.intensity, chip, dtype) for cost in costs]
    rows = [
        ["work", *(format_flop(cost.flop) for cost in costs)],
        ["traffic", *(decimal(cost.bytes) for cost in costs)],
        ["intensity", *(said_intensity(cost.intensity) for cost in costs)],
        ["at most", *map(format_flop_rate, best)],
        ["of the roof", *(f"{rate / chip.peak(dtype):.1%}" for rate in best)],
        ["at least", *(format_seconds(bound.seconds) for bound in bounds)],
        ["limited by", *(bound.limiter for bound in bounds)],
    ]
    caption = f"Marks on the roofline of one {chip.label} in {dtype}"
    return table_html(caption, ["", *(mark.name for mark in marks)], rows)
