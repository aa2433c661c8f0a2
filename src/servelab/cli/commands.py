"""The commands by name, and how a run of one ends.

Models: each command is a module of its own, imported when it is asked for, so that ``servelab kv``
starts as fast as what it needs.

Assumes: bad input reaches us as an error of click, or as a ``ValueError`` or ``MemoryError``.

Ignores: every other exception: it is a fault of ours and shows its traceback.
"""

import difflib
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from servelab import __version__

#: The command's name, and the module of this package that holds it.
MODULES = {
    "kv": "kv",
    "fit": "fit",
    "time": "timing",
    "simulate": "simulate",
    "explain": "explain",
    "explain-log": "explain_log",
    "generate": "generate",
    "check": "check_notebook",
    "hardware": "chips",
    "models": "bundled",
}
_LONGEST_MESSAGE = 400
_EPILOG = """\b
Completion of commands, options, models and chips, once per shell:
  bash  echo 'eval "$(_SERVELAB_COMPLETE=bash_source servelab)"' >> ~/.bashrc
  zsh   echo 'eval "$(_SERVELAB_COMPLETE=zsh_source servelab)"' >> ~/.zshrc
  fish  _SERVELAB_COMPLETE=fish_source servelab \\
        > ~/.config/fish/completions/servelab.fish
"""


class Commands(click.Group):
    """The group of all commands; imports one when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which they are explained."""
        return list(MODULES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command, or None where there is none of that name."""
        if name not in MODULES:
            return None
        command = import_module(f"servelab.cli.{MODULES[name]}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name.

        Raises: ``click.UsageError`` for an unknown one, with near names.
        """
        name = args[0]
        if name not in MODULES and not ctx.resilient_parsing and not name.startswith("-"):
            near = difflib.get_close_matches(name, MODULES, n=2) or list(MODULES)
            raise click.UsageError(f"no command {name!r}; near: {', '.join(near)}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=_EPILOG,
)
@click.version_option(__version__, prog_name="servelab", message="%(prog)s %(version)s")
@click.pass_context
def servelab(ctx: click.Context) -> None:
    """What serving a language model costs, from its config.json and the chip.

    CONFIG is a file, a folder that holds a config.json, - for standard input, or the name of a
    bundled model. Tokens: k and m are 10^3 and 10^6, K and M are 2^10 and 2^20. GB is 10^9 bytes,
    GiB is 2^30.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a sign still gets the rest
            stream.reconfigure(errors="replace")
    try:
        done = servelab.main(
            None if arguments is None else list(arguments),
            prog_name="servelab",
            standalone_mode=False,
        )
    except click.Abort:
        return 130
    except click.UsageError as error:
        return _refuse(_with_hint(error))
    except click.ClickException as error:
        return _refuse(error.format_message())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EIO):  # nothing more will reach stdout
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _refuse(f"{error.filename or 'output'}: {error.strerror or error}")
    except (ValueError, MemoryError) as error:
        return _refuse(str(error) or "there is not enough memory")
    return done if isinstance(done, int) else 0


def _with_hint(error: click.UsageError) -> str:
    """Return the message, and where the right form stands unless a value is what is wrong."""
    message = error.format_message()
    told = isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter)
    if told or error.ctx is None:
        return message
    stop = "" if message.endswith((".", "?", "!")) else "."
    return f"{message}{stop} See: {error.ctx.command_path} --help"


def _refuse(message: str) -> int:
    """Print one line to stderr; return the exit code of bad input."""
    line = "".join(c if c.isprintable() else " " for c in message)
    if len(line) > _LONGEST_MESSAGE:
        line = line[:_LONGEST_MESSAGE].rsplit(" ", 1)[0] + " ..."
    click.echo(f"servelab: {line}", err=True)
    return 2
