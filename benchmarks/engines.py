"""What decodes in the benchmarks: a checkpoint of random weights, and who generates from it.

Models: greedy decoding of a batch of equally long prompts, timed step by step. Weights are random,
of the shape of SmolLM2-135M, in bf16: speed does not depend on what they say.

Assumes: a CPU; nothing ends before its last token.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from servelab import measure, models, roofline
from servelab.decoder import PagedDecoder, TorchRunner
from servelab.serving import Engine, SamplingParams

NAME = "smollm2-135m"
BLOCK_SIZE = 16
_COPY_BYTES = 2**28


@dataclass(frozen=True)
class Timed:
    """One batch: the seconds of its first step, of each further one, and all tokens generated."""

    prefill_seconds: float
    step_seconds: tuple[float, ...]
    token_ids: list[list[int]]

    @property
    def median_seconds(self) -> float:
        """Return the median of the decode steps."""
        return statistics.median(self.step_seconds)


def say(line: str) -> None:
    """Show progress, apart from the results."""
    print(line, file=sys.stderr, flush=True)


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write random weights and their configuration; return the folder."""
    text = (resources.files("servelab") / f"data/configs/{NAME}.json").read_text(encoding="utf-8")
    model = PagedDecoder(models.get(NAME), dtype=torch.bfloat16).initialise(seed, std=0.05)
    (folder / "config.json").write_text(text, encoding="utf-8")
    weights = {name: weight.contiguous() for name, weight in model.weights().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_prompts(batch: int, tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, models.get(NAME).vocab_size, (batch, tokens), generator=generator)
    rows: list[list[int]] = ids.tolist()
    return rows


def copy_bandwidth() -> float:
    """Return the bytes per second of a copy, read and written: the roof of this moment."""
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    seconds = measure.sample_seconds(lambda: target.copy_(source), samples=7, warmup=1)
    return 2 * _COPY_BYTES / statistics.median(seconds)


def step_bytes(pairs: Sequence[tuple[int, int]]) -> int:
    """Return the bytes that a step of (new, cached) tokens has to move in bf16."""
    cost = roofline.step_cost(models.get(NAME), pairs, weight_dtype="bf16", kv_dtype="bf16")
    return cost.read_bytes + cost.written_bytes


def greedy(max_tokens: int) -> SamplingParams:
    """Return the parameters of every request here."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def engine_for(
    runner: TorchRunner, requests: Sequence[tuple[int, int]], seats: int, budget_tokens: int = 2048
) -> Engine:
    """Return an engine with blocks for the ``seats`` longest of (prompt, output) lengths."""
    lengths = sorted((sum(request) for request in requests), reverse=True)
    blocks = sum(-(-length // BLOCK_SIZE) for length in lengths[:seats])
    return Engine(
        runner,
        num_blocks=blocks + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=seats,
        max_num_batched_tokens=budget_tokens,
        enable_prefix_caching=False,  # random prompts share nothing, and rounds repeat them
    )


class Decodes(Protocol):
    """Whoever decodes a batch."""

    name: str

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timed:
        """Decode one batch."""


class Ours:
    """Our engine with one runner.

    Parameters: ``runner``; ``name`` in the tables.
    """

    def __init__(self, name: str, runner: TorchRunner) -> None:
        self.name, self.runner = name, runner

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timed:
        """Decode one batch. A step is timed from plan to account, as a server would see it."""
        lengths = [(len(prompt), new_tokens) for prompt in prompts]
        whole = sum(map(len, prompts))  # so that all prompts are in the first step
        engine = engine_for(self.runner, lengths, len(prompts), whole)
        requests = [engine.add(prompt, greedy(new_tokens)) for prompt in prompts]
        seconds = []
        while engine.unfinished:
            began = perf_counter()
            engine.step()
            seconds.append(perf_counter() - began)
        tokens = [request.sequences[0].output_token_ids for request in requests]
        return Timed(seconds[0], tuple(seconds[1:]), tokens)


class Transformers:
    """``generate`` of the transformers library, with its default cache.

    Parameters: ``folder`` of the checkpoint; ``attention`` an implementation of the library.
    """

    def __init__(self, folder: Path, attention: str = "sdpa") -> None:
        import transformers

        self.name = "transformers"
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timed:
        """Decode one batch."""
        ids = torch.tensor(prompts)  # (B, T)
        clock: list[float] = [perf_counter()]

        def note(input_ids: Tensor, scores: Tensor, **rest: Any) -> Tensor:
            clock.append(perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)  # nothing ends early

        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[note],
            )
        seconds = [after - before for before, after in pairwise(clock)]
        return Timed(seconds[0], tuple(seconds[1:]), out[:, ids.shape[1] :].tolist())
