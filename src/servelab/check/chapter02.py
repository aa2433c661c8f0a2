"""Exercises of chapter 2: ridges, rows that reach them, intensity and bounds."""

import random

from servelab import hardware, models, roofline
from servelab.check.exercise import Exercise, Number, Wrong
from servelab.check.function import Function
from servelab.hardware import Accelerator
from servelab.roofline import Cost


def _down() -> tuple[int, int]:
    qwen = models.get("qwen3-8b")
    matrix = qwen.layers[0].mlp.linears(qwen.hidden_size)[-1]  # type: ignore[union-attr]
    return matrix.d_in, matrix.d_out


def _h100() -> Accelerator:
    return hardware.get("h100-sxm-80gb")


def _rows(ridge: float, weight_dtype: str = "bf16", activation_dtype: str = "bf16") -> int:
    """Return the fewest rows of down_proj whose intensity reaches a ridge."""
    rows = 1
    while roofline.matmul(rows, *_down(), weight_dtype, activation_dtype).intensity < ridge:
        rows += 1
    return rows


def _rows_on(chip: str) -> int:
    return roofline.rows_to_reach_ridge(*_down(), hardware.get(chip), "bf16")


def _step(context: int = 2048) -> Cost:
    return roofline.step_cost(models.get("qwen3-8b"), [(1, context - 1)] * 64)


def _share(cost: Cost) -> float:
    """Return the percentage of the peak that a cost reaches at best."""
    bound = roofline.time_bound(cost, _h100(), "bf16")
    return 100 * cost.flop / bound.seconds / _h100().peak("bf16")


def _linear_share() -> float:
    cost = _step()
    attention = cost.by_name()["attention"]
    flop, moved = cost.flop - attention.flop, cost.bytes - attention.bytes
    return 100 * flop / moved / _h100().ridge("bf16")


def intensity(rows: int, d_in: int, d_out: int, element_bytes: int) -> float:
    """Return the FLOP per byte of a (rows, d_in) by (d_in, d_out) product."""
    dtype = {1: "fp8", 2: "bf16", 4: "fp32"}[element_bytes]
    return roofline.matmul(rows, d_in, d_out, dtype, dtype).intensity


def bound_seconds(flop: int, moved_bytes: int, peak: float, bandwidth: float) -> float:
    """Return the least time of work and traffic on a chip, everything overlapped."""
    return max(flop / peak, moved_bytes / bandwidth)


def _per_byte(
    rows: int, d_in: int, d_out: int, size: int, flop: int = 2, out: int = 1, x: int = 1
) -> float:
    moved = size * (d_in * d_out + x * rows * d_in + out * rows * d_out)
    return flop * rows * d_in * d_out / moved


def _matrix_inputs(rng: random.Random) -> tuple[object, ...]:
    d_in, d_out = rng.sample(range(64, 5000), 2)
    return rng.randint(1, 3000), d_in, d_out, rng.choice([1, 2, 4])


