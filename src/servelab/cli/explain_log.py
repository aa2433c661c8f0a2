"""`servelab explain-log`: an engine's start-up log, number by number."""

import codecs
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from servelab.cli import options
from servelab.cli.configs import no_file
from servelab.cli.output import answer, wrapped
from servelab.logs import LogCheck, explain_log
from servelab.models import ModelSpec
from servelab.units import MiB

_MOST_BYTES = 64 * MiB
_MOST_SIGNS = 300  # of one line of the log
_VERDICTS = {True: "agrees", False: "does not follow", None: "open"}


@click.command(epilog=options.examples("explain-log vllm.log --config qwen3-8b"))
@click.argument("log", metavar="FILE", type=click.Path())
@click.option("--config", "spec", type=options.CONFIG, help="The model that was served.")
@options.json_option
def command(log: str, spec: ModelSpec | None, as_json: bool) -> None:
    """An engine's start-up log, each number recomputed.

    FILE is a log of vLLM, SGLang, TensorRT-LLM or llama.cpp, or - for standard input. Numbers are
    recomputed from each other, and with --config from the model's own.
    """
    checks = explain_log(_text(log), spec)
    values = {
        "checks": [asdict(check) for check in checks],
        "agreeing": sum(check.agrees is True for check in checks),
        "not_following": sum(check.agrees is False for check in checks),
        "open": sum(check.agrees is None for check in checks),
    }
    answer(as_json, values, _lines(checks))


def _text(log: str) -> str:
    """Return the text of the log, UTF-8 or marked UTF-16; signs that are neither are replaced.

    Raises: ``ValueError`` where it is empty, binary, or too large to have been pasted.
    """
    name = "standard input" if log == "-" else log
    if log == "-":
        content = sys.stdin.buffer.read(_MOST_BYTES + 1)
    else:
        path = Path(log)
        if not path.exists():
            raise ValueError(no_file(path))
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{name} is larger than {_MOST_BYTES // MiB} MiB: cut out the start-up")
    if not content.strip():
        raise ValueError(f"{name} is empty")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # as PowerShell writes it
        return content.decode("utf-16", errors="replace")
    if b"\0" in content[:4096]:
        raise ValueError(f"{name} is a binary file, not a log")
    return content.decode("utf-8", errors="replace")


def _lines(checks: list[LogCheck]) -> Iterator[str]:
    shown = None
    for check in checks:
        if check.line_number != shown:
            shown = check.line_number
            yield from textwrap.wrap(f"{shown}: {_plain(check.line)}", 80, subsequent_indent="   ")
        reported = f"{check.quantity} {_number(check.reported)} {check.unit}".rstrip()
        differs = check.recomputed is not None and check.agrees is not True
        other = f", recomputed {_number(check.recomputed or 0)}" if differs else ""
        yield wrapped(f"-> {reported}: {_VERDICTS[check.agrees]}{other}; {check.why}")
    yield ""
    numbers = {verdict: sum(check.agrees is verdict for check in checks) for verdict in _VERDICTS}
    yield f"{numbers[True]} agree, {numbers[False]} do not follow, {numbers[None]} are left open"


def _plain(line: str) -> str:
    """Return the start of a line of the log, without signs that steer a terminal."""
    plain = "".join(c if c.isprintable() else " " for c in line[: _MOST_SIGNS + 1])
    return plain if len(plain) <= _MOST_SIGNS else plain[:_MOST_SIGNS] + "..."


def _number(value: float) -> str:
    return f"{value:,.4f}".rstrip("0").rstrip(".")
