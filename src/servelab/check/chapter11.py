"""Exercises of chapter 11: users at once, what fits, the limit, TPOT at a rate, the front."""

import math
import random
from dataclasses import replace

from servelab import hardware, memory, models
from servelab.check.chapter01 import with_kv_heads
from servelab.check.exercise import Exercise, Number, Option, Pick, Wrong
from servelab.check.function import Function
from servelab.models import ModelSpec
from servelab.units import GB, GiB

_CONTEXT = 4096  # tokens of a user
Point = tuple[float, float]


def _fits(
    utilization: float = 0.9,
    spec: ModelSpec | None = None,
    device_bytes: int | None = None,
    weights: bool = True,
) -> int:
    spec, chip = spec or models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")
    if device_bytes is not None:
        chip = replace(chip, memory_bytes=device_bytes, visible_memory_bytes=device_bytes)
    left = memory.budget(models.get("qwen3-8b"), chip, utilization)
    room = left.available_bytes if weights else left.usable_bytes
    return memory.max_sequences(spec, room, _CONTEXT)


def tpot_seconds(
    rate: float, debt_seconds: float, decodes: int, base_seconds: float, slope_seconds: float
) -> float:
    """Return the mean time per further token of a replica in its steady state."""
    unclaimed = 1 - rate * debt_seconds - rate * decodes * slope_seconds
    return base_seconds / unclaimed if unclaimed > 0 else math.inf


def _tpot_inputs(rng: random.Random) -> tuple[object, ...]:
    debt, decodes = rng.uniform(0.005, 0.3), rng.randint(20, 600)
    base, slope = rng.uniform(0.003, 0.06), rng.uniform(1e-5, 5e-4)
    most = 1 / (debt + decodes * slope)
    return most * rng.uniform(0.1, 1.25), debt, decodes, base, slope


def front_of(points: list[Point]) -> list[Point]:
    """Return the points that no other beats, by latency."""
    front: list[Point] = []
    for latency, throughput in sorted(points, key=lambda p: (p[0], -p[1])):
        if not front or throughput > front[-1][1]:
            front.append((latency, throughput))
    return front


