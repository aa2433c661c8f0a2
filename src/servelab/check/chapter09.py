"""Exercises of chapter 9: a calibrated step, bandwidth reached, the fit of two numbers."""

import random

from servelab import hardware, models, roofline
from servelab.check.exercise import Exercise, Number, Wrong
from servelab.check.function import Function

_EFFICIENCY, _OVERHEAD = 0.75, 2e-3


def _bound(sequences: int = 64) -> float:
    cost = roofline.step_cost(models.get("qwen3-8b"), [(1, 2047)] * sequences)
    return roofline.time_bound(cost, hardware.get("h100-sxm-80gb"), "bf16").serial_seconds


def _whole_embedding() -> float:
    """Return the bound of weights and caches if the whole embedding were read."""
    spec, chip = models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")
    moved = 2 * spec.params_total + 64 * spec.sequence_bytes(2048)
    return moved / chip.bandwidth_bytes_per_second


def _whole() -> int:
    spec = models.get("llama-3-8b")
    step = roofline.step_cost(spec, [(1, 1023)] * 32).bytes
    return step + 2 * (spec.params_total - spec.matmul_params)


def _single() -> int:
    spec = models.get("llama-3-8b")
    return 2 * spec.matmul_params + spec.sequence_bytes(1024)


def _mbu(moved: int | None = None) -> float:
    """Return the percentage of an A100's bandwidth at 1,500 tokens per second, 32 in a step."""
    spec, chip = models.get("llama-3-8b"), hardware.get("a100-sxm-80gb")
    if moved is None:
        moved = roofline.step_cost(spec, [(1, 1023)] * 32).bytes
    return 100 * moved * (1500 / 32) / chip.bandwidth_bytes_per_second


def fit(bounds: list[float], measured: list[float]) -> tuple[float, float]:
    """Return efficiency and overhead of the least squares of relative errors."""
    return _least_squares(bounds, measured, [1 / seconds for seconds in measured])


def _least_squares(
    bounds: list[float], measured: list[float], weights: list[float]
) -> tuple[float, float]:
    """Return 1 / slope and offset of the line through (bound, measured) by weighted squares."""
    rows = list(zip(bounds, measured, weights, strict=True))
    w = sum(k * k for _, _, k in rows)
    x, y = (sum(k * k * row[i] for row in rows for k in row[2:]) / w for i in (0, 1))
    over = sum(k * k * (b - x) * (t - y) for b, t, k in rows)
    slope = over / sum(k * k * (b - x) ** 2 for b, _, k in rows)
    return 1 / slope, y - slope * x


def _through_origin(bounds: list[float], measured: list[float]) -> tuple[float, float]:
    ratios = [bound / seconds for bound, seconds in zip(bounds, measured, strict=True)]
    return sum(r * r for r in ratios) / sum(ratios), 0.0


def _fit_inputs(rng: random.Random) -> tuple[object, ...]:
    efficiency, overhead = rng.uniform(0.3, 0.9), rng.uniform(1e-3, 9e-3)
    bounds = [rng.uniform(1e-3, 1e-2) * 3**i for i in range(rng.randint(3, 6))]
    return bounds, [(b / efficiency + overhead) * rng.uniform(0.9, 1.1) for b in bounds]


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "9.1",
        "With two numbers",
        "Efficiency 0.75, overhead 2 ms: how long is a decode step of Qwen3-8B in bf16 on an "
        "H100, 64 sequences at context 2,048?",
        "milliseconds",
        lambda: 1e3 * (_bound() / _EFFICIENCY + _OVERHEAD),
        0.0105,  # weights and caches alone are 1 % below: activations may be left out
        (
            Wrong(
                "the embedding",
                lambda: 1e3 * (_whole_embedding() / _EFFICIENCY + _OVERHEAD),
                "You read the whole embedding in each step. A step reads a row of it per token.",
            ),
            Wrong(
                "the bound",
                lambda: 1e3 * _bound(),
                "That is the bound itself. Neither of the two numbers is in it.",
            ),
            Wrong(
                "no overhead",
                lambda: 1e3 * _bound() / _EFFICIENCY,
                "The overhead is missing: every step pays it.",
            ),
            Wrong(
                "multiplied",
                lambda: 1e3 * (_bound() * _EFFICIENCY + _OVERHEAD),
                "That is faster than the bound allows: efficiency is a share of the *speed*, so "
                "the time is divided by it.",
            ),
            Wrong(
                "overhead divided too",
                lambda: 1e3 * (_bound() + _OVERHEAD) / _EFFICIENCY,
                "You divided the overhead by the efficiency as well. It is what was measured, and "
                "stays as it is.",
            ),
            Wrong(
                "one sequence",
                lambda: 1e3 * (_bound(1) / _EFFICIENCY + _OVERHEAD),
                "That is a step of one sequence. 64 read 64 caches.",
            ),
        ),
        minutes=8,
        tests="how a calibration turns a bound into a prediction",
    ),
    Number(
        "9.2",
        "Bandwidth beyond the roof?",
        "1,500 tokens per second of Llama-3-8B in bf16 on an A100 (SXM, 80 GB), 32 sequences at "
        "context 1,024: which MBU is that?",
        "percent of the bandwidth",
        _mbu,
        0.0105,  # as above
        (
            Wrong(
                "weights for every token",
                lambda: 32 * _mbu(2 * models.get("llama-3-8b").params_total),
                "That reads the weights once per token. The 32 sequences of a step share one "
                "reading.",
            ),
            Wrong(
                "no cache, or one",
                lambda: _mbu(_single()),
                "That is the weights, and at most one cache. Each of the sequences reads its own.",
            ),
            Wrong(
                "the embedding",
                lambda: _mbu(_whole()),
                "You read the whole embedding in each step. A step reads a row of it per token.",
            ),
            Wrong(
                "the 40 GB card",
                lambda: (
                    _mbu()
                    * hardware.get("a100-sxm-80gb").bandwidth_bytes_per_second
                    / hardware.get("a100-sxm-40gb").bandwidth_bytes_per_second
                ),
                "That is the bandwidth of the card with 40 GB; it has slower memory.",
            ),
        ),
        minutes=10,
        tests="which bytes a step moves, and that sequences share the weights",
    ),
    Function(
        "9.3",
        "The calibration",
        "Write the fit of efficiency and overhead by least squares of relative errors.",
        _fit_inputs,
        fit,
        (
            Wrong(
                "absolute errors",
                lambda bounds, measured: _least_squares(bounds, measured, [1.0] * len(bounds)),
                "You weigh absolute errors, so the longest steps decide alone. Relative ones "
                "count: divide each error by the time that was measured.",
            ),
            Wrong(
                "slope for efficiency",
                lambda bounds, measured: (
                    1 / fit(bounds, measured)[0],
                    fit(bounds, measured)[1],
                ),
                "You return the slope. The efficiency divides the bound, so it is 1 over the "
                "slope.",
            ),
            Wrong(
                "no overhead",
                _through_origin,
                "Your overhead is always 0. The line need not pass through the origin.",
            ),
            Wrong(
                "swapped",
                lambda bounds, measured: fit(bounds, measured)[::-1],
                "The two are the wrong way round: efficiency first, then the overhead.",
            ),
            Wrong(
                "bound over time",
                lambda bounds, measured: _least_squares(measured, bounds, [1.0] * len(bounds)),
                "You fit bounds to times. It is the time that is predicted from the bound.",
            ),
        ),
        minutes=20,
        tests="a fit that judges errors in proportion",
    ),
)
