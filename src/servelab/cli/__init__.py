"""The command line: `servelab kv`, `fit`, `time`, `simulate`, `explain`, `explain-log`,
`generate`, `check`, `hardware`, `models`.

Models: nothing of its own: each command reads its arguments, asks the calculators, and prints what
they answer, as a table for people or with ``--json`` for programs.

Assumes: a calculator refuses a value by a ``ValueError`` that names the value and the rule.

Ignores: colour, and the width of the terminal: tables are made for 80 columns.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad input, 130 after Ctrl-C.

    Parameters: ``arguments`` after the program's name (None: those of the process).

    >>> main(["kv", "qwen3-8b", "--tokens", "1K", "--json"])  # doctest: +ELLIPSIS
    {
      "model": "qwen3-8b",
    ...
    0
    """
    try:
        from servelab.cli.commands import run  # here, so that Ctrl-C while importing is quiet too

        return run(arguments)
    except KeyboardInterrupt:
        return 130
