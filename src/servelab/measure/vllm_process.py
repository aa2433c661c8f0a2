"""A real vLLM behind a pipe, and our engine beside it under the same protocol.

Models: greedy batches, each prompt with a length of output; both say how long a batch took.

Assumes: vLLM is installed here, or ``SERVELAB_VLLM_PYTHON`` names an interpreter that has it. It
runs as a process of its own and waits while ours decodes.

Ignores: sampling at random, prefix caching (off in both), the server around vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

from servelab.serving import Engine, Runner, SamplingParams
from servelab.units import check_count

#: Names the interpreter of an environment that has vLLM.
VARIABLE = "SERVELAB_VLLM_PYTHON"
_WORKER = Path(__file__).with_name("_vllm_worker.py")


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
