"""Answers of every calculator for the bundled models, chips and formats, as text by name.

Run as it is in CPython and in the browser's Python; ends with the JSON text of all answers.
"""

import json
from itertools import cycle, product

from servelab import hardware, logs, memory, models, paging, roofline, serving, simulation, units

answers: dict[str, str] = {}


def note(name, calculate, *arguments, **options):
    """Keep the answer, or the refusal, which must be the same too."""
    try:
        answers[name] = repr(calculate(*arguments, **options))
    except (ValueError, KeyError, TypeError) as error:
        answers[name] = f"{type(error).__name__}: {error}"


def step_time(spec, step, dtype, chip):
    return roofline.time_bound(roofline.step_cost(spec, step, weight_dtype=dtype), chip, dtype)


def step_sums(spec, step, dtype):
    cost = roofline.step_cost(spec, step, weight_dtype=dtype)
    return cost.flop, cost.bytes, sorted(cost.by_name())


def blocks(spec, chip, engine):
    left = memory.budget(spec, chip, 0.9, reserve_bytes=units.GiB)
    return left, memory.capacity(spec, left.available_bytes, 8192, engine=engine)


def served(spec, chip):
    load = simulation.Trace("three", tuple(simulation.Arrival(i / 10, 500, 20) for i in range(3)))
    served = simulation.simulate(serving.Engine(serving.RooflineRunner(spec, chip)), load).served
    # Python 3.12 and later round a sum of floats otherwise, in the last digits.
    return [
        (one.output_tokens, f"{one.ttft_seconds:.9g}", f"{one.latency_seconds:.9g}")
        for one in served
    ]


SPECS = {name: models.get(name) for name in models.names()}
CHIPS = {name: hardware.get(name) for name in hardware.names()}
ENGINES = ("exact", "vllm", "sglang", "llama.cpp")  # each chip with the next of them
STEPS = {
    "decode": [(1, 1023)] * 8,
    "prefill": [(2048, 0)],
    "mixed": [(1, 4095)] * 4 + [(512, 512)],
}
LOG = """# GPU blocks: 1952, # CPU blocks: 2048
Maximum concurrency for 20000 tokens per request: 1.56x"""

for name, spec in SPECS.items():
    note(f"counts {name}", lambda s: (s.params_total, s.matmul_params, s.provenance), spec)
    note(f"log {name}", logs.explain_log, LOG, spec)
    for dtype in ("fp32", "bf16", "fp8", "int4", "q8_0", "fp9"):
        note(f"weights {name} {dtype}", spec.weight_bytes, dtype)
        for tokens, view in product((1, 4097, 100_000), ("logical", "reserved")):
            label = f"kv {name} {dtype} {tokens} {view}"
            note(label, memory.sequence_bytes, spec, tokens, dtype, view)
    for (label, step), dtype in product(STEPS.items(), ("bf16", "fp8")):
        note(f"cost {name} {label} {dtype}", step_sums, spec, step, dtype)
        for chip_name, chip in list(CHIPS.items())[::3]:
            note(f"time {name} {label} {dtype} {chip_name}", step_time, spec, step, dtype, chip)
    for (chip_name, chip), engine in zip(CHIPS.items(), cycle(ENGINES), strict=False):
        note(f"capacity {name} {chip_name} {engine}", blocks, spec, chip, engine)

for name, chip in CHIPS.items():
    note(f"rows {name}", roofline.rows_to_reach_ridge, 4096, 4096, chip, "bf16")
    note(f"simulate {name}", served, SPECS["qwen3-8b"], chip)

for value in (0, 1, 999, 1000, 1023, 1024, 10**9, 2**30, 141e9, 1.5e12, 7 * 10**14):
    for unit in (None, "GB", "GiB"):
        note(f"format_bytes {value} {unit}", units.format_bytes, value, unit)
    for form in (units.format_count, units.format_tokens):
        note(f"{form.__name__} {value}", form, int(value))
    for form in (units.format_flop, units.format_bandwidth, units.format_seconds):
        note(f"{form.__name__} {value}", form, value)
for text in ("80GB", "80 GiB", "1.5 TiB", "12", "GB", "-1 GB", "1e3 MB", "0.1 B", "", "8K", "1M"):
    note(f"parse_bytes {text}", units.parse_bytes, text)
    note(f"parse_tokens {text}", units.parse_tokens, text)
for text in ("20 ms", "1.5s", "3 us", "x", "5"):
    note(f"parse_seconds {text}", units.parse_seconds, text)
for number, figure in enumerate(logs.published()):
    note(f"published {number}", repr, figure)
note("blocks_for", paging.PoolShape(9, 16).blocks_for, 33)
json.dumps(answers)