def _points_inputs(rng: random.Random) -> tuple[object, ...]:
    grid = [(float(x), float(y)) for x in range(1, 9) for y in range(1, 9)]
    return (rng.sample(grid, rng.randint(2, 12)),)


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "11.1",
        "Users at once",
        "8 requests per second, 250 tokens each, the first after 0.3 s, the others every 40 ms: "
        "how many users are in the service at once?",
        "users",
        lambda: 8 * (0.3 + 249 * 0.04),
        0.001,
        (
            Wrong(
                "the wait for the first token left out",
                8 * 249 * 0.04,
                "That counts those who decode. Who waits for a first token is in the service too.",
            ),
            Wrong(
                "the first token counted twice",
                8 * (0.3 + 250 * 0.04),
                "The first of the 250 tokens comes with the TTFT: 249 are left.",
            ),
            Wrong(
                "one further token",
                8 * (0.3 + 0.04),
                "A user stays until the last token, not until the second.",
            ),
            Wrong(
                "the time of one user",
                0.3 + 249 * 0.04,
                "That is how long a user stays, in seconds. How many come in that time?",
            ),
            Wrong(
                "tokens per second",
                8 * 250,
                "That is the output in tokens per second.",
            ),
        ),
        minutes=5,
        tests="Little's law: users are rate times time",
    ),
    Number(
        "11.2",
        "What one chip holds",
        "How many users of 4,096 tokens fit on an H100 beside Qwen3-8B in bf16, with 90 % of the "
        "memory that the framework reports?",
        "users",
        _fits,
        0.0,
        (
            Wrong(
                "weights forgotten",
                lambda: _fits(weights=False),
                "The weights stand in the same memory. Subtract them first.",
            ),
            Wrong(
                "GB for GiB",
                lambda: _fits(device_bytes=80 * GB),
                "The 80 GB on the label are GiB here, and a little less is visible to a program: "
                "see the catalogue.",
            ),
            Wrong(
                "the label",
                lambda: _fits(device_bytes=80 * GiB),
                "That takes all 80 GiB of the label. The framework reports a little less.",
            ),
            Wrong(
                "the whole device",
                lambda: _fits(1.0),
                "That uses all of the device. The engine may use 90 % of it.",
            ),
            Wrong(
                "GQA ignored",
                lambda: _fits(spec=with_kv_heads(models.get("qwen3-8b"), 32)),
                "That keeps a key and a value for every query head. Qwen3-8B has 8 KV heads.",
            ),
            Wrong(
                "factor 2",
                lambda: 2 * _fits() + 1,
                "Twice too many: a token leaves a key and a value.",
            ),
        ),
        minutes=10,
        tests="that memory bounds the batch, to the user",
    ),
    Pick(
        "11.3",
        "Name the limit",
        "A full cache, waiting requests, little prefill: which sentences about the limit hold?",
        {
            "a": Option(
                "utilisation is no sign of compute",
                "a kernel that waits for memory keeps the device busy as well.",
            ),
            "b": Option(
                "FLOP/s shorten decode steps in proportion",
                "which of its two times is a decode step as long as?",
            ),
            "c": Option(
                "no memory to admit requests",
                "the log says what is full while they wait, and how little time prompts take.",
            ),
            "d": Option(
                "more replicas do not help",
                "each of them gets fewer of the requests.",
            ),
            "e": Option(
                "bandwidth helps too",
                "by Little's law, what happens to the users at once if each leaves sooner?",
            ),
        },
        "ace",
        "The queue forms where the memory is full; how fast it clears is up to the bandwidth.",
        minutes=8,
        tests="telling where a queue forms from what would clear it",
    ),
    Function(
        "11.4",
        "TPOT at a rate",
        "Write the mean TPOT of a replica from the rate, the debt of a prompt and the line of the "
        "decode step.",
        _tpot_inputs,
        tpot_seconds,
        (
            Wrong(
                "prompts are free",
                lambda rate, debt_seconds, decodes, base_seconds, slope_seconds: tpot_seconds(
                    rate, 0.0, decodes, base_seconds, slope_seconds
                ),
                "Prompts take time from the decode steps: their share is the rate times the debt.",
            ),
            Wrong(
                "a step of one sequence",
                lambda rate, debt_seconds, decodes, base_seconds, slope_seconds: tpot_seconds(
                    rate, debt_seconds, decodes, base_seconds, 0.0
                ),
                "Your step is as long for many sequences as for none: each brings its cache.",
            ),
            Wrong(
                "no load at all",
                lambda rate, debt_seconds, decodes, base_seconds, slope_seconds: (
                    base_seconds + slope_seconds
                ),
                "That is the step of a lone sequence. The rate sets how many there are.",
            ),
            Wrong(
                "negative beyond the limit",
                lambda rate, debt_seconds, decodes, base_seconds, slope_seconds: (
                    base_seconds / (1 - rate * debt_seconds - rate * decodes * slope_seconds)
                ),
                "Beyond the limit your time is negative: there is no steady state, the queue "
                "grows without end.",
            ),
            Wrong(
                "one decode step",
                lambda rate, debt_seconds, decodes, base_seconds, slope_seconds: tpot_seconds(
                    rate, debt_seconds, 1, base_seconds, slope_seconds
                ),
                "Each request takes part in as many steps as it has further tokens.",
            ),
        ),
        minutes=15,
        tests="the balance of a replica in its steady state",
    ),
    Function(
        "11.5",
        "The front",
        "Write the points (latency, throughput) that no other point beats, by latency.",
        _points_inputs,
        front_of,
        (
            Wrong(
                "everything",
                lambda points: sorted(points),
                "You keep points that others beat in both.",
            ),
            Wrong(
                "equals kept",
                lambda points: sorted(
                    p for p in points if not any(q[0] < p[0] and q[1] > p[1] for q in points)
                ),
                "A point that is equal in one and worse in the other is beaten too.",
            ),
            Wrong(
                "least throughput",
                lambda points: (
                    front_of([(x, -y) for x, y in points])
                    and [(x, -y) for x, y in front_of([(x, -y) for x, y in points])]
                ),
                "You keep the least throughput: more is better, only latency should be small.",
            ),
            Wrong(
                "the best of each",
                lambda points: sorted(
                    {
                        min(points, key=lambda p: (p[0], -p[1])),
                        max(points, key=lambda p: (p[1], -p[0])),
                    }
                ),
                "Between the fastest and the most productive there are points that nothing beats.",
            ),
        ),
        minutes=15,
        tests="what it means that a choice is not dominated",
    ),
)
