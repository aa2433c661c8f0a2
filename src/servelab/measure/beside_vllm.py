"""The same prompts through a real vLLM and through our engine: tokens and times side by side.

Models: greedy batches of prompts of one length of output each, both engines in turn; a step is the
difference between many tokens and one, over the steps between.

Assumes: vLLM is installed here, or ``SERVELAB_VLLM_PYTHON`` names an interpreter that has it; it
runs as a process of its own and waits behind a pipe while ours decodes.

Ignores: sampling at random, prefix caching (off in both), the server around vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

from servelab.measure.device import Device
from servelab.measure.records import record_name
from servelab.serving import Engine, Runner, SamplingParams
from servelab.units import check_count, check_positive

#: Names the interpreter of an environment that has vLLM.
VARIABLE = "SERVELAB_VLLM_PYTHON"
FOLDER = Path(__file__).resolve().parents[1] / "data" / "vllm"
_WORKER = Path(__file__).with_name("_vllm_worker.py")
_SCHEMA = 1


def interpreter() -> Path | None:
    """Return the interpreter that can import vLLM, None where none is known.

    Raises: ``FileNotFoundError`` where the variable names no file.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"{VARIABLE} names {named!r}, which is no file")
        return Path(named)
    return Path(sys.executable) if importlib.util.find_spec("vllm") else None


class Generates(Protocol):
    """Whoever answers a batch of prompts greedily."""

    def generate(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[float, list[list[int]]]:
        """Return the seconds until all are answered, and the tokens of each."""


class Vllm:
    """A vLLM that waits for batches, in a process of its own.

    Parameters: ``folder`` of the checkpoint; ``python`` that has vLLM; ``threads`` on a CPU;
    ``log`` file for what it prints (None: a temporary one); ``settings`` of ``vllm.LLM``, such as
    dtype and max_model_len.
    Raises: ``RuntimeError`` with the last line that it printed, where it does not start or breaks
    off.
    """

    def __init__(
        self, folder: Path, python: Path, threads: int, log: Path | None = None, **settings: Any
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.log = log or Path(self._scratch.name) / "vllm.log"
        told = {"model": str(folder), "enable_prefix_caching": False} | settings
        with self.log.open("w", encoding="utf-8") as out:
            self._process = subprocess.Popen(
                [str(python), "-P", str(_WORKER), json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=os.environ | _environment(python, check_count("threads", threads)),
                text=True,
            )
        self.version: str = self._read()["vllm"]

    def generate(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[float, list[list[int]]]:
        """Return the seconds until all prompts are answered, and the tokens of each."""
        assert self._process.stdin is not None
        print(json.dumps([list(map(list, prompts)), list(lengths)]), file=self._process.stdin)
        self._process.stdin.flush()
        seconds, tokens = self._read()
        if [len(answer) for answer in tokens] != list(lengths):
            raise RuntimeError("vLLM answered with other lengths than were asked for")
        return float(seconds), tokens

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._scratch.cleanup()

    def __enter__(self) -> Vllm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        self.close()
        raise RuntimeError(f"vLLM did not answer; it last said: {said[-1] if said else 'nothing'}")


class Ours:
    """Our engine on a runner, with blocks for whatever it is asked.

    Parameters: ``runner``; ``block_size`` in tokens.
    """

    def __init__(self, runner: Runner, block_size: int = 16) -> None:
        self.runner, self.block_size = runner, block_size

    def generate(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[float, list[list[int]]]:
        """Return the seconds until all prompts are answered, and the tokens of each."""
        pairs = list(zip(prompts, lengths, strict=True))
        engine = Engine(
            self.runner,
            1 + sum(-(-(len(prompt) + length) // self.block_size) for prompt, length in pairs),
            self.block_size,
            max_num_seqs=len(pairs),
            enable_prefix_caching=False,
        )
        began = perf_counter()
        requests = [
            engine.add(list(prompt), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
            for prompt, n in pairs
        ]
        while engine.unfinished:
            engine.step()
        seconds = perf_counter() - began
        return seconds, [list(request.sequences[0].output_token_ids) for request in requests]


def _environment(python: Path, threads: int) -> dict[str, str]:
    """Return what vLLM is told: nothing from the network, and its cores where it runs on a CPU."""
    root = python.parent.parent
    preload = [
        *root.glob("lib/libiomp5.so"),
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),  # where it is installed
    ]
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": ":".join(map(str, preload)),
    }


# --- what was found -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One batch through both engines.

    Fields: ``prompts`` and ``new_tokens`` of each; ``vllm_tokens`` the tokens that vLLM wrote;
    ``equal`` how many of the answers ours wrote alike; ``vllm_seconds``, ``ours_seconds`` of a
    decode step, one for each round.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    vllm_tokens: tuple[tuple[int, ...], ...]
    equal: int
    vllm_seconds: tuple[float, ...]
    ours_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("prompts", "vllm_tokens"):
            rows = tuple(tuple(row) for row in getattr(self, name))
            for token in (token for row in rows for token in row):
                check_count(name, token, minimum=0)
            object.__setattr__(self, name, rows)
        for name in ("vllm_seconds", "ours_seconds"):
            samples = tuple(check_positive(name, value) for value in getattr(self, name))
            object.__setattr__(self, name, samples)
        if not self.vllm_seconds or len(self.vllm_seconds) != len(self.ours_seconds):
            raise ValueError("both engines must have as many samples, and one at least")
        if self.vllm_tokens and len(self.vllm_tokens) != len(self.prompts):
            raise ValueError(f"{len(self.prompts)} prompts have {len(self.vllm_tokens)} answers")
        if not 0 <= self.equal <= len(self.prompts):
            raise ValueError(f"equal must be at most {len(self.prompts)}, got {self.equal}")

    @property
    def size(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)

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
        tuple(map(tuple, prompts)),
        new_tokens,
        tuple(map(tuple, theirs)) if keep_tokens else (),
        sum(a == b for a, b in zip(theirs, own, strict=True)),
        tuple(step for step, _ in steps),
        tuple(step for _, step in steps),
    )
