"""What the commands are told: configurations, chips, counts, times, number formats.

Models: one parameter type per kind of value, with shell completion where the values have names, and
the options that several commands share, under our spelling and vLLM's.

Assumes: rooms that one command alone needs are imported when it reads its arguments.

Ignores: what a value means; the calculators check ranges.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from servelab import units

if TYPE_CHECKING:
    from servelab.hardware import Accelerator
    from servelab.models import ModelSpec
    from servelab.roofline import Precision


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in click 8.5, not in 8.1
    """A value that a function reads from text, and refuses by a ``ValueError``.

    Parameters: ``name`` for the help text; ``parse`` from text; ``choices`` for completion.
    """

    def __init__(
        self,
        name: str,
        parse: Callable[[str], object],
        choices: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.name = name
        self._parse = parse
        self._choices = choices

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Return what the text says; a default that is no text stands as it is."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except (ValueError, OverflowError) as error:
            self.fail(str(error), param, ctx)
        except KeyError as error:  # a look-up by name; its message lists near ones
            self.fail(str(error.args[0]), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the choices that begin with what was typed."""
        return [CompletionItem(c) for c in self._choices() if c.startswith(incomplete)]


# --- numbers ------------------------------------------------------------------------------------


#: No sequence and no batch comes near these; beyond them a number is mistyped.
_MOST_TOKENS, _MOST_THINGS = 10**8, 2**16


def _tokens(text: str) -> int:
    tokens = units.check_count("tokens", units.parse_tokens(text))
    if tokens > _MOST_TOKENS:
        raise ValueError(f"must be at most {_MOST_TOKENS:,} tokens, got {text!r}")
    return tokens


def _count(text: str) -> int:
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_THINGS))
    if not digits or not 1 <= int(text) <= _MOST_THINGS:
        raise ValueError(f"must be a whole number from 1 to {_MOST_THINGS:,}, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    return units.check_positive("time", units.parse_seconds(text))


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"must be a share, above 0 and at most 1, got {text!r}")
    return share


def _size(text: str) -> int:
    return units.parse_bytes(text)


TOKENS = Parsed("tokens", _tokens)
COUNT = Parsed("n", _count)
SECONDS = Parsed("time", _seconds)
SHARE = Parsed("share", _share)
SIZE = Parsed("size", _size)


def or_longest(tokens: int | None, spec: ModelSpec) -> int:
    """Return the tokens that were given, else the longest sequence that the model allows.

    Raises: ``click.UsageError`` where neither is known.
    """
    longest = tokens or spec.max_context_tokens
    if longest is None:
        raise click.UsageError(f"{spec.name} states no longest context; give the tokens")
    return longest


def served_dtype(spec: ModelSpec) -> str:
    """Return the number format in which engines run a model: its own, but bf16 for fp32.

    Source: vLLM ``config/model.py``, ``_resolve_auto_dtype``; SGLang and llama.cpp take 16 bits
    too.
    """
    return "bf16" if spec.weight_dtype == "fp32" else spec.weight_dtype


def precision_of(
    spec: ModelSpec, kv_dtype: str | None, weight_dtype: str | None, compute_dtype: str | None
) -> Precision:
    """Return the number formats of a run; what is not given is as the model is served.

    Raises: ``ValueError`` for a format that a roofline cannot price, because it has scales.
    """
    from servelab.roofline import Precision

    own = served_dtype(spec)
    published = weight_dtype is None
    return Precision(
        weights=weight_dtype or own,
        kv=kv_dtype or own,
        activations=own,
        compute=compute_dtype or own,
        weight_bits=spec.published_weight_bits if published else None,
        expert_bits=spec.published_expert_bits if published else None,
    )


# --- number formats -----------------------------------------------------------------------------


def _formats() -> tuple[str, ...]:
    from servelab.memory.formats import FORMATS

    return FORMATS


def _named(text: str, known: Iterable[str], what: str) -> str:
    """Return the name that a spelling stands for, if it is known."""
    known = tuple(known)
    name = units.DTYPE_SPELLINGS.get(text, text)
    if name not in known:
        near = difflib.get_close_matches(text, (*known, *units.DTYPE_SPELLINGS), n=3) or known
        raise ValueError(f"unknown {what} {text!r}; near: {', '.join(near)}")
    return name


