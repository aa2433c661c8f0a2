"""The speed of the engine, against its goals: ``python benchmarks/serving_speed.py``.

On a CPU, with random weights of the shape of SmolLM2-135M in bf16, greedy: decode steps beside
``generate`` of transformers and beside our own contiguous twin, mixed lengths, bookkeeping, and
where a step's time goes. All that is compared is executed in turn in this process. Progress goes
to stderr, the tables to stdout. Ten minutes on two quiet cores; ``--quick`` shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bookkeeping
import breakdown
import decoding
import goals
import mixed
import torch
from decoding import COMPILED, KERNELS
from engines import Decodes, Ours, Transformers, say, write_checkpoint
from goals import Goal

from servelab import measure, units
from servelab.decoder import TorchRunner, packing


def options_from(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=3, help="executions of each batch")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled step out")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few and short batches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw samples there too")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.quick:
        options.rounds = 1
    return options


def run(options: argparse.Namespace) -> list[Goal]:
    """Measure, print, and return the goals."""
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        return _run(options, write_checkpoint(Path(folder)))


def _run(options: argparse.Namespace, folder: Path) -> list[Goal]:
    rounds, quick = options.rounds, options.quick
    batches, new_tokens = ((1, 8), 8) if quick else ((1, 8, 32), 128)
    print(f"{measure.probe().line}, {torch.get_num_threads()} threads, medians of {rounds} rounds")
    runner = TorchRunner.from_pretrained(folder, "cpu")
    ours, fast = {"ours": runner}, runner  # where nothing can be packed, the kernels multiply
    if packing.available():
        ours["ours, packed"] = fast = TorchRunner.from_pretrained(folder, "cpu", pack=True)
    ours[KERNELS] = TorchRunner(fast.model, "cpu")
    if not options.no_compile:
        ours[COMPILED] = TorchRunner.from_pretrained(folder, "cpu", attention="cpu", compile=True)
    engines: dict[str, Decodes] = {"transformers": Transformers(folder)}
    engines |= {name: Ours(name, own) for name, own in ours.items()}

    found: list[Goal] = []
    groups = [
        decoding.measure_group(list(engines.values()), batch, 128, new_tokens, rounds)
        for batch in batches
    ]
    _show("Decoding, prompt 128", groups)
    found += decoding.against_transformers(engines, groups)

    twins, reached, lines = decoding.against_twin(fast.model, batches, 8 if quick else 24, rounds)
    _show("What paging costs: the same model and operators on contiguous rows", twins)
    print(*lines, "", sep="\n")
    found += reached

    lengths = mixed.workload(6 if quick else 64)
    seconds, reached, lines = mixed.compare(fast.model, lengths, max(1, rounds - 1))
    if not quick:
        lines.append(mixed.generate_batch(folder))
    print(
        f"{len(lengths)} requests of mixed lengths, {mixed.SEATS} at a time", *lines, "", sep="\n"
    )
    found += reached

    overhead = {count: bookkeeping.step_seconds(count) for count in (batches[-1], 256)}
    step = groups[-1].seconds(KERNELS)
    found += [
        Goal("bookkeeping of 256 sequences", 1.0, 1e3 * overhead[256], False, "ms"),
        Goal(
            f"bookkeeping at batch {batches[-1]}, of the step",
            5.0,
            100 * overhead[batches[-1]] / step,
            False,
            "%",
        ),
    ]
    parts = {batch: breakdown.shares(fast, batch) for batch in batches}
    rows: list[list[object]] = [
        [kind, *(f"{parts[b][kind]:.0%}" for b in batches)] for kind in parts[batches[0]]
    ]
    print("Where a step's time goes (attention and operators by torch, context 140)")
    print(units.table(rows, ["", *(f"batch {batch}" for batch in batches)]), end="\n\n")
    print(goals.table(found))
    if options.json:
        record: dict[str, Any] = {
            "device": measure.probe().line,
            "threads": torch.get_num_threads(),
            "groups": [group.record() for group in groups],
            "paging": [group.record() for group in twins],
            "mixed_seconds": seconds,
            "bookkeeping_seconds": overhead,
            "shares": parts,
            "goals": [vars(goal) | {"met": goal.met} for goal in found],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        say(f"written: {options.json}")
    return found


def _show(title: str, groups: Sequence[decoding.Group]) -> None:
    print(title)
    rows = [[group.context_tokens, *row] for group in groups for row in group.rows()]
    print(units.table(rows, ["context", *decoding.COLUMNS]), end="\n\n")


if __name__ == "__main__":
    run(options_from())
