"""Our own code against its roofs: ``python benchmarks/run.py``, or ``make bench``.

The roofs of this device are measured before and after the steps of a small dense decoder, which are
executed one of each in turn, so that whatever disturbs the machine disturbs them alike. The table
gives medians, the bound that the measured roofs set, and how much of it was reached; below it,
ratios of medians. Absolute times are this machine's and this moment's; the ratios are what to
compare. Then a service is simulated (``simulated.py``), and the engine is held against its goals
(``serving_speed.py``; on a CPU), and the live pages against theirs (``live_pages.py``; in the built
book, where there is a browser). At the end, other calculators and ours answer the same question
(``peers_config.py``; needs the package index).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import live_pages
import peers_config
import serving_speed
import simulated
import torch

from servelab import measure, roofline, units
from servelab.decoder import DenseCache, DenseDecoder
from servelab.models import ModelSpec

# 96 M parameters: beyond the last cache level of most CPUs and GPUs in either dtype.
SPEC = ModelSpec.from_config(
    {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 7,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    },
    name="bench-96m",
)
CONTEXT_TOKENS = 256


def decode_step(
    model: DenseDecoder, batch: int, device: str, dtype: torch.dtype
) -> Callable[[], object]:
    """Return one decode step of ``batch`` sequences at the end of the context, repeatable."""
    cache = DenseCache(SPEC, batch, CONTEXT_TOKENS, device, dtype)
    token = torch.zeros((batch, 1), dtype=torch.long, device=device)  # (B, 1)

    def step() -> None:
        cache.length = CONTEXT_TOKENS - 1
        model(token, cache, last_only=True)

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=15, help="executions of each step")
    parser.add_argument("--no-engine", action="store_true", help="leave the engine's goals out")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few and short batches")
    parser.add_argument("--json", metavar="FILE", help="write the engine's raw samples there too")
    parser.add_argument("--no-peers", action="store_true", help="leave other calculators out")
    options = parser.parse_args()
    rounds = min(options.rounds, 3) if options.quick else options.rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")

    device = measure.probe()
    print(device.line)
    roofs = [measure.roofs(quick=True)]
    name, dtype = ("bf16", torch.bfloat16) if device.kind == "cuda" else ("fp32", torch.float32)
    model = DenseDecoder(SPEC, device=device.kind, dtype=dtype)
    context = torch.zeros((1, CONTEXT_TOKENS), dtype=torch.long, device=device.kind)  # (1, N)
    steps = {
        "decode, cached": ([(1, CONTEXT_TOKENS - 1)], decode_step(model, 1, device.kind, dtype)),
        "decode, cached, 16 sequences": (
            [(1, CONTEXT_TOKENS - 1)] * 16,
            decode_step(model, 16, device.kind, dtype),
        ),
        "decode, no cache": ([(CONTEXT_TOKENS, 0)], lambda: model(context, last_only=True)),
    }
    samples: dict[str, list[float]] = {label: [] for label in steps}
    for turn in range(rounds + 1):
        for label, (_, work) in steps.items():
            seconds = measure.sample_seconds(work, samples=1, warmup=0)
            if turn:  # the first turn is the warm-up
                samples[label] += seconds

    roofs.append(measure.roofs(quick=True))  # before and after: of each rate the less disturbed
    chip = measure.fastest(roofs).as_accelerator()
    print(
        f"roofs: {units.format_bandwidth(chip.bandwidth_bytes_per_second)}, "
        f"{units.format_flop_rate(chip.peak(name))} in {name}"
    )
    median = {label: statistics.median(values) for label, values in samples.items()}
    rows: list[list[object]] = []
    reached: list[float] = []
    for label, (step, _) in steps.items():
        cost = roofline.step_cost(
            SPEC, step, weight_dtype=name, kv_dtype=name, activation_dtype=name
        )
        bound = roofline.time_bound(cost, chip, name)
        reached.append(bound.serial_seconds / median[label])
        rows.append(
            [
                label,
                units.format_seconds(median[label]),
                units.format_seconds(bound.serial_seconds),
                bound.limiter,
                f"{reached[-1]:.0%}",
            ]
        )
    print(f"{SPEC.name}, context {CONTEXT_TOKENS}, medians of {rounds}:")
    print(units.table(rows, ["step", "median", "bound, operators in turn", "limit", "reached"]))
    if max(reached) > 1:
        print("over 100 %: something else ran while the roofs were measured; run it again alone")
    single = median["decode, cached"]
    print(f"no cache / cached: {median['decode, no cache'] / single:.1f} x the time of a token")
    gain = 16 * single / median["decode, cached, 16 sequences"]
    print(f"16 sequences / 1:  {gain:.1f} x the tokens per second")
    print()
    simulated.report()
    if not options.no_engine:
        print()
        if device.kind == "cpu":
            asked = ["--quick"] * options.quick + (["--json", options.json] if options.json else [])
            serving_speed.run(serving_speed.options_from(asked))
        else:
            print("the engine's goals here are a CPU's: see tools/gpu_check.py for a GPU's")
    print()
    live_pages.report()
    if not options.no_peers:
        print()
        try:
            peers_config.compare()
        except SystemExit as reason:  # no network: our own measurements stand
            print(f"other calculators left out: {reason}")


if __name__ == "__main__":
    main()
