"""`servelab simulate`: what a service does with a trace: latencies, throughput, memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path

import click

from servelab import units
from servelab.allocation.lengths import sharegpt
from servelab.cli import options
from servelab.cli.configs import no_file
from servelab.cli.output import answer
from servelab.cli.simulated import text, values
from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.serving import Engine, RooflineRunner
from servelab.simulation import Simulation, Trace, poisson, read_trace, simulate, traces


def _source(text: str) -> Callable[[int | None], Trace]:
    """Return how the trace of that file or bundled name is read, to a number of requests."""
    if Path(text).exists():
        return lambda limit: read_trace(text, limit)
    if text in traces.names():
        return lambda limit: traces.get(text, limit)
    bundled = ", ".join(traces.names())
    raise ValueError(f"{no_file(Path(text))}; bundled traces: {bundled}")


def _rate(text: str) -> float:
    try:
        return units.check_positive("rate", float(text))
    except ValueError:
        raise ValueError(f"must be requests per second, above 0, got {text!r}") from None


@click.command(
    epilog=options.examples(
        "simulate qwen3-8b --hw a100-sxm-40gb --rate 4 --requests 200",
        "simulate qwen3-8b --hw l4 --trace azure_2023_conv --requests 300",
    )
)
@options.config_argument
@options.chip_option
@click.option(
    "--trace",
    "source",
    metavar="FILE",
    type=options.Parsed("file", _source, traces.names),
    help="Azure's CSV or Mooncake's JSON lines, plain or gzip; or the name of a bundled trace.",
)
@click.option(
    "--rate",
    type=options.Parsed("rate", _rate),
    help="Requests per second: at random times, or of the trace, stretched evenly.",
)
@click.option(
    "--requests", type=options.COUNT, help="Of the trace only so many; needed without one."
)
@options.prompt_option
@options.output_option
@click.option(
    "--lengths",
    type=click.Choice(("equal", "sharegpt")),
    default="equal",
    show_default=True,
    help="Draw prompts and answers from ShareGPT's lengths instead, without a trace.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of random times and lengths.",
)
@options.utilization_option
@click.option(
    "--reserve",
    "reserve_bytes",
    type=options.SIZE,
    default=0,
    metavar="SIZE",
    help="Activations, graphs and the rest: 2GiB.  [default: nothing]",
)
@options.block_size_option
@options.num_blocks_option
@click.option(
    "--max-num-seqs",
    type=options.COUNT,
    default=256,
    show_default=True,
    help="Sequences that run at once, at most.",
)
@click.option(
    "--max-num-batched-tokens",
    type=options.TOKENS,
    default=2048,
    show_default=True,
    help="Tokens of one step, at most.",
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "prefix_caching",
    default=None,
    help="[default: where the trace tells which prompts begin alike]",
)
@click.option(
    "--dtype",
    type=options.DTYPE,
    help="Format of arithmetic and activations.  [default: the model's own, bf16 for fp32]",
)
@click.option(
    "--kv-dtype",
    "--kv-cache-dtype",
    type=options.PLAIN_KV_FORMAT,
    default="auto",
    show_default=True,
    help="Format of the cache; auto is --dtype.",
)
@click.option(
    "--weight-dtype", type=options.DTYPE, help="Format of the weights.  [default: --dtype]"
)
@click.option(
    "--efficiency",
    type=options.SHARE,
    default=1.0,
    show_default=True,
    help="Share of the bound's speed that is reached, as measured.",
)
@click.option(
    "--overhead",
    "overhead_seconds",
    type=options.Parsed("time", units.parse_seconds),
    default=0.0,
    help="Of every step beside it: 2ms.  [default: nothing]",
)
@options.json_option
def command(
    spec: ModelSpec,
    chip: Accelerator,
    source: Callable[[int | None], Trace] | None,
    rate: float | None,
    requests: int | None,
    prompt: int,
    output: int,
    lengths: str,
    seed: int,
    utilization: float,
    reserve_bytes: int,
    block_size: int,
    num_blocks: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool | None,
    dtype: str | None,
    kv_dtype: str | None,
    weight_dtype: str | None,
    efficiency: float,
    overhead_seconds: float,
    as_json: bool,
) -> int:
    """A service on a simulated clock: latencies, throughput, memory.

    The engine's own scheduler and block pool serve a trace or, without one, --requests of --prompt
    and --output tokens at random times, on one device. A step takes its bound, one operator after
    another at the peaks of the data sheet, unless --efficiency and --overhead say more. Ctrl-C
    prints what is done so far.
    """
    if weight_dtype is None and spec.published_weight_bits is not None:
        raise click.UsageError(
            f"the published weights of {spec.name} are quantised to several formats; "
            "give one with --weight-dtype"
        )
    drawn = sharegpt().requests(seed) if lengths == "sharegpt" else repeat((prompt, output))
    trace = _trace(source, rate, requests, drawn, seed)
    runner = RooflineRunner(
        spec,
        chip,
        dtype or options.served_dtype(spec),
        efficiency,
        overhead_seconds,
        kv_dtype,
        weight_dtype,
        reserve_bytes + max_num_seqs * spec.state_bytes_per_sequence,
    )
    engine = Engine(
        runner,
        num_blocks,
        block_size,
        utilization,
        max_num_batched_tokens,
        max_num_seqs,
        trace.shares_prefixes if prefix_caching is None else prefix_caching,
    )
    run = _run(engine, trace)
    answer(as_json, values(run, runner), text(run, runner))
    if run.interrupted:
        click.echo(
            f"servelab: interrupted; these are the figures of {len(run.served):,} requests "
            f"out of {len(trace.arrivals):,}",
            err=True,
        )
        return 130
    return 0


def _trace(
    source: Callable[[int | None], Trace] | None,
    rate: float | None,
    requests: int | None,
    lengths: Iterator[tuple[int, int]],
    seed: int,
) -> Trace:
    if source is not None:
        trace = source(requests)
        return trace if rate is None else trace.rate(rate)
    if rate is None or requests is None:
        raise click.UsageError("give --trace FILE, or --rate R with --requests N")
    return poisson(rate, islice(lengths, requests), seed)


def _run(engine: Engine, trace: Trace) -> Simulation:
    """Simulate, with a progress bar on a terminal."""
    if not sys.stderr.isatty():
        return simulate(engine, trace)
    with click.progressbar(length=len(trace.arrivals), file=sys.stderr, label="requests") as bar:
        run = simulate(engine, trace, lambda done, _: bar.update(done - bar.pos))
        bar.update(len(run.served) + len(run.refused) - bar.pos)
    return run
