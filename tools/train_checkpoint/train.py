"""Train the small checkpoint of the book on its own stories and write it, ready to be loaded.

``python -m tools.train_checkpoint.train [FOLDER]`` from the root of the repository: five minutes on
two cores. Without a folder it replaces ``src/servelab/data/checkpoint``, all but the README, whose
figures ``python -m tools.train_checkpoint.check`` prints.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from servelab.decoder import DenseDecoder
from servelab.models import ModelSpec
from tools.train_checkpoint import stories
from tools.train_checkpoint.check import BOS, CHECKPOINT, EOS

SEED = 1
TOKENIZER_STORIES = 4000  # every word of the grammar occurs in far fewer
PEAK_RATE, WARM_UP_STEPS = 4e-3, 40

# Layers, widths, heads and vocabulary all differ, so that none can be mistaken for another.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 768,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    # Written twice: older readers know the second form only.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
}


@dataclass(frozen=True)
class Phase:
    """Some steps on batches of one shape."""

    steps: int
    rows: int
    tokens: int


# The second phase is there for the positions; the first is cheaper per token.
PHASES = (Phase(steps=500, rows=16, tokens=256), Phase(steps=60, rows=8, tokens=512))


def train_tokenizer() -> Tokenizer:
    """Return a byte-level BPE of the stories: any text encodes and decodes back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (stories.generate(seed).text for seed in range(TOKENIZER_STORIES))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, CONFIG["bos_token_id"])]
    )
    return tokenizer


def batches(tokenizer: Tokenizer, phases: tuple[Phase, ...]) -> Iterator[Tensor]:
    """Yield batches of ids (rows, tokens + 1): stories end to end, a row begins with a story.

    No story comes twice: its seed is its number.
    """
    seed, eos = 0, CONFIG["eos_token_id"]
    for phase in phases:
        for _ in range(phase.steps):
            batch = []
            for _ in range(phase.rows):
                row: list[int] = []
                while len(row) <= phase.tokens:
                    row += [*tokenizer.encode(stories.generate(seed).text).ids, eos]
                    seed += 1
                batch.append(row[: phase.tokens + 1])
            yield torch.tensor(batch)


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: up in a line, down in half a cosine to a hundredth."""
    if step < WARM_UP_STEPS:
        return PEAK_RATE * (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / (steps - WARM_UP_STEPS)
    return PEAK_RATE * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def train(model: DenseDecoder, tokenizer: Tokenizer, phases: tuple[Phase, ...] = PHASES) -> None:
    """Train the model in place and print how it goes."""
    model.requires_grad_(True)
    # Matrices decay, norms do not.
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    steps, seen, begin = sum(phase.steps for phase in phases), 0, time.perf_counter()
    for step, batch in enumerate(batches(tokenizer, phases)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        logits = model(batch[:, :-1])  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += batch[:, 1:].numel()
        if step % 25 == 24 or step == steps - 1:
            seconds = time.perf_counter() - begin
            print(
                f"step {step + 1} of {steps}, {seen:,} tokens, {seconds:.0f} s: "
                f"loss {loss.item():.3f} nat per token",
                flush=True,
            )
    model.requires_grad_(False)


def write(model: DenseDecoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint as transformers does: weights in bf16, lm_head left to the embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS}
    _write_json(folder / "config.json", CONFIG)
    _write_json(
        folder / "tokenizer_config.json",
        special
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id")},
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=CHECKPOINT)
    folder = parser.parse_args().folder
    torch.set_num_threads(2)  # as recorded: another number adds up in another order
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer()
    model = DenseDecoder(
        ModelSpec.from_config(CONFIG, "stories"),
        rope_theta=CONFIG["rope_theta"],
        norm_eps=CONFIG["rms_norm_eps"],
        seed=SEED,
        init_std=CONFIG["initializer_range"],
    )
    print(f"training {model.spec.params_total:,} parameters; about five minutes on two cores")
    train(model, tokenizer)
    write(model, tokenizer, folder)
    print(f"written to {folder}; now run: python -m tools.train_checkpoint.check {folder}")


if __name__ == "__main__":
    main()