DTYPE = Parsed(
    "dtype",
    lambda text: _named(text, units.DTYPE_BITS, "dtype"),
    lambda: units.DTYPE_BITS,
)
PLAIN_KV_FORMAT = Parsed(  # what a roofline can price: no scales
    "dtype",
    lambda text: None if text == "auto" else _named(text, units.DTYPE_BITS, "dtype"),
    lambda: ("auto", *units.DTYPE_BITS),
)
KV_FORMAT = Parsed(
    "format",
    lambda text: None if text == "auto" else _named(text, _formats(), "format of the cache"),
    lambda: ("auto", *_formats()),
)


# --- models and chips ---------------------------------------------------------------------------

#: Under this key a context keeps CONFIG as it was written.
CONFIG_TEXT = "servelab.config"


def _read_model(text: str) -> ModelSpec:
    from servelab.cli.configs import read_model

    return read_model(text)


def _model_names() -> Iterable[str]:
    from servelab import models

    return models.names()


class _Config(Parsed):
    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Return the model, and keep what was written: it may name more than the model's shape."""
        if ctx is not None and isinstance(value, str):
            ctx.meta[CONFIG_TEXT] = value
        return super().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return files and bundled names; the shell looks for the files where no name fits."""
        named = super().shell_complete(ctx, param, incomplete)
        return [CompletionItem(incomplete, type="file"), *named]


def find_chip(text: str) -> Accelerator:
    """Return the accelerator of that name.

    Raises: ``KeyError`` with near names.
    """
    from servelab import hardware

    try:
        return hardware.get(text)
    except KeyError as error:
        if all(name in error.args[0] for name in hardware.names()):  # nothing is near
            raise KeyError(f"no accelerator {text!r}; `servelab hardware` lists them") from None
        raise


def _chip_names() -> Iterable[str]:
    from servelab import hardware

    return hardware.names()


CONFIG = _Config("config", _read_model, _model_names)
CHIP = Parsed("name", find_chip, _chip_names)


# --- options that commands share ----------------------------------------------------------------


def examples(*lines: str) -> str:
    """Return the end of a help text that shows how a command is called (a test calls it so)."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  servelab {line}" for line in lines)])


config_argument = click.argument("spec", metavar="CONFIG", type=CONFIG)
chip_option = click.option(
    "--hw", "chip", type=CHIP, required=True, help="Accelerator; `servelab hardware` lists them."
)
kv_dtype_option = click.option(
    "--kv-dtype",
    "--kv-cache-dtype",
    type=KV_FORMAT,
    default="auto",
    show_default=True,
    help="Format of the cache; auto is the model's own, bf16 for fp32.",
)
weight_dtype_option = click.option(
    "--weight-dtype",
    type=DTYPE,
    help="Format of the weights.  [default: as published, fp32 as bf16]",
)
compute_dtype_option = click.option(
    "--compute-dtype",
    type=DTYPE,
    help="Format whose peak rate counts.  [default: the model's own]",
)
tp_option = click.option(
    "--tp",
    "--tensor-parallel-size",
    type=COUNT,
    default=1,
    show_default=True,
    help="Ranks that share every layer.",
)
pp_option = click.option(
    "--pp",
    "--pipeline-parallel-size",
    type=COUNT,
    default=1,
    show_default=True,
    help="Stages that share the layers.",
)
utilization_option = click.option(
    "--util",
    "--gpu-memory-utilization",
    "utilization",
    type=SHARE,
    default=0.9,
    show_default=True,
    help="Share of the memory that the engine may use.",
)
prompt_option = click.option(
    "--prompt", type=TOKENS, default=1024, show_default=True, help="Tokens of each prompt."
)
output_option = click.option(
    "--output", type=TOKENS, default=256, show_default=True, help="Tokens of each answer."
)
block_size_option = click.option(
    "--block-size", type=COUNT, default=16, show_default=True, help="Tokens per block."
)
num_blocks_option = click.option(
    "--num-gpu-blocks",
    "--num-gpu-blocks-override",
    "num_blocks",
    type=TOKENS,
    metavar="N",
    help="Blocks of the pool, null block included.  [default: what the memory holds]",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: every key with its unit."
)
