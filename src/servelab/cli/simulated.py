"""What `servelab simulate` prints of a run: for people and for programs."""

from collections.abc import Iterator

from servelab.cli.output import wrapped
from servelab.serving import RooflineRunner
from servelab.simulation import Simulation, percentile
from servelab.units import format_bytes, format_seconds, table

_PERCENTS = (50, 90, 99)
_TIMES = {
    "ttft_seconds": "first token (TTFT)",
    "tpot_seconds": "further token (TPOT)",
    "latency_seconds": "whole request",
}


def _percentiles(run: Simulation) -> dict[str, dict[str, float]]:
    """Return the percentiles of each time that any served request has."""
    return {
        name: {f"p{percent}": percentile(found, percent) for percent in _PERCENTS}
        for name in _TIMES
        if (found := getattr(run, name))
    }


def values(run: Simulation, runner: RooflineRunner) -> dict[str, object]:
    """Return every figure, its unit in its name."""
    counters, pricer = run.counters, runner.pricer
    return {
        "model": runner.spec.name,
        "accelerator": runner.chip.name,
        "dtype": pricer.dtype,
        "kv_dtype": pricer.kv_dtype,
        "weight_dtype": pricer.weight_dtype,
        "efficiency": runner.efficiency,
        "overhead_seconds": runner.overhead_seconds,
        "trace": run.trace.name,
        "requests": len(run.trace.arrivals),
        "served_requests": len(run.served),
        "refused_requests": len(run.refused),
        "refusal": run.refusal,
        "interrupted": run.interrupted,
        "seconds": run.clock_seconds,
        **_percentiles(run),
        "output_tokens_per_second": run.output_tokens_per_second,
        "requests_per_second": run.requests_per_second,
        "mean_requests_in_system": run.mean_requests,
        "unfinished_at_last_arrival": run.unfinished_at_last_arrival,
        "steps": counters.steps,
        "computed_tokens": counters.computed_tokens,
        "generated_tokens": counters.generated_tokens,
        "pool_blocks": run.num_blocks,
        "block_size_tokens": run.block_size,
        "mean_pool_share": run.mean_pool_use,
        "peak_pool_share": run.peak_blocks / run.num_blocks,
        "preemptions": run.preemptions,
        "prefix_queried_tokens": counters.prefix_queried_tokens,
        "prefix_hit_tokens": counters.prefix_hit_tokens,
    }


def text(run: Simulation, runner: RooflineRunner) -> Iterator[str]:
    """Yield what the service was, what it did, and what it held."""
    spec, counters = runner.spec, run.counters
    yield f"{spec.name} on {runner.chip.name}: {len(run.trace.arrivals):,} requests"
    yield f"{run.trace.name}: they arrive within {format_seconds(run.trace.seconds)}"
    per_token = spec.kv_bytes_per_token(kv_dtype=runner.kv_dtype, view="reserved")
    size = format_bytes(run.num_blocks * run.block_size * per_token)
    yield f"pool: {run.num_blocks:,} blocks of {run.block_size} tokens, {size}"
    yield _step_time(runner)
    yield ""
    rows: list[list[object]] = [
        [_TIMES[name], *map(format_seconds, found.values())]
        for name, found in _percentiles(run).items()
    ]
    yield table(rows, ["time, nearest rank", *(f"p{percent}" for percent in _PERCENTS)])
    yield ""
    yield (
        f"{run.output_tokens_per_second:,.0f} output tokens/s, "
        f"{run.requests_per_second:,.2f} requests/s over {format_seconds(run.clock_seconds)}"
    )
    yield (
        f"{run.mean_requests:,.1f} requests waiting or running on average, "
        f"{run.unfinished_at_last_arrival:,} when the last one arrived"
    )
    each = counters.generated_tokens / max(counters.steps, 1)
    yield f"{counters.steps:,} steps, each of {each:,.1f} output tokens on average"
    peak = run.peak_blocks / run.num_blocks
    yield f"pool {run.mean_pool_use:.1%} held on average, {peak:.1%} at most"
    yield f"{run.preemptions:,} pre-emptions"
    if counters.prefix_queried_tokens:
        found = f"{counters.prefix_hit_tokens:,} of {counters.prefix_queried_tokens:,} tokens found"
        yield f"prefix cache: {found}, {run.prefix_hit_rate:.1%}"
    if run.refused:
        yield wrapped(f"{len(run.refused):,} requests refused; the first: {run.refusal}")


def _step_time(runner: RooflineRunner) -> str:
    """Return what a step takes, in words."""
    if runner.efficiency == 1 and not runner.overhead_seconds:
        return "a step takes its bound: a real service is slower"
    share = "" if runner.efficiency == 1 else f" / {runner.efficiency:g}"
    extra = f" + {format_seconds(runner.overhead_seconds)}" if runner.overhead_seconds else ""
    return f"a step takes its bound{share}{extra}"
