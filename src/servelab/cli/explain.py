"""`servelab explain`: a model's formula for its cache, its parameters, and where each came from."""

from collections.abc import Iterator

import click

from servelab.cli import arithmetic, options
from servelab.cli.output import answer, gb, gib, wrapped
from servelab.models import ModelSpec, UnsupportedConfig
from servelab.units import table


@click.command(epilog=options.examples("explain mistral-7b"))
@options.config_argument
@options.kv_dtype_option
@options.json_option
def command(spec: ModelSpec, kv_dtype: str | None, as_json: bool) -> None:
    """A model's formula for its cache, and where it was read.

    Kinds of layers, parameters by part, and for every value the key of the configuration that gave
    it, or the rule of the model's family that stands in for a key.
    """
    kv_dtype = kv_dtype or options.served_dtype(spec)
    lines = arithmetic.cache_lines(spec, kv_dtype)
    parts = _parameters(spec)
    values = {
        "model": spec.name,
        "kv_dtype": kv_dtype,
        "layers": [arithmetic.as_values(line) for line in lines],
        "sequence_bytes_formula": arithmetic.sequence_formula(lines),
        "max_context_tokens": spec.max_context_tokens,
        "params_total": sum(parts.values()) if parts else None,
        "params_active": spec.params_active if parts else None,
        "params_other": spec.params_other,
        "params_by_part": parts,
        "weight_bytes": spec.weight_bytes() if parts else None,
        "weight_dtype": spec.weight_dtype,
        "unknown": dict(spec.unknown),
        "provenance": dict(spec.provenance),
    }

    def text() -> Iterator[str]:
        longest = spec.max_context_tokens
        yield f"{spec.name}: {len(spec.layers)} layers, " + (
            f"contexts up to {longest:,} tokens" if longest else "no longest context stated"
        )
        yield ""
        yield f"Cache in {kv_dtype}"
        for line in lines:
            yield wrapped(arithmetic.as_text(line))
        yield wrapped(f"a sequence of T tokens holds {arithmetic.sequence_formula(lines)}")
        yield ""
        yield from _weights(spec, parts)
        yield ""
        yield "Where each value was read"
        yield from _provenance(spec)

    answer(as_json, values, text())


def _parameters(spec: ModelSpec) -> dict[str, int] | None:
    """Return the parameters by part, None where the configuration leaves out what they need."""
    try:
        return dict(spec.params_by_part)
    except UnsupportedConfig:
        return None


def _weights(spec: ModelSpec, parts: dict[str, int] | None) -> Iterator[str]:
    if parts is None:
        yield "Parameters: not known, because the configuration leaves out what they depend on"
        for key, why in spec.unknown.items():
            yield wrapped(f"{key} {why}")
        return
    rows: list[list[object]] = [[part, count] for part, count in parts.items()]
    rows.append(["total", spec.params_total])
    if spec.params_active != spec.params_total:
        rows.append(["of it active per token", spec.params_active])
    if spec.params_other:
        rows.append(["beside the text decoder", spec.params_other])
    yield table(rows, ["part", "parameters"])
    size = spec.weight_bytes()
    how = spec.weight_dtype if spec.published_weight_bytes is None else "quantised as published"
    yield f"weights, {how}: {size:,} B = {gib(size)} GiB = {gb(size)} GB"


def _provenance(spec: ModelSpec) -> Iterator[str]:
    width = max(map(len, spec.provenance), default=0)
    for name, rule in spec.provenance.items():
        yield wrapped(rule if rule.startswith(f"{name} = ") else f"{name:<{width}}  {rule}")
