"""Time of a step, of prefill, of decoding, of a whole request: bounds, with what they are made of.

Models: the longest of three times that can overlap: calculating, moving bytes to and from device
memory (weights, KV, activations, recurrent state), moving activations between devices. Tensor
parallelism makes each device a smaller one (`servelab.models.parallel`) and costs two all-reduces
per layer; a pipeline's stages work one after another on a token, so that one card's bandwidth
bounds a step whatever their number.

Assumes: peaks of the data sheet; all sequences of a request's batch in step; a step that passes a
pipeline in one piece: split into micro-batches, whose stages overlap, it can be faster than this; a
ring all-reduce, which moves 2 (n-1)/n of a tensor through each device's link.

Ignores: launches, sampling, queueing, the embedding table (one row per token is read), the gather
of logits, reductions inside a switch, which can halve the link's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from servelab.hardware import Accelerator
from servelab.models import Attention, Experts, ModelSpec
from servelab.models.parallel import rank
from servelab.roofline.operators import Step
from servelab.roofline.step import step_cost
from servelab.units import check_count, check_positive, dtype_bits

Limiter = Literal["compute", "memory", "link"]


@dataclass(frozen=True)
class Precision:
    """Number formats, each apart: what is stored need not be what is calculated with.

    Parameters: ``weights``, ``kv``, ``activations`` as stored; ``compute`` whose peak rate counts;
    ``weight_bits`` the average bits per weight of a mixed quantisation (None: those of
    ``weights``); ``expert_bits`` those of routed experts, where they differ from the rest.
    Raises: ``ValueError`` for an unknown dtype or a size that is not positive.

    >>> Precision(weights="int4").bits_per_weight, Precision(weight_bits=4.85).bits_per_weight
    (4, 4.85)
    """

    weights: str = "bf16"
    kv: str = "bf16"
    activations: str = "bf16"
    compute: str = "bf16"
    weight_bits: float | None = None
    expert_bits: float | None = None

    def __post_init__(self) -> None:
        for dtype in (self.weights, self.kv, self.activations, self.compute):
            dtype_bits(dtype)
        for name in ("weight_bits", "expert_bits"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))

    @property
    def bits_per_weight(self) -> float:
        """Return the bits that are read per weight."""
        return dtype_bits(self.weights) if self.weight_bits is None else self.weight_bits


@dataclass(frozen=True)
class Time:
    """The least time of one or more steps, and its terms, in seconds.

    Fields: ``steps``; ``seconds`` the bound: the sum over steps of the longest of calculating,
    device memory and link; ``math_seconds``; ``weight_seconds``, ``kv_seconds``,
    ``activation_seconds``, ``state_seconds`` of device memory; ``link_seconds`` between devices.
    """

    steps: int
    seconds: float
    math_seconds: float
    weight_seconds: float
    kv_seconds: float
    activation_seconds: float
    state_seconds: float
    link_seconds: float

    @property
    def memory_seconds(self) -> float:
        """Return the time of all traffic with device memory."""
        return math.fsum(
            (self.weight_seconds, self.kv_seconds, self.activation_seconds, self.state_seconds)
        )

    @property
    def limiter(self) -> Limiter:
        """Return which of the three takes longest over all steps."""
        times: dict[Limiter, float] = {
            "compute": self.math_seconds,
            "memory": self.memory_seconds,
            "link": self.link_seconds,
        }
        return max(times, key=times.__getitem__)


@dataclass(frozen=True)
class RequestTime:
    """The least time of a batch of equal requests that start together.

    Fields: ``batch``, ``output_tokens`` of each; ``prefill`` all prompts in one step, which yields
    the first token of each; ``decode`` the steps for the others (None where there are none).
    """

    batch: int
    output_tokens: int
    prefill: Time
    decode: Time | None

    @property
    def ttft_seconds(self) -> float:
        """Return the time to the first token."""
        return self.prefill.seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Return the mean time per output token after the first, None for a single one."""
        return None if self.decode is None else self.decode.seconds / self.decode.steps

    @property
    def seconds(self) -> float:
        """Return the time to the last token."""
        return self.prefill.seconds + (self.decode.seconds if self.decode else 0.0)

    @property
    def output_tokens_per_second(self) -> float:
        """Return the rate of output of the whole batch."""
        return self.batch * self.output_tokens / self.seconds


