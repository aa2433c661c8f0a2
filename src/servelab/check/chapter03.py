"""Exercises of chapter 3: latencies scaled to a chip, the limit of batching, the cost of a step."""

import random

from servelab import hardware, models, roofline
from servelab.check.chapter01 import with_kv_heads
from servelab.check.exercise import Exercise, Number, Wrong
from servelab.check.function import Function
from servelab.models import ModelSpec
from servelab.roofline import Cost

Step = list[tuple[int, int]]


def _qwen() -> ModelSpec:
    return models.get("qwen3-8b")


def _milliseconds(step: Step, chip: str = "l4", spec: ModelSpec | None = None) -> float:
    cost = roofline.step_cost(spec or _qwen(), step)
    return 1e3 * roofline.time_bound(cost, hardware.get(chip), "bf16").seconds


def _by_peaks() -> float:
    h100, l4 = hardware.get("h100-sxm-80gb"), hardware.get("l4")
    scale = h100.peak("bf16") / l4.peak("bf16")
    return _milliseconds([(1, 2047)], "h100-sxm-80gb") * scale


def _weights_alone(parameters: int) -> float:
    return 1e3 * 2 * parameters / hardware.get("l4").bandwidth_bytes_per_second


def _mha_ratio(users: int) -> float:
    step = [(1, 8191)] * users
    many = with_kv_heads(_qwen(), 32)
    return _milliseconds(step, "h100-sxm-80gb", many) / _milliseconds(step, "h100-sxm-80gb")


def _cache_alone_ratio() -> float:
    """Return the ratio for 8 users if the projections stayed as they were."""
    qwen = _qwen()
    one, cache = roofline.step_cost(qwen, [(1, 8191)] * 8).bytes, 8 * qwen.sequence_bytes(8192)
    return (one + 3 * cache) / one


def _limit(spec: ModelSpec, context: int = 8192) -> float:
    """Return the intensity that one more sequence brings: that of an endless batch."""
    one, two = (roofline.step_cost(spec, [(1, context - 1)] * batch) for batch in (1, 2))
    return (two.flop - one.flop) / (two.bytes - one.bytes)


def step_flop(spec: ModelSpec, step: Step) -> int:
    """Return the FLOP of the matrix products and the attention of a step."""
    cost: Cost = roofline.step_cost(spec, step)
    return cost.flop


def _flop(
    spec: ModelSpec,
    step: Step,
    head_rows: str = "sequences",
    heads: str = "query",
    mask: bool = True,
    cached: bool = True,
    per_sequence: bool = False,
) -> int:
    """Return the FLOP of a step, with one thing counted wrongly."""
    attention = spec.layers[0].attention
    head = spec.lm_head.d_in * spec.lm_head.d_out
    rows = sum(new for new, _ in step)
    linear = 2 * (spec.matmul_params - head) * (len(step) if per_sequence else rows)
    logits = 2 * head * (rows if head_rows == "all" else len(step))
    width = attention.num_q_heads if heads == "query" else attention.num_kv_heads  # type: ignore[union-attr]
    pairs = sum(
        roofline.causal_pairs(new, old if cached else 0) if mask else new * (old + new)
        for new, old in step
    )
    per_pair = 4 * width * attention.head_dim * len(spec.layers)  # type: ignore[union-attr]
    return linear + logits + per_pair * pairs


