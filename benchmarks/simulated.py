"""How fast a service is simulated: the Azure 2023 conversation trace, Qwen3-8B on an A100-40GB.

All 19,366 requests and their 4.1 million generated tokens, on one core. The time of a plain loop
stands beside it: their ratio is what to compare between machines, and on a machine that is shared.
"""

from __future__ import annotations

import time

from servelab import hardware, models
from servelab.serving import Engine, RooflineRunner
from servelab.simulation import percentile, simulate, traces
from servelab.units import format_seconds


def loop_seconds() -> float:
    """Return the CPU time of adding up ten million whole numbers, one by one."""
    start, total = time.process_time(), 0
    for number in range(10**7):
        total += number
    return time.process_time() - start


def report() -> None:
    """Simulate once, and print what it took and what came out."""
    runner = RooflineRunner(models.get("qwen3-8b"), hardware.get("a100-sxm-40gb"))
    trace = traces.get("azure_2023_conv")
    engine = Engine(runner, enable_prefix_caching=False)  # no prompt of this trace is shared
    loop = loop_seconds()
    start = time.process_time()
    run = simulate(engine, trace)
    spent = time.process_time() - start
    loop = (loop + loop_seconds()) / 2
    print(
        f"simulated {len(run.served):,} requests of {trace.name}, "
        f"{run.counters.generated_tokens:,} tokens: {spent:.1f} s of CPU time"
    )
    print(f"  {spent / loop:.1f} x a loop of 10^7 additions ({loop:.2f} s)")
    ttft, tpot = (
        ", ".join(format_seconds(percentile(values, percent)) for percent in (50, 90, 99))
        for values in (run.ttft_seconds, run.tpot_seconds)
    )
    print(f"  TTFT {ttft}; TPOT {tpot} (p50, p90, p99)")


if __name__ == "__main__":
    report()
