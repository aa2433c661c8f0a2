"""`servelab models`: the models that come with the package."""

from collections.abc import Iterator

import click

from servelab import models
from servelab.cli import options
from servelab.cli.output import answer
from servelab.models import ModelSpec
from servelab.units import format_bytes, format_tokens, table


@click.command(epilog=options.examples("models", "models --json"))
@options.json_option
def command(as_json: bool) -> None:
    """Bundled models: the names that CONFIG may be, with parameters and cache.

    The cache is what one more token adds in bf16 if every layer keeps every token. Any other model
    is read from its config.json.
    """
    found = [models.get(name) for name in models.names()]
    answer(as_json, {"models": [_values(spec) for spec in found]}, _listed(found))


def _values(spec: ModelSpec) -> dict[str, object]:
    return {
        "name": spec.name,
        "params_total": spec.params_total,
        "layers": len(spec.layers),
        "kv_bytes_per_token_reserved": spec.kv_bytes_per_token(view="reserved"),
        "weight_bytes": spec.weight_bytes(),
        "max_context_tokens": spec.max_context_tokens,
    }


def _listed(found: list[ModelSpec]) -> Iterator[str]:
    rows: list[list[object]] = [
        [
            spec.name,
            spec.params_total,
            format_bytes(spec.weight_bytes(), "GB"),
            spec.kv_bytes_per_token(view="reserved"),
            "" if spec.max_context_tokens is None else format_tokens(spec.max_context_tokens),
        ]
        for spec in found
    ]
    yield table(rows, ["name", "parameters", "weights", "KV bytes/token", "context"])
