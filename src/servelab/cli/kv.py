"""`servelab kv`: the bytes of a cache, per token, per sequence and per rank."""

from collections.abc import Iterator
from dataclasses import replace

import click

from servelab.cli import arithmetic, options
from servelab.cli.output import answer, gb, gib, wrapped
from servelab.memory import sequence_bytes
from servelab.models import ModelSpec
from servelab.models.parallel import rank, stages
from servelab.units import format_tokens, table


@click.command(epilog=options.examples("kv qwen3-8b --tokens 32K --batch 8 --kv-dtype fp8 --tp 8"))
@options.config_argument
@click.option(
    "--tokens", type=options.TOKENS, help="Length of a sequence.  [default: the model's longest]"
)
@click.option(
    "--batch", type=options.COUNT, default=1, show_default=True, help="Sequences at once."
)
@options.kv_dtype_option
@options.tp_option
@options.pp_option
@options.json_option
def command(
    spec: ModelSpec,
    tokens: int | None,
    batch: int,
    kv_dtype: str | None,
    tp: int,
    pp: int,
    as_json: bool,
) -> None:
    """Bytes of keys and values per token, sequence, rank.

    The products are shown with the model's own numbers. A layer with a window holds no more than
    its window ("held"), but an engine that frees nothing behind it keeps every token ("reserved").
    """
    tokens = options.or_longest(tokens, spec)
    kv_dtype = kv_dtype or options.served_dtype(spec)
    lines = arithmetic.cache_lines(spec, kv_dtype)
    part = rank(spec, tp)
    stage = max(
        (replace(part, layers=layers) for layers in stages(part, pp)),
        key=lambda one: sequence_bytes(one, tokens, kv_dtype, "reserved"),
    )
    held, reserved = (
        batch * sequence_bytes(spec, tokens, kv_dtype, view) for view in ("logical", "reserved")
    )
    rank_held, rank_reserved = (
        batch * sequence_bytes(stage, tokens, kv_dtype, view) for view in ("logical", "reserved")
    )
    values = {
        "model": spec.name,
        "kv_dtype": kv_dtype,
        "tokens": tokens,
        "batch_sequences": batch,
        "tensor_parallel_ranks": tp,
        "pipeline_parallel_stages": pp,
        "kv_bytes_per_token": sum(x.bytes_per_token for x in lines if x.window_tokens is None),
        "kv_reserved_bytes_per_token": sum(x.bytes_per_token for x in lines),
        "state_bytes_per_sequence": spec.state_bytes_per_sequence,
        "sequence_bytes": held // batch,
        "sequence_reserved_bytes": reserved // batch,
        "batch_bytes": held,
        "batch_reserved_bytes": reserved,
        "rank_batch_bytes": rank_held,
        "rank_batch_reserved_bytes": rank_reserved,
        "all_ranks_batch_reserved_bytes": tp
        * batch
        * sequence_bytes(part, tokens, kv_dtype, "reserved"),
        "layers": [arithmetic.as_values(line) for line in lines],
    }

    def text() -> Iterator[str]:
        yield f"{spec.name}: {len(spec.layers)} layers, cache in {kv_dtype}"
        yield ""
        yield from _products(lines)
        formula = arithmetic.sequence_formula(lines, tokens)
        yield wrapped(f"{formula} = {held // batch:,} B per sequence of {tokens:,} tokens")
        if tp > 1:
            yield f"on each of {tp} tensor-parallel ranks"
            yield from _products(arithmetic.cache_lines(part, kv_dtype))
        yield ""
        whole = [(f"sequence of {format_tokens(tokens)}", held // batch, reserved // batch)]
        if batch > 1:
            whole.append((f"batch of {batch:,} x {format_tokens(tokens)}", held, reserved))
        if tp * pp > 1:
            whole.append(("of it on the fullest rank", rank_held, rank_reserved))
        rows: list[list[object]] = []
        for what, least, most in whole:
            windows = least != most
            rows.append([what + ", held" * windows, least, gib(least), gb(least)])
            if windows:
                rows.append([what + ", reserved", most, gib(most), gb(most)])
        yield table(rows, ["tokens", "bytes", "GiB", "GB"])

    answer(as_json, values, text())


def _products(lines: list[arithmetic.Line]) -> Iterator[str]:
    """Yield the product of each kind of layer, and the sum where several grow with every token."""
    for line in lines:
        yield wrapped(arithmetic.as_text(line))
    growing = [line.bytes_per_token for line in lines if line.window_tokens is None]
    if sum(size > 0 for size in growing) > 1:
        yield f"  together {sum(growing):,} B per token"
