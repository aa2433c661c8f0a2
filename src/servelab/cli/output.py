"""How an answer is printed: JSON for programs, sections and tables for people.

Models: an answer is a mapping of plain values, whose keys name their units, beside its text.

Assumes: 80 columns.

Ignores: how numbers become text: that is `servelab.units`.
"""

import json
import textwrap
from collections.abc import Iterable, Mapping

import click


def answer(as_json: bool, values: Mapping[str, object], text: Iterable[str]) -> None:
    """Print the values as JSON, or the text line by line.

    >>> answer(False, {"tokens": 3}, ["3 tokens"])
    3 tokens
    """
    if as_json:
        click.echo(json.dumps(values, indent=2, allow_nan=False))
    else:
        click.echo("\n".join(text))


def gib(size_bytes: int) -> str:
    """Return a size in GiB with three decimals, for a column that names the unit.

    >>> gib(2**29)
    '0.500'
    """
    return f"{size_bytes / 2**30:,.3f}"


def gb(size_bytes: int) -> str:
    """Return a size in GB with three decimals, for a column that names the unit.

    >>> gb(2**29)
    '0.537'
    """
    return f"{size_bytes / 1e9:,.3f}"


def wrapped(sentence: str) -> str:
    """Return a sentence on indented lines of at most 80 columns.

    >>> wrapped("short")
    '  short'
    """
    return textwrap.fill(
        sentence,
        80,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
