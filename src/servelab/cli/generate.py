"""`servelab generate`: text from a checkpoint, through the paged cache, with the time it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servelab.cli import options
from servelab.cli.output import answer
from servelab.serving import Engine, RequestOutput, SamplingParams
from servelab.serving.events import Planned, Stepped
from servelab.units import check_number, format_seconds

if TYPE_CHECKING:
    from servelab.decoder import TorchRunner

#: The checkpoint that comes with the package, by the name that stands for its folder.
BUNDLED = "stories"
_DTYPES = ("auto", "bf16", "fp16", "fp32", "fp64")


def _temperature(text: str) -> float:
    try:
        value = check_number("temperature", float(text))
    except ValueError:
        value = -1.0
    if value < 0:
        raise ValueError(f"must be a number of at least 0, got {text!r}")
    return value


def _top_p(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ValueError(f"must be a probability, above 0 and at most 1, got {text!r}")
    return value


TEMPERATURE = options.Parsed("number", _temperature)
TOP_P = options.Parsed("probability", _top_p)


@click.command(
    epilog=options.examples(
        f'generate {BUNDLED} --prompt "Once there was a hen" --max-tokens 12',
    )
)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "--prompt", "prompts", multiple=True, required=True, help="Text to continue; may be repeated."
)
@click.option("--n", type=options.COUNT, default=1, show_default=True, help="Samples per prompt.")
@click.option(
    "--max-tokens", type=options.TOKENS, default=128, show_default=True, help="New ones, each."
)
@click.option(
    "--temperature",
    type=TEMPERATURE,
    help="0 takes the likeliest token.  [default: 0, with --n above 1: 1]",
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    default=0,
    help="Likeliest tokens to draw from.  [default: all]",
)
@click.option(
    "--top-p", type=TOP_P, default=1.0, show_default=True, help="What those drawn from add up to."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws.")
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end.")
@click.option(
    "--stream",
    is_flag=True,
    help="Print the text of one prompt as it is made: the first sample, then the others.",
)
@click.option("--device", help="cpu, cuda, cuda:1, ...  [default: cuda where there is one]")
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default="auto",
    help="Of weights and cache; auto: theirs.",
)
@click.option(
    "--attention",
    type=click.Choice(["reference", "cpu", "triton"]),
    help="cpu: kernels, compiled first, by g++.  [default: triton on a GPU, else reference]",
)
@click.option(
    "--compile", "compiled", is_flag=True, help="Compile the decode step on a CPU (a minute)."
)
@options.block_size_option
@options.num_blocks_option
@options.utilization_option
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "prefix_caching",
    default=True,
    show_default=True,
    help="Compute what prompts share once.",
)
@options.json_option
def command(
    checkpoint: str,
    prompts: tuple[str, ...],
    n: int,
    max_tokens: int,
    temperature: float | None,
    top_k: int,
    top_p: float,
    seed: int,
    ignore_eos: bool,
    stream: bool,
    device: str | None,
    dtype: str,
    attention: str | None,
    compiled: bool,
    block_size: int,
    num_blocks: int | None,
    utilization: float,
    prefix_caching: bool,
    as_json: bool,
) -> None:
    """Continue prompts with a checkpoint's model.

    CHECKPOINT is a folder with config.json, safetensors and tokenizer.json, or "stories", the small
    model that comes with this package. The last line compares the steps with this device's roof,
    measured right after them.
    """
    if stream and (len(prompts) > 1 or as_json):
        raise click.UsageError("--stream prints the text of one prompt, and no JSON")
    if temperature is None:
        temperature = 1.0 if n > 1 else 0.0
    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    runner = _load(checkpoint, device, dtype, attention, compiled)
    if runner.tokenizer is None:
        raise click.UsageError(
            f"{checkpoint!r} has no tokenizer.json: save the tokenizer there too"
        )
    log = _StepLog()
    engine = Engine(
        runner,
        num_blocks=num_blocks,
        block_size=block_size,
        gpu_memory_utilization=utilization,
        enable_prefix_caching=prefix_caching,
        sink=log,
    )
    began = time.perf_counter()
    if stream:
        outputs = [_streamed(engine, prompts[0], params)]
    else:
        outputs = _generated(engine, prompts, params)
    seconds = time.perf_counter() - began
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise click.ClickException(f"the model failed: {failed[0]}")
    values = {"checkpoint": checkpoint, **_figures(engine, outputs, log, seconds)}
    values["requests"] = [_request_values(output) for output in outputs]

    def text() -> Iterator[str]:
        for output in outputs:
            for sample in output.outputs[int(stream) :]:  # of a stream the first stands there
                if len(prompts) > 1 or n > 1:
                    yield _heading(output, sample.index)
                yield f"{output.prompt}{sample.text}"
                yield ""
        yield _closing_line(values)

    answer(as_json, values, text())


def _load(
    checkpoint: str, device: str | None, dtype: str, attention: str | None, compiled: bool
) -> TorchRunner:
    try:
        from servelab import decoder
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is missing: `servelab generate` needs `pip install 'servelab[decoder]'`"
        ) from error
    folder: Path | str = checkpoint
    if checkpoint == BUNDLED and not Path(checkpoint).exists():
        folder = decoder.BUNDLED_CHECKPOINT
    if not Path(folder).is_dir():
        raise click.UsageError(
            f"{checkpoint!r} is no folder; a checkpoint is one with config.json, or {BUNDLED!r}"
        )
    stored_or_named = None if dtype == "auto" else dtype
    try:
        return decoder.TorchRunner.from_pretrained(
            folder, device, stored_or_named, attention, compile=compiled
        )
    except (OSError, RuntimeError) as error:  # a file that is missing, a device that is not there
        raise click.UsageError(str(error)) from error


class _StepLog:
    """Keeps what each step computed and how long it took, for the comparison with the roof."""

    def __init__(self) -> None:
        # Of each step (new, cached) per row, whether it drew, and the seconds.
        self.steps: list[tuple[list[tuple[int, int]], list[int], float]] = []
        self._planned: Planned | None = None

    def __call__(self, event: object) -> None:
        if isinstance(event, Planned):
            self._planned = event
        elif isinstance(event, Stepped) and self._planned is not None:
            rows = self._planned.rows
            pairs = [(new, cached) for _, new, cached, _ in rows]
            drawn = [min(samples, 1) for *_, samples in rows]
            self.steps.append((pairs, drawn, event.seconds))


def _generated(
    engine: Engine, prompts: Sequence[str], params: SamplingParams
) -> list[RequestOutput]:
    """Serve all prompts together, with a bar of the tokens made so far where somebody watches."""
    requests = [engine.add(prompt, params) for prompt in prompts]
    most = sum(params.n * request.max_tokens for request in requests)
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=most, label="tokens", file=sys.stderr, hidden=hidden) as bar:
        while engine.unfinished:
            before = engine.counters.generated_tokens
            engine.step()
            bar.update(engine.counters.generated_tokens - before)
        bar.update(most - bar.pos)
    return [request.output() for request in requests]


def _heading(output: RequestOutput, index: int) -> str:
    return f"[prompt {output.request_id}, sample {index}]"


def _streamed(engine: Engine, prompt: str, params: SamplingParams) -> RequestOutput:
    """Print the first sample as it grows; a character whose last bytes are missing waits."""
    stream = engine.stream(prompt, params)
    output = next(stream)  # at once: what there is before the first step, nothing
    if params.n > 1:
        click.echo(_heading(output, 0))
    click.echo(prompt, nl=False)
    shown = ""
    for output in stream:
        text = output.outputs[0].text
        whole = text if output.finished else text.rstrip("\ufffd")
        click.echo(whole[len(shown) :], nl=False)
        shown = whole
    click.echo("\n")
    return output


def _figures(
    engine: Engine, outputs: Sequence[RequestOutput], log: _StepLog, seconds: float
) -> dict[str, Any]:
    counters = engine.counters
    ttft = [o.times.ttft_seconds for o in outputs if o.times.ttft_seconds is not None]
    longest = (max(len(sample.token_ids) for sample in o.outputs) for o in outputs)
    tpot = [o.times.tpot_seconds(tokens) for o, tokens in zip(outputs, longest, strict=True)]
    known = [value for value in tpot if value is not None]
    return {
        "device": str(engine.runner.device),  # type: ignore[attr-defined]
        "dtype": engine.runner.kv_dtype,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_prompt_tokens": sum(output.num_cached_tokens for output in outputs),
        "generated_tokens": counters.generated_tokens,
        "steps": counters.steps,
        "seconds": seconds,
        "generated_tokens_per_second": counters.generated_tokens / seconds,
        "mean_ttft_seconds": sum(ttft) / len(ttft),
        "mean_tpot_seconds": sum(known) / len(known) if known else None,
        "fraction_of_roof": _fraction_of_roof(engine, log),
    }


def _fraction_of_roof(engine: Engine, log: _StepLog) -> float | None:
    """Return the least time of all steps on this device over their time; None without a roof."""
    from servelab import measure, roofline

    dtype = engine.runner.kv_dtype
    chip = measure.roofs(quick=True).as_accelerator()
    if dtype not in chip.dense_flop_per_second:
        return None
    bound = sum(
        roofline.time_bound(
            roofline.step_cost(
                engine.runner.spec,
                pairs,
                logits=drawn,
                weight_dtype=dtype,
                kv_dtype=dtype,
                activation_dtype=dtype,
            ),
            chip,
            dtype,
        ).seconds
        for pairs, drawn, _ in log.steps
    )
    return bound / sum(seconds for *_, seconds in log.steps)


def _request_values(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "samples": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
            }
            for sample in output.outputs
        ],
    }


def _closing_line(values: dict[str, Any]) -> str:
    speed = f"{values['generated_tokens']} tokens, {values['generated_tokens_per_second']:,.0f}/s"
    times = f"TTFT {format_seconds(values['mean_ttft_seconds'])}"
    if values["mean_tpot_seconds"] is not None:
        times += f", TPOT {format_seconds(values['mean_tpot_seconds'])}"
    parts = [speed, times, f"{values['cached_prompt_tokens']}/{values['prompt_tokens']} cached"]
    if values["fraction_of_roof"] is not None:
        parts.append(f"{values['fraction_of_roof']:.0%} of the {values['device']}'s roof")
    return "; ".join(parts)
