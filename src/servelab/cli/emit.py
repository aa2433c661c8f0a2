"""What `servelab fit --emit vllm` adds: the `vllm serve` line with its reasons.

Models: the model's name or folder as vLLM takes it, from what CONFIG was.

Assumes: a configuration file lies in the folder of its model.

Ignores: how the values follow; that is `servelab.memory.launch`.
"""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import click

from servelab import models
from servelab.memory.launch import ServeLine, script

#: The bundled configurations' names at the hub, as in the README beside them.
HUB_NAMES = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "opt-13b": "facebook/opt-13b",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
}


def served_name(config: str) -> str:
    """Return the name or folder to serve, of a CONFIG that was read before.

    Raises: ``click.UsageError`` for standard input, which vLLM cannot serve.

    >>> served_name("qwen3-8b")
    'Qwen/Qwen3-8B'
    """
    if config == "-":
        raise click.UsageError(
            "vllm serve needs a model's name or folder, and standard input is neither"
        )
    path = Path(config)
    if path.is_dir():
        return str(path)
    if path.exists():
        return str(path.parent)
    if config in HUB_NAMES:
        return HUB_NAMES[config]
    assert config in models.names()  # the small one, which has its weights with it
    return str(resources.files("servelab") / "data" / "checkpoint")


def values(line: ServeLine) -> dict[str, object]:
    """Return the line for programs: its words, the text for a shell, each flag with its reason."""
    return {
        "version": line.version,
        "arguments": list(line.arguments),
        "command": line.command,
        "flags": [
            {"name": flag.name, "value": flag.value, "reason": flag.reason} for flag in line.flags
        ],
    }


def text(line: ServeLine, model: str, chip: str) -> Iterator[str]:
    """Yield the rows of a shell script."""
    yield from script(line, f"{model} on {chip}")
