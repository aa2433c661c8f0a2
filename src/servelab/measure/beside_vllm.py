"""The same prompts through a real vLLM and through our engine: tokens and times side by side.

Models: greedy batches, both engines in turn; a step is the difference between many tokens and one,
over the steps between; records of it, one JSON file each.

Assumes: the median of the rounds stands for a step.

Ignores: what else ran on the machine meanwhile; ``note`` is the place to say it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servelab.measure.device import Device, probe
from servelab.measure.records import record_name
from servelab.measure.vllm_process import VARIABLE, Generates, Ours, Vllm, interpreter
from servelab.units import check_count, check_positive, format_seconds

FOLDER = Path(__file__).resolve().parents[1] / "data" / "vllm"
_SCHEMA = 1


@dataclass(frozen=True)
class Batch:
    """One batch through both engines.

    Fields: ``size`` prompts of ``new_tokens`` each; ``equal`` how many answers both wrote alike;
    ``vllm_seconds``, ``ours_seconds`` of a decode step, one for each round; ``prompts`` and
    ``vllm_tokens``, what was asked and what vLLM wrote (empty where it was not kept).
    """

    size: int
    new_tokens: int
    equal: int
    vllm_seconds: tuple[float, ...]
    ours_seconds: tuple[float, ...]
    prompts: tuple[tuple[int, ...], ...] = ()
    vllm_tokens: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_count("size", self.size)
        check_count("new_tokens", self.new_tokens, minimum=2)
        if check_count("equal", self.equal, minimum=0) > self.size:
            raise ValueError(f"equal must be at most {self.size}, got {self.equal}")
        for name in ("prompts", "vllm_tokens"):
            rows = tuple(tuple(row) for row in getattr(self, name))
            for token in (token for row in rows for token in row):
                check_count(name, token, minimum=0)
            if rows and len(rows) != self.size:
                raise ValueError(f"{name} must be {self.size} or none, got {len(rows)}")
            object.__setattr__(self, name, rows)
        for name in ("vllm_seconds", "ours_seconds"):
            samples = tuple(check_positive(name, value) for value in getattr(self, name))
            object.__setattr__(self, name, samples)
        if not self.vllm_seconds or len(self.vllm_seconds) != len(self.ours_seconds):
            raise ValueError("both engines must have as many samples, and one at least")

    @property
    def vllm_step(self) -> float:
        """Return the median seconds of a step of vLLM."""
        return statistics.median(self.vllm_seconds)

    @property
    def ours_step(self) -> float:
        """Return the median seconds of a step of ours."""
        return statistics.median(self.ours_seconds)


@dataclass(frozen=True)
class Beside:
    """A record of both engines on one model.

    Fields: ``date`` YYYY-MM-DD; ``note`` on the circumstances; ``device`` with our versions;
    ``vllm`` its version; ``model``, ``dtype``; ``batches``.
    """

    date: str
    note: str
    device: Device
    vllm: str
    model: str
    dtype: str
    batches: tuple[Batch, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", tuple(self.batches))
        if not self.batches:
            raise ValueError("a record needs at least one batch")

    @property
    def name(self) -> str:
        """Return the record's name, which is also its file's."""
        return f"{record_name(self.date, self.device)}-{self.model}-{self.dtype}"

    def save(self, folder: Path = FOLDER) -> Path:
        """Write the record under its name and return the path."""
        path = folder / f"{self.name}.json"
        batches = [json.dumps(asdict(batch)) for batch in self.batches]
        head = {"schema": _SCHEMA} | {k: v for k, v in asdict(self).items() if k != "batches"}
        rows = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        text = "\n".join(["{", *rows, ' "batches": [', ",\n".join(f"  {b}" for b in batches), " ]"])
        path.write_text(text + "\n}\n", encoding="utf-8")
        return path

    @classmethod
    def from_json(cls, text: str) -> Beside:
        """Return the record that ``save`` wrote.

        Raises: ``ValueError``, ``TypeError`` for another schema, unknown or missing keys.
        """
        raw = json.loads(text)
        if raw.pop("schema", None) != _SCHEMA:
            raise ValueError(f"schema must be {_SCHEMA}")
        batches = tuple(Batch(**batch) for batch in raw.pop("batches"))
        return cls(device=Device(**raw.pop("device")), batches=batches, **raw)


def load_beside(folder: Path = FOLDER) -> tuple[Beside, ...]:
    """Return the records of a folder, by default those that the package brings.

    >>> [record.vllm for record in load_beside()][:1]
    ['0.32.0']
    """
    paths = sorted(folder.glob("2*.json"))
    return tuple(Beside.from_json(path.read_text(encoding="utf-8")) for path in paths)


def compare(
    vllm: Generates,
    ours: Generates,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    rounds: int = 3,
    keep_tokens: bool = True,
) -> Batch:
    """Return what both engines make of a batch, in turn, after one round that is thrown away.

    Parameters: ``new_tokens`` of each prompt, from 2; ``rounds`` that are timed; ``keep_tokens`` in
    the record.
    """
    steps: list[tuple[float, float]] = []
    answers: list[list[list[int]]] = []
    for turn in range(check_count("rounds", rounds) + 1):
        answers, seconds = [], []
        for engine in (vllm, ours):
            first, _ = engine.generate(prompts, [1] * len(prompts))
            whole, tokens = engine.generate(prompts, [new_tokens] * len(prompts))
            answers.append(tokens)
            seconds.append((whole - first) / (check_count("new_tokens", new_tokens, 2) - 1))
        if turn:
            steps.append((seconds[0], seconds[1]))
    theirs, own = answers
    return Batch(
        len(prompts),
        new_tokens,
        sum(a == b for a, b in zip(theirs, own, strict=True)),
        tuple(step for step, _ in steps),
        tuple(step for _, step in steps),
        tuple(map(tuple, prompts)) if keep_tokens else (),
        tuple(map(tuple, theirs)) if keep_tokens else (),
    )


def story_prompts(runner: Any) -> list[list[int]]:
    """Return the beginnings of eight stories as the bundled model's tokens."""
    heroes = (
        "hare Otto, mouse Elsa, fox Tilda, frog Hugo, hen Ruby, badger Ben, goat Henry, duck Lena"
    )
    kinds = (hero.split() for hero in heroes.split(", "))
    texts = (f"Once there was a {kind} named {name}." for kind, name in kinds)
    return [list(runner.tokenizer.encode(text)) for text in texts]


