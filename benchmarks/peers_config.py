"""Other calculators and ours on the same configurations: ``python benchmarks/peers_config.py``.

ridgepoint, hf-mem and kvfit are installed from the package index into an environment of their own
under ``_build/peers``, and read the configurations of ``servelab/data/cases`` as they are. Asked is
the cache of one sequence of 4,096 tokens in two-byte numbers. An answer is right if it is the
logical bytes or the bytes that an engine reserves which frees nothing behind a window, in either
case with or without the fixed state of recurrent layers. An error is a refusal, and so is no
answer. Configurations for which no figure is known, or none that is certain, are left out.

The peers fetch configurations from a hub. Here each is handed the file instead, at the first
function that takes one; what they do with it is theirs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Config = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "_build" / "peers"
CASES = ROOT / "src/servelab/data/cases/config_cases.json"
PEERS = ("ridgepoint", "hf-mem", "kvfit")
TOKENS = 4096


# --- run by the interpreter of the peers' environment -------------------------------------------


def _ridgepoint(config: Config) -> float:
    import tempfile

    import ridgepoint  # type: ignore[import-not-found]
    from ridgepoint import hf

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()

        def local(repo_id: str, filename: str, revision: str) -> str:
            if filename != "config.json":
                raise FileNotFoundError(filename)  # weights: it falls back on an estimate
            return file.name

        def no_shards(repo: str, revision: str) -> list[str]:
            raise FileNotFoundError(repo)

        hf.hf_hub_download, hf._safetensors_shards = local, no_shards
        told = ridgepoint.fit("given/config", "a100-80gb", count=8, ctx=TOKENS, as_json=True)
    return float(json.loads(told)["capacity"]["bytes_per_seq"])


def _hf_mem(config: Config) -> float:
    from hf_mem.safetensors.kv_cache import (  # type: ignore[import-not-found]
        compute_safetensors_kv_cache_size,
    )

    # as hf_mem.run does, and for files that leave `architectures` out as well
    return float(
        compute_safetensors_kv_cache_size(config.get("text_config", config), "BF16", TOKENS)
    )


def _kvfit(config: Config) -> float:
    from kvfit.architectures import estimate_cache  # type: ignore[import-not-found]

    return float(estimate_cache(config, context_tokens=TOKENS, kv_bytes=2.0).total_bytes)


WORKERS: dict[str, Callable[[Config], float]] = {
    "ridgepoint": _ridgepoint,
    "hf-mem": _hf_mem,
    "kvfit": _kvfit,
}


def answer_all(peer: str) -> None:
    """Read configurations as JSON from stdin, write one answer or error text for each to stdout."""
    answers: list[float | str] = []
    for config in json.load(sys.stdin):
        try:
            answers.append(WORKERS[peer](config))
        except Exception as error:  # whatever a peer raises is its refusal
            answers.append(f"{type(error).__name__}: {error}")
    json.dump(answers, sys.stdout)


# --- run by our own ------------------------------------------------------------------------------


def install() -> Path:
    """Return the interpreter of an environment that holds the peers, made where it is missing."""
    python = ENVIRONMENT / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not python.exists():
        print(f"==> Installing {', '.join(PEERS)} into {ENVIRONMENT.relative_to(ROOT)}")
        venv.create(ENVIRONMENT, with_pip=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["pip gave no reason"]
        sys.exit(
            f"cannot install {', '.join(PEERS)} (is the package index in reach?): {reason[-1]}"
        )
    return python


def ask(python: Path, peer: str, configs: list[Config]) -> tuple[str, list[float | str]]:
    """Return a peer's version and its answers, an error's text where it gave none."""
    show = f"import importlib.metadata as m; print(m.version({peer!r}))"
    version = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True)
    done = subprocess.run(
        [python, __file__, "--answer", peer],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{peer} broke off: {done.stderr.strip()}")
    return version.stdout.strip(), json.loads(done.stdout)


def ask_ours(configs: list[Config]) -> tuple[str, list[float | str]]:
    """Return our version and answers."""
    import servelab
    from servelab.models import ModelSpec, UnsupportedConfig

    answers: list[float | str] = []
    for config in configs:
        try:
            answers.append(float(ModelSpec.from_config(config).sequence_bytes(TOKENS)))
        except UnsupportedConfig as error:
            answers.append(str(error))
    return servelab.__version__, answers


def right_answers(expected: Mapping[str, Any]) -> set[int]:
    """Return the bytes that are right for a sequence: two views, each with and without state.

    The logical view follows from the record alone: full layers grow by the slope, and the others
    by the rest up to their window.
    """
    slope = expected["kv_bytes_per_token_bf16"]
    reserved = expected["kv_bytes_per_token_bf16_all_layers_reserved"]
    held = min(TOKENS, expected["sliding_window"] or TOKENS)
    logical = slope * TOKENS + (reserved - slope) * held
    state = expected["fixed_state_bytes_per_sequence"] or 0
    return {size + more for size in (logical, reserved * TOKENS) for more in (0, state)}


def compare() -> None:
    """Ask everyone and print the table, then each wrong answer.

    Raises: ``SystemExit`` with the reason where the peers cannot be installed.
    """
    from servelab import units

    cases = [
        case
        for case in json.loads(CASES.read_text(encoding="utf-8"))
        if case["expected"]["kv_bytes_per_token_bf16"] and not case["uncertain_fields"]
    ]
    configs = [case["config"] for case in cases]
    python = install()
    asked = {peer: ask(python, peer, configs) for peer in PEERS} | {"servelab": ask_ours(configs)}
    rows: list[list[object]] = []
    wrong: list[list[object]] = []
    for name, (version, answers) in asked.items():
        refused = sum(isinstance(answer, str) for answer in answers)
        misses = [
            (case, answer)
            for case, answer in zip(cases, answers, strict=True)
            if not isinstance(answer, str) and answer not in right_answers(case["expected"])
        ]
        rows.append([name, version, len(cases) - refused - len(misses), len(misses), refused])
        for case, answer in misses:
            closest = min(right_answers(case["expected"]), key=lambda size: abs(size - answer))
            wrong.append([name, case["id"], f"{answer:,.0f}", closest, f"{answer / closest:.2f}"])
    print(f"{len(cases)} configurations, one sequence of {TOKENS:,} tokens, two bytes a number:")
    print(units.table(rows, ["calculator", "version", "right", "wrong", "refused"]))
    print("Our reader was written with these files at hand, the others were not.")
    print()
    print(units.table(wrong, ["wrong", "configuration", "answer, B", "right, B", "ratio"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer_all(sys.argv[2])
    else:
        compare()