def _bound_inputs(rng: random.Random) -> tuple[object, ...]:
    peak, bandwidth = rng.uniform(1e13, 1e15), rng.uniform(3e11, 5e12)
    moved = rng.randint(10**6, 10**11)
    flop = int(moved * peak / bandwidth * 2 ** rng.uniform(-5, 5))
    return flop, moved, peak, bandwidth


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "2.1",
        "The ridge of another chip",
        "How many rows does down_proj of Qwen3-8B need on an H200 to be limited by compute, in "
        "bf16?",
        "rows",
        lambda: _rows_on("h200-sxm"),
        0.0,
        (
            Wrong(
                "the ridge itself",
                lambda: round(hardware.get("h200-sxm").ridge("bf16")),
                "That is the ridge. Activations are bytes too, so it takes somewhat more rows.",
            ),
            Wrong(
                "the H100",
                lambda: _rows_on("h100-sxm-80gb"),
                "That is the H100. The H200 has the same arithmetic and more bandwidth.",
            ),
            Wrong("the L4", lambda: _rows_on("l4"), "That is the L4."),
            Wrong(
                "sparse peak",
                lambda: _rows(2 * hardware.get("h200-sxm").ridge("bf16")),
                "That takes the sparse peak, twice the dense one. Weights of a served model are "
                "dense.",
            ),
            Wrong(
                "one FLOP per multiply-add",
                lambda: _rows(hardware.get("h200-sxm").ridge("bf16") / 2),
                "Is that half of what you would expect? A row buys one FLOP per byte in bf16: two "
                "FLOP per weight of two bytes.",
            ),
        ),
        minutes=10,
        tests="the rows that reach a ridge, and that the ridge is a ratio",
    ),
    Number(
        "2.2",
        "The bytes of a weight",
        "Weights in fp8, activations and arithmetic in bf16: how many rows of down_proj reach the "
        "ridge of an H100?",
        "rows",
        lambda: _rows(_h100().ridge("bf16"), "fp8"),
        0.0,
        (
            Wrong(
                "unchanged",
                lambda: _rows_on("h100-sxm-80gb"),
                "That is the number for weights in bf16. The bytes of the weights have changed.",
            ),
            Wrong(
                "half the ridge",
                lambda: round(_h100().ridge("bf16") / 2),
                "That is the short form, which counts the weights alone.",
            ),
            Wrong(
                "fp8 or sparse peak",
                lambda: _rows(_h100().ridge("fp8"), "fp8"),
                "That takes a peak twice as high: that of fp8 arithmetic, or the sparse one. The "
                "weights are converted, the arithmetic is still dense bf16.",
            ),
            Wrong(
                "activations in fp8 too",
                lambda: _rows(_h100().ridge("bf16"), "fp8", "fp8"),
                "You halved the bytes of the activations too. They stay in bf16.",
            ),
        ),
        minutes=10,
        tests="which bytes and which peak a weight format changes",
    ),
    Number(
        "2.3",
        "Close to the roof?",
        "What share of an H100's peak can a decode step of Qwen3-8B with 64 sequences at context "
        "2,048 reach at best?",
        "percent of the peak",
        lambda: _share(_step()),
        0.02,
        (
            Wrong(
                "64 over the ridge",
                lambda: 100 * 64 / _h100().ridge("bf16"),
                "That is 64 over the ridge, the weights alone. Each sequence reads its own cache "
                "as well.",
            ),
            Wrong(
                "linear layers alone",
                _linear_share,
                "That is the linear layers without attention. Attention's bytes belong to the "
                "step.",
            ),
            Wrong(
                "sparse peak",
                lambda: _share(_step()) / 2,
                "That divides by the sparse peak, twice the dense one.",
            ),
            Wrong(
                "the whole peak",
                100,
                "The step is limited by memory: it cannot reach the peak.",
            ),
            Wrong(
                "the intensity",
                lambda: _step().intensity,
                "That is the intensity, in FLOP per byte. Compare it with the ridge.",
            ),
            Wrong(
                "factor 2",
                lambda: _share(_step()) * 2,
                "Twice too much: one multiply-add is two FLOP, counted once.",
            ),
        ),
        minutes=12,
        tests="the roofline of a whole decode step, attention included",
    ),
    Function(
        "2.4",
        "Intensity of a matrix product",
        "Write the FLOP per byte of a product of (rows, d_in) by (d_in, d_out), all elements of "
        "one size.",
        _matrix_inputs,
        intensity,
        (
            Wrong(
                "one FLOP per multiply-add",
                lambda rows, d_in, d_out, size: _per_byte(rows, d_in, d_out, size, flop=1),
                "Half of the right intensity: a multiply-add is two FLOP.",
            ),
            Wrong(
                "weights alone",
                lambda rows, d_in, d_out, size: _per_byte(rows, d_in, d_out, size, out=0, x=0),
                "You count the bytes of the weights alone. Activations go in and come out.",
            ),
            Wrong(
                "reads alone",
                lambda rows, d_in, d_out, size: _per_byte(rows, d_in, d_out, size, out=0),
                "You count what is read. The result is written: that is traffic too.",
            ),
            Wrong(
                "output twice",
                lambda rows, d_in, d_out, size: _per_byte(rows, d_in, d_out, size, out=2),
                "You count the result twice. It is written once and not read.",
            ),
            Wrong(
                "elements for bytes",
                lambda rows, d_in, d_out, size: _per_byte(rows, d_in, d_out, 1),
                "You count elements, not bytes.",
            ),
        ),
        minutes=8,
        tests="FLOP and bytes, reads and writes, of the basic operator",
    ),
    Function(
        "2.5",
        "The bound",
        "Write the least time of some work and traffic on a chip, everything overlapped.",
        _bound_inputs,
        bound_seconds,
        (
            Wrong(
                "sum",
                lambda flop, moved, peak, bandwidth: flop / peak + moved / bandwidth,
                "The sum is the time without any overlap: an upper bound. The least time assumes "
                "that the two run at once.",
            ),
            Wrong(
                "shorter of the two",
                lambda flop, moved, peak, bandwidth: min(flop / peak, moved / bandwidth),
                "Not before the longer of the two is done is the step done.",
            ),
            Wrong(
                "compute alone",
                lambda flop, moved, peak, bandwidth: flop / peak,
                "You leave out the traffic.",
            ),
            Wrong(
                "traffic alone",
                lambda flop, moved, peak, bandwidth: moved / bandwidth,
                "You leave out the arithmetic.",
            ),
        ),
        minutes=5,
        tests="the roofline as a bound on time",
    ),
)