def main(arguments: list[str] | None = None) -> int:
    """Compare on the bundled model in fp32, print, and keep the record; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m servelab.measure.beside_vllm",
        description="The bundled model in fp32 through a real vLLM and through our engine: tokens "
        f"and the time of a step; keeps a record. {VARIABLE} names an interpreter that has vLLM.",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder; default: package data")
    parser.add_argument("--note", default="", help="what a reader of the record should know")
    parser.add_argument("--rounds", type=int, default=5, help="that are timed")
    options = parser.parse_args(arguments)
    python = interpreter()
    if python is None:
        parser.error(f"no vLLM here: install it, or name its interpreter in {VARIABLE}")
    import torch

    from servelab.decoder import BUNDLED_CHECKPOINT, TorchRunner

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower on two
    runner = TorchRunner.from_pretrained(BUNDLED_CHECKPOINT, "cpu", dtype="fp32")
    prompts = story_prompts(runner)
    print("starting vLLM, which compiles first: a minute or two", file=sys.stderr)
    with Vllm(
        BUNDLED_CHECKPOINT, python, threads, dtype="float32", max_model_len=512, max_num_seqs=8
    ) as vllm:
        batches = tuple(
            compare(vllm, Ours(runner), prompts[:size], 65, options.rounds, size == 8)
            for size in (1, 8)
        )
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        record = Beside(today, options.note, probe(), vllm.version, "stories", "fp32", batches)
    print(f"vLLM {record.vllm}, {record.device.line}")
    for batch in record.batches:
        steps = [format_seconds(seconds) for seconds in (batch.vllm_step, batch.ours_step)]
        alike = f"{batch.equal} of {batch.size} answers equal"
        print(f"batch {batch.size}: {alike}; a step: vLLM {steps[0]}, ours {steps[1]}")
    print(record.save(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