def step_time(
    spec: ModelSpec,
    step: Step,
    chip: Accelerator,
    precision: Precision | None = None,
    tp: int = 1,
    pp: int = 1,
) -> Time:
    """Return the least time of one step, logits of each sequence's last token included.

    Parameters: ``step`` one (new, cached) pair of tokens per sequence; ``precision`` None for bf16
    throughout; ``tp`` devices that share every layer; ``pp`` stages that share the layers.
    Raises: ``TypeError``, ``ValueError`` for bad counts, a dtype without a peak rate, heads that do
    not divide, more than one device without a known link.

    >>> from servelab import hardware, models
    >>> spec, chip = models.get("llama-3-8b"), hardware.get("h100-sxm-80gb")
    >>> time = step_time(spec, [(1, 2048)] * 64, chip)
    >>> time.limiter, [round(s * 1e3, 2) for s in (time.seconds, time.weight_seconds)]
    ('memory', [9.72, 4.48])
    """
    price = _pricer(spec, chip, precision or Precision(), tp, pp)
    times = price(_elements(rank(spec, tp), step))
    return Time(1, max(times[0], math.fsum(times[1:5]), times[5]), *times)


def request_time(
    spec: ModelSpec,
    chip: Accelerator,
    prompt_tokens: int,
    output_tokens: int,
    batch: int = 1,
    precision: Precision | None = None,
    tp: int = 1,
    pp: int = 1,
) -> RequestTime:
    """Return the least time of ``batch`` equal requests, prefilled in one step, decoded together.

    Parameters: ``prompt_tokens``, ``output_tokens``, ``batch`` from 1; the others as in
    ``step_time``.
    Raises: as ``step_time``.

    >>> from servelab import hardware, models
    >>> spec, chip = models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")
    >>> time = request_time(spec, chip, prompt_tokens=1024, output_tokens=256, batch=32)
    >>> time.prefill.limiter, time.decode.limiter, round(time.output_tokens_per_second)
    ('compute', 'memory', 3995)
    """
    prompt = check_count("prompt_tokens", prompt_tokens)
    steps = check_count("output_tokens", output_tokens) - 1
    check_count("batch", batch)
    prefill = step_time(spec, [(prompt, 0)] * batch, chip, precision, tp, pp)
    if not steps:
        return RequestTime(batch, output_tokens, prefill, None)
    part = rank(spec, tp)
    price = _pricer(spec, chip, precision or Precision(), tp, pp)

    def counts(cached: int) -> Counts:
        return _elements(part, [(1, cached)] * batch)

    seconds, terms = 0.0, [0.0] * 6
    for first, last, low, high in _straight_pieces(spec, counts, prompt, prompt + steps - 1):
        number = last - first + 1
        start, end = price(low), price(high)
        for i in range(number):
            share = i / (number - 1) if number > 1 else 0.0
            now = [a + share * (b - a) for a, b in zip(start, end, strict=True)]
            seconds += max(now[0], now[1] + now[2] + now[3] + now[4], now[5])
        for term, (a, b) in enumerate(zip(start, end, strict=True)):
            terms[term] += number * (a + b) / 2
    return RequestTime(batch, output_tokens, prefill, Time(steps, seconds, *terms))


# FLOP; elements of weights, experts' weights, KV and activations moved; bytes of state; tokens
Counts = tuple[int, int, int, int, int, int, int]
Times = tuple[float, float, float, float, float, float]