def _step_inputs(rng: random.Random) -> tuple[object, ...]:
    spec = models.get(rng.choice(["qwen3-8b", "llama-3-8b", "mistral-7b", "smollm2-135m"]))
    step = [
        (rng.choice([1, rng.randint(2, 700)]), rng.choice([0, rng.randint(1, 3000)]))
        for _ in range(rng.randint(1, 5))
    ]
    return spec, step


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "3.1",
        "Decode on a smaller chip",
        "What is the least TPOT of Qwen3-8B in bf16 on an L4, one user at context 2,048?",
        "milliseconds",
        lambda: _milliseconds([(1, 2047)]),
        0.003,
        (
            Wrong(
                "scaled by the peaks",
                _by_peaks,
                "That scales the H100's time by the ratio of the peaks. Which of the two times is "
                "decode bound by?",
            ),
            Wrong(
                "the H100",
                lambda: _milliseconds([(1, 2047)], "h100-sxm-80gb"),
                "That is the H100's.",
            ),
            Wrong(
                "no cache",
                lambda: _weights_alone(_qwen().matmul_params),
                "That reads the weights alone. The cache of 2,048 tokens is read too.",
            ),
            Wrong(
                "all parameters",
                lambda: _weights_alone(_qwen().params_total),
                "That reads all parameters and no cache. Of the embedding a step reads one row, "
                "and it does read the cache.",
            ),
            Wrong(
                "the prefill",
                lambda: _milliseconds([(2048, 0)]),
                "That is the TTFT of a prompt of 2,048 tokens.",
            ),
        ),
        minutes=10,
        tests="which resource a decode step scales with",
    ),
    Number(
        "3.2",
        "As many KV heads as query heads",
        "Qwen3-8B gets 32 KV heads instead of 8. By what factor does the least TPOT of eight "
        "users at context 8,192 grow on an H100?",
        "times",
        lambda: _mha_ratio(8),
        0.01,
        (
            Wrong(
                "cache alone",
                4,
                "Four is the factor of the cache. The step reads the weights as well.",
            ),
            Wrong(
                "nothing",
                1,
                "The arithmetic of attention stays, but decode is bound by bytes, and the cache "
                "has grown.",
            ),
            Wrong(
                "one user",
                lambda: _mha_ratio(1),
                "That is one user's step. Eight users read eight caches, and the weights once.",
            ),
            Wrong(
                "projections as they were",
                _cache_alone_ratio,
                "Nearly: the projections of keys and values have grown too, and are read.",
            ),
        ),
        minutes=10,
        tests="how weights and caches share the bytes of a step",
    ),
    Number(
        "3.3",
        "Just batch more?",
        "Which intensity does decode of Qwen3-8B at context 8,192 tend to as the batch grows "
        "without end?",
        "FLOP per byte",
        lambda: _limit(_qwen()),
        0.01,
        (
            Wrong(
                "attention alone",
                4,
                "That is attention alone, query heads per KV head. Every sequence brings its "
                "linear work too, and no further weights.",
            ),
            Wrong(
                "the ridge",
                lambda: hardware.get("h100-sxm-80gb").ridge("bf16"),
                "That is the ridge of the H100. The limit is a property of the model and the "
                "context.",
            ),
            Wrong(
                "32 users",
                lambda: roofline.step_cost(_qwen(), [(1, 8191)] * 32).intensity,
                "That is 32 users. Let the weights, which are read once, become negligible.",
            ),
            Wrong(
                "GQA ignored",
                lambda: _limit(with_kv_heads(_qwen(), 32)),
                "That has a KV head for every query head. Qwen3-8B has 8.",
            ),
            Wrong(
                "keys alone",
                lambda: _limit(_qwen()) * 2,
                "Twice too much: a token leaves a key and a value, and both are read.",
            ),
        ),
        minutes=12,
        tests="why a larger batch does not make decode compute-bound",
    ),
    Function(
        "3.4",
        "The work of a step",
        "Write the FLOP of a step: a list of (new, cached) tokens, one pair per sequence, of a "
        "model with equal layers.",
        _step_inputs,
        step_flop,
        (
            Wrong(
                "logits of every row",
                lambda spec, step: _flop(spec, step, head_rows="all"),
                "You compute logits for every new token. Only the last of each sequence is "
                "sampled from.",
            ),
            Wrong(
                "no causal mask",
                lambda spec, step: _flop(spec, step, mask=False),
                "You count pairs that the causal mask leaves out.",
            ),
            Wrong(
                "KV heads in the work",
                lambda spec, step: _flop(spec, step, heads="kv"),
                "GQA saves bytes, not work: every query head makes its own products.",
            ),
            Wrong(
                "cached tokens left out",
                lambda spec, step: _flop(spec, step, cached=False),
                "The new tokens attend to the cached ones as well.",
            ),
            Wrong(
                "one row per sequence",
                lambda spec, step: _flop(spec, step, per_sequence=True),
                "The linear layers see every new token as a row, not one row per sequence.",
            ),
            Wrong(
                "factor 2",
                lambda spec, step: _flop(spec, step) // 2,
                "Half of the right number: a multiply-add is two FLOP.",
            ),
        ),
        trials=24,
        minutes=20,
        tests="the work of any step, prefill, decode or mixed, as one formula",
    ),
)
