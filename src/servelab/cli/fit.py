"""`servelab fit`: how many users a chip holds, and what stops the next one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import click

from servelab import memory
from servelab.cli import emit as emitted
from servelab.cli import options
from servelab.cli.output import answer, wrapped
from servelab.hardware import Accelerator
from servelab.memory import Budget, Capacity
from servelab.memory.launch import serve_line
from servelab.models import ModelSpec
from servelab.units import format_bytes, format_seconds


@click.command(
    epilog=options.examples(
        "fit qwen3-8b --hw h100-sxm-80gb --util 0.9 --max-model-len 8K",
        "fit qwen3-8b --hw h100-sxm-80gb --max-model-len 8K --tpot 15ms",
        "fit qwen3-8b --hw h100-sxm-80gb --max-model-len 8K --emit vllm",
    )
)
@options.config_argument
@options.chip_option
@options.utilization_option
@click.option(
    "--max-model-len",
    type=options.TOKENS,
    help="Tokens of one user, prompt and answer.  [default: the model's longest]",
)
@click.option(
    "--engine",
    type=click.Choice(memory.ENGINES),
    default="vllm",
    show_default=True,
    help="Whose rounding to follow. TensorRT-LLM takes --util of what is free.",
)
@click.option("--block-size", type=options.COUNT, help="Tokens per block.  [default: the engine's]")
@click.option(
    "--max-num-batched-tokens",
    type=options.TOKENS,
    help="Tokens of one step, which windows hold beside their own.  [default: the engine's]",
)
@click.option(
    "--reserve",
    "reserve_bytes",
    type=options.SIZE,
    default=0,
    metavar="SIZE",
    help="Activations, graphs and the rest, from the engine's log: 2GiB.  [default: nothing]",
)
@options.kv_dtype_option
@options.weight_dtype_option
@options.compute_dtype_option
@options.tp_option
@options.pp_option
@click.option(
    "--dcp",
    "--decode-context-parallel-size",
    type=options.COUNT,
    default=1,
    show_default=True,
    help="Ranks that share the tokens of one user.",
)
@click.option("--tpot", type=options.SECONDS, help="Target per output token: 50ms.")
@click.option("--ttft", type=options.SECONDS, help="Target for the first token: 2s.")
@click.option(
    "--prompt",
    type=options.TOKENS,
    help="Tokens of a prompt, for --ttft.  [default: all but one of --max-model-len]",
)
@click.option(
    "--efficiency",
    type=options.SHARE,
    default=1.0,
    show_default=True,
    help="Share of the bound's speed that is reached, as measured.",
)
@click.option(
    "--emit",
    type=click.Choice(["vllm"]),
    help="Print the `vllm serve` line that follows, each flag with its reason.",
)
@options.json_option
@click.pass_context
def command(
    context: click.Context,
    spec: ModelSpec,
    chip: Accelerator,
    utilization: float,
    max_model_len: int | None,
    engine: str,
    block_size: int | None,
    max_num_batched_tokens: int | None,
    reserve_bytes: int,
    kv_dtype: str | None,
    weight_dtype: str | None,
    compute_dtype: str | None,
    tp: int,
    pp: int,
    dcp: int,
    tpot: float | None,
    ttft: float | None,
    prompt: int | None,
    efficiency: float,
    emit: str | None,
    as_json: bool,
) -> None:
    """Users that fit on a chip, and the limit hit first.

    The budget term by term, the blocks that an engine makes of what is left, and how many users of
    full length these serve; under a target of latency, how many are served in time.
    """
    length = options.or_longest(max_model_len, spec)
    asked = length - 1 if prompt is None else prompt
    if not 0 < asked < length and (prompt is not None or tpot is not None or ttft is not None):
        raise click.UsageError(
            f"a prompt of {asked:,} tokens leaves none to answer in --max-model-len {length:,}"
        )
    if emit:
        if engine != "vllm":
            raise click.UsageError(f"--emit vllm counts as vllm does, not as --engine {engine}")
        line = serve_line(
            spec,
            chip,
            emitted.served_name(context.meta[options.CONFIG_TEXT]),
            length,
            utilization=utilization,
            kv_dtype=kv_dtype,
            weight_dtype=weight_dtype,
            reserve_bytes=reserve_bytes,
            prompt_tokens=prompt,
            tpot_seconds=tpot,
            ttft_seconds=ttft,
            precision=None
            if tpot is None and ttft is None
            else options.precision_of(spec, kv_dtype, weight_dtype, compute_dtype),
            efficiency=efficiency,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            tp=tp,
            pp=pp,
            dcp=dcp,
        )
        answer(as_json, emitted.values(line), emitted.text(line, spec.name, chip.name))
        return
    kv_dtype = kv_dtype or options.served_dtype(spec)
    if weight_dtype is None and spec.published_weight_bytes is None:
        weight_dtype = options.served_dtype(spec)
    settings: dict[str, Any] = {
        "block_size": block_size,
        "kv_dtype": kv_dtype,
        "engine": engine,
        "tp": tp,
        "pp": pp,
        "dcp": dcp,
        "max_num_batched_tokens": max_num_batched_tokens,
    }

    def left_with(ranks: int) -> Budget:
        terms = memory.budget(
            spec,
            chip,
            1.0 if engine == "tensorrt-llm" else utilization,
            weight_dtype,
            reserve_bytes,
            tp=ranks,
            pp=pp,
        )
        return _share_of_free(terms, utilization) if engine == "tensorrt-llm" else terms

    left = left_with(tp)
    room = max(left.available_bytes, 0)
    fits = memory.capacity(spec, room, length, **settings)
    longest = memory.max_engine_context(
        spec, room, 1, spec.max_context_tokens or length, **settings
    )
    found = memory.Users(fits.sequences, "memory", "capacity", {"capacity": fits.sequences})
    if tpot is not None or ttft is not None:
        prompt = length - 1 if prompt is None else prompt
        formats = options.precision_of(spec, kv_dtype, weight_dtype, compute_dtype)
        request = prompt, length - prompt, tpot, ttft, formats, efficiency
        found = memory.max_users(spec, chip, room, *request, **settings)
    values: dict[str, Any] = {
        "model": spec.name,
        "accelerator": chip.name,
        "engine": engine,
        "kv_dtype": kv_dtype,
        "utilization": utilization,
        "max_model_len_tokens": length,
        "tensor_parallel_ranks": tp,
        "pipeline_parallel_stages": pp,
        "device_bytes": left.device_bytes,
        "usable_bytes": left.usable_bytes,
        "weight_bytes": left.weight_bytes,
        "reserve_bytes": left.reserve_bytes,
        "margin_bytes": left.margin_bytes,
        "available_bytes": left.available_bytes,
        "block_size_tokens": fits.block_size,
        "bytes_per_block": fits.bytes_per_block,
        "blocks": fits.blocks,
        "blocks_per_sequence": fits.blocks_per_sequence,
        "capacity_tokens": fits.tokens,
        "max_concurrency": fits.max_concurrency,
        "longest_context_tokens": longest,
        "tpot_target_seconds": tpot,
        "ttft_target_seconds": ttft,
        "users_by_target": found.by_target,
        "users": found.users,
        "limit": found.limit,
    }

    def text() -> Iterator[str]:
        ranks = f"{tp * pp} x " if tp * pp > 1 else ""
        yield f"{spec.name} on {ranks}{chip.name}, counted as {engine} does"
        yield f"users of {length:,} tokens, cache in {kv_dtype}"
        yield ""
        yield left.table()
        yield ""
        if left.available_bytes <= 0:
            yield "0 users: the weights leave nothing for the cache"
            yield from _way_out(left_with, tp)
            return
        yield from _division(fits, left)
        if longest is not None:
            yield wrapped(f"longest context of a single user: {longest:,} tokens")
        if not reserve_bytes:
            yield wrapped(
                "nothing is set aside for activations and graphs: an engine that prints less "
                "takes the difference for them (--reserve)"
            )
        yield ""
        for target, users in found.by_target.items():
            if target != "capacity":
                seconds = format_seconds(values[f"{target}_target_seconds"])
                yield f"{target.upper()} of {seconds} allows {users:,} of {fits.sequences:,} users"
        yield f"{found.users:,} users; the limit hit first is {found.limit}"

    answer(as_json, values, text())


def _division(fits: Capacity, left: Budget) -> Iterator[str]:
    """Yield the division of the pool into blocks and users, as the engine makes it."""
    size = format_bytes(fits.bytes_per_block)
    yield wrapped(
        f"{left.available_bytes:,} B / {fits.bytes_per_block:,} B per block ({size}) "
        f"= {fits.blocks:,} blocks, {fits.tokens:,} tokens"
    )
    usable = f"({fits.blocks:,} - {fits.null_blocks} null)" if fits.null_blocks else ""
    yield wrapped(
        f"{usable or format(fits.blocks, ',')} / {fits.blocks_per_sequence:,} blocks per user "
        f"= {fits.sequences:,} whole users ({fits.max_concurrency:.2f}x printed)"
    )


def _way_out(left_with: Callable[[int], Budget], tp: int) -> Iterator[str]:
    """Yield the fewest ranks, if any are enough, whose weights leave room for a cache."""
    for ranks in (2, 4, 8, 16, 32):
        try:
            room = left_with(ranks).available_bytes
        except ValueError:  # heads that do not divide
            continue
        if ranks > tp and room > 0:
            yield f"over --tp {ranks} they leave {format_bytes(room)} on each rank"
            return


def _share_of_free(terms: Budget, utilization: float) -> Budget:
    """Return TensorRT-LLM's budget: its share is one of what is free beside the weights."""
    free = max(terms.available_bytes, 0)
    return replace(terms, margin_bytes=free - int(free * utilization))
