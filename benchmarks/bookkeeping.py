"""What a step costs beside the model: scheduler, tables, slots, staging, account.

Models: an engine in the middle of decoding, whose model answers at once: what is left of its step
is everything else.

Assumes: greedy requests, no prefix cache, no pre-emption.

Ignores: drawing from a real vocabulary (`breakdown`).
"""

from __future__ import annotations

import statistics
from time import perf_counter

import torch
from engines import BLOCK_SIZE, greedy, random_prompts, say
from torch import Tensor

from servelab.decoder import PagedDecoder, TorchRunner
from servelab.decoder.attention import StepBatch
from servelab.models import ModelSpec
from servelab.serving import Engine

SMALL = ModelSpec.from_config(  # what its pool holds is not asked for
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 49152,
    }
)


class Modelless(TorchRunner):
    """Answers every step with the same logits, of a vocabulary of two."""

    def logits(self, batch: StepBatch, last: Tensor) -> Tensor:
        """Return zeros, (L, 2)."""
        return torch.zeros((len(last), 2))


def step_seconds(sequences: int, steps: int = 200) -> float:
    """Return the median step of an engine with so many running sequences."""
    say(f"bookkeeping for {sequences} sequences")
    prompt, output = 128, steps + 8
    blocks = -(-(prompt + output) // BLOCK_SIZE)
    engine = Engine(
        Modelless(PagedDecoder(SMALL)),
        num_blocks=sequences * blocks + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * prompt,
    )
    for tokens in random_prompts(sequences, prompt, seed=0):
        engine.add(tokens, greedy(output))
    for _ in range(4):
        engine.step()
    seconds = []
    for _ in range(steps):
        began = perf_counter()
        engine.step()
        seconds.append(perf_counter() - began)
    return statistics.median(seconds)