def _elements(part: ModelSpec, step: Step) -> Counts:
    """Return what a rank calculates and moves, by what it moves.

    Traffic is linear in the width of each kind of number, so doubling the width of one kind adds
    one byte for each of its elements.
    """
    base = step_cost(part, step, "last", "fp8", "fp8", "fp8")
    widths = (("fp16", "fp8", "fp8"), ("fp8", "fp16", "fp8"), ("fp8", "fp8", "fp16"))
    weights, kv, activations = (
        step_cost(part, step, "last", *dtypes).bytes - base.bytes for dtypes in widths
    )
    state = base.bytes - weights - kv - activations
    tokens = sum(new for new, _ in step)
    routed = sum(
        count * round(layer.mlp.expected_distinct(tokens) * matrix.params)  # as `experts` has it
        for layer, count in part.layer_counts.items()
        if isinstance(layer.mlp, Experts)
        for matrix in layer.mlp.expert_linears(part.hidden_size)
    )
    return base.flop, weights - routed, routed, kv, activations, state, tokens


def _pricer(
    spec: ModelSpec, chip: Accelerator, precision: Precision, tp: int, pp: int
) -> Callable[[Counts], Times]:
    """Return the function from counts to the terms of `Time`."""
    check_count("tp", tp)
    if check_count("pp", pp) > len(spec.layers):
        raise ValueError(f"{spec.name} has {len(spec.layers)} layers, too few for {pp} stages")
    peak, bandwidth = chip.peak(precision.compute), chip.bandwidth_bytes_per_second
    link = chip.link_bytes_per_second
    if tp * pp > 1 and link is None:
        raise ValueError(f"{chip.name} has no known link to other devices, got {tp * pp} of them")
    reductions = sum(
        count * ((layer.attention is not None or layer.state is not None) + (layer.mlp is not None))
        for layer, count in spec.layer_counts.items()
    )
    hidden_bytes = spec.hidden_size * dtype_bits(precision.activations) / 8
    sent_per_token = hidden_bytes * (reductions * 2 * (tp - 1) / tp + pp - 1)
    weight_bytes = precision.bits_per_weight / 8
    expert_bits = precision.expert_bits
    expert_bytes = weight_bytes if expert_bits is None else expert_bits / 8
    kv_bytes, activation_bytes = dtype_bits(precision.kv) / 8, dtype_bits(precision.activations) / 8

    def price(counts: Counts) -> Times:
        flop, weights, experts, kv, activations, state, tokens = counts
        return (
            flop / peak,
            (weights * weight_bytes + experts * expert_bytes) / bandwidth,
            kv * kv_bytes / bandwidth,
            activations * activation_bytes / bandwidth,
            state / bandwidth,
            tokens * sent_per_token / link if link else 0.0,
        )

    return price


def _straight_pieces(
    spec: ModelSpec, counts: Callable[[int], Counts], first: int, last: int
) -> list[tuple[int, int, Counts, Counts]]:
    """Cut a range of contexts where a count bends: (first, last, counts at first, at last).

    Every count is affine in the context until a window or a choice of keys is full, and concave in
    all: where the middle lies on the line between two ends, so does all between them. A chunk
    starts anew, so there the range is cut beforehand.
    """
    starts = {first}
    for layer in spec.layer_counts:
        if isinstance(layer.attention, Attention) and layer.attention.chunked:
            chunk = spec.window(layer)
            if chunk is not None:
                starts.update(range(-(-first // chunk) * chunk, last + 1, chunk))
    edges = [*sorted(starts), last + 1]
    open_pieces = [(low, high - 1, counts(low), counts(high - 1)) for low, high in pairwise(edges)]
    done: list[tuple[int, int, Counts, Counts]] = []
    while open_pieces:
        low, high, at_low, at_high = open_pieces.pop()
        middle = (low + high) // 2
        at_middle = counts(middle)
        if high - low < 2 or all(
            (high - low) * m == (high - middle) * a + (middle - low) * b
            for a, m, b in zip(at_low, at_middle, at_high, strict=True)
        ):
            done.append((low, high, at_low, at_high))
        else:
            open_pieces.append((low, middle, at_low, at_middle))
            open_pieces.append((middle + 1, high, counts(middle + 1), at_high))
    return sorted(done)
