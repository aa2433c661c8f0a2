"""What a panel's controls are asked for: chips, models, number formats, counts.

Models: one control per kind of thing, its options the names that the catalogue and the bundled
models have, and one way to read each back from the text that a form sends.

Assumes: a panel raises ``ValueError`` with a sentence for whoever typed; the page shows the
sentence and leaves the picture.

Ignores: what the values mean; the calculators check that.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from servelab import hardware, models
from servelab.live.panel import Answer, Choice, Field, Slider, Values
from servelab.models import ModelSpec
from servelab.units import format_bytes, format_tokens, parse_tokens

#: The option that stands for a configuration in the field beside it.
PASTED = "pasted"
_MOST_TEXT = 2**20  # characters of a pasted configuration
_MOST_DEPTH = 100
_MOST_DIGITS = 24  # of a count, separators included


def chip_choice(value: str = "h100-sxm-80gb") -> Choice:
    """Return the choice of a chip; all of the catalogue, by the names that people know."""
    options = tuple((name, hardware.get(name).label) for name in hardware.names())
    return Choice("chip", "Chip", options, value)


def model_choice(value: str = "qwen3-8b", *others: tuple[str, str]) -> Choice:
    """Return the choice of a bundled model; ``others`` are options after them."""
    return Choice("model", "Model", (*((n, n) for n in models.names()), *others), value)


def format_choice(name: str, label: str, formats: tuple[str, ...], value: str) -> Choice:
    """Return the choice of a number format."""
    return Choice(name, label, tuple((each, each) for each in formats), value)


def count_slider(name: str, label: str, stops: tuple[int, ...], value: int) -> Slider:
    """Return a slider over whole numbers."""
    return Slider(name, label, tuple(map(str, stops)), str(value))


def powers(first: int, last: int, between: bool = False) -> tuple[int, ...]:
    """Return ``first`` doubled up to ``last``, and the halves between if asked for.

    >>> powers(1, 8), powers(4, 16, between=True)
    ((1, 2, 4, 8), (4, 6, 8, 12, 16))
    """
    found = []
    while first <= last:
        found.append(first)
        if between and first > 1 and first < last:
            found.append(first * 3 // 2)
        first *= 2
    return tuple(found)


def token_slider(name: str, label: str, stops: tuple[int, ...], value: int) -> Slider:
    """Return a slider over numbers of tokens, with K as the book writes them."""
    return Slider(name, label, tuple(map(format_tokens, stops)), format_tokens(value))


def config_field() -> Field:
    """Return the field into which a configuration is pasted.

    It is never off: the choice that it belongs to is refused until something stands in it.
    """
    label = "config.json (for the last choice of Model)"
    return Field("config", label, lines=4, placeholder='{"model_type": ...}')


def model_of(values: Values) -> ModelSpec:
    """Return the model that is chosen, or described in the field beside the choice.

    Raises: ``ValueError`` for a configuration that cannot be read, ``KeyError`` for a name.
    """
    if values["model"] != PASTED:
        return models.get(values["model"])
    pasted = values.get("config", "").strip("\ufeff \t\r\n")
    if not pasted:
        raise ValueError("config.json is empty: paste the text of a model's config.json")
    if len(pasted) > _MOST_TEXT:
        raise ValueError(
            f"config.json has {len(pasted):,} characters, more than {_MOST_TEXT:,}: "
            "no configuration is that long"
        )
    if not pasted.startswith("{"):
        raise ValueError(f"config.json must begin with a brace, got {pasted[:40]!r}")
    depth = 0
    for bracket in re.findall(r"[][{}]", pasted):
        depth += 1 if bracket in "[{" else -1
        if depth > _MOST_DEPTH:  # in a browser the parser's recursion would end Python itself
            raise ValueError("config.json is nested too deeply: no configuration is")
    return models.parse(pasted)


def whole(values: Values, name: str, most: int) -> int:
    """Return the whole number that a control says, from 1 to ``most``.

    Raises: ``ValueError`` for anything else.

    >>> whole({"rows": "4,096"}, "rows", 10**6), whole({"tokens": "32K"}, "tokens", 10**6)
    (4096, 32768)
    >>> whole({"rows": "-1"}, "rows", 10**6)
    Traceback (most recent call last):
    ...
    ValueError: rows must be a whole number from 1 to 1,000,000, got '-1'
    """
    said = values[name].strip()
    try:
        number = parse_tokens(said) if len(said) <= _MOST_DIGITS else 0
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise ValueError(f"{name} must be a whole number from 1 to {most:,}, got {said[:40]!r}")
    return number


def decimal(size_bytes: int) -> str:
    """Return a size in the largest decimal unit that it fills.

    >>> decimal(102_760_448), decimal(34_833_740_000), decimal(6)
    ('102.76 MB', '34.83 GB', '6 B')
    """
    scales = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
    unit = next((unit for unit, scale in scales.items() if size_bytes >= scale), "B")
    return format_bytes(size_bytes, unit)


def in_words(answer: Callable[[Values, str], Answer]) -> Callable[[Values, str], Answer]:
    """Return ``answer`` with every refusal of a calculator as a ``ValueError`` with its sentence.

    >>> in_words(lambda values, action: {}[0])({}, "")
    Traceback (most recent call last):
    ...
    ValueError: 0
    """

    def asked(values: Values, action: str) -> Answer:
        try:
            return answer(values, action)
        except KeyError as error:  # whose text would stand in quotes
            raise ValueError(str(error.args[0])) from None
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None

    return asked
