"""Train the small checkpoint of the book on its own stories and write it, ready to be loaded.

``python -m tools.train_checkpoint.train [FOLDER]`` from the root of the repository: some eight
minutes on one core. Without a folder it replaces ``src/servelab/data/checkpoint``, all but the
README, whose figures ``python -m tools.train_checkpoint.check`` prints.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from servelab.decoder import DenseDecoder, Rope
from servelab.models import ModelSpec
from tools.train_checkpoint import stories
from tools.train_checkpoint.check import BOS, CHECKPOINT, EOS

SEED = 1
TOKENIZER_STORIES = 4000  # every word of the grammar occurs in far fewer
STEPS, ROWS, LONG_ROWS = 800, 16, 4
PADDING = -100  # what cross_entropy leaves out
MUON_RATE, ADAM_RATE = 0.02, 4e-3
WARM_UP_STEPS, COOL_DOWN = 20, 0.8  # the second a share of all steps

# Layers, widths, heads and vocabulary all differ, so that none can be mistaken for another.
# Without a window Mistral's layers are Llama's, but its class lets the query heads be wider than
# the hidden size (as in Mistral-Nemo); LlamaConfig refuses a hidden size that 6 does not divide.
CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 768,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "sliding_window": None,
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


def batches(tokenizer: Tokenizer, steps: int) -> Iterator[Tensor]:
    """Yield batches of ids (B, N), each row filled up with ``PADDING``. No seed comes twice.

    A row is one story. In every eighth batch it is stories end to end, for the later positions.
    """
    seed, long = 0, CONFIG["max_position_embeddings"] + 1
    for step in range(steps):
        rows = []
        for _ in range(LONG_ROWS if step % 8 == 7 else ROWS):
            row: list[int] = []
            while not row or (step % 8 == 7 and len(row) < long):
                ids = tokenizer.encode(stories.generate(seed).text).ids
                row += [*ids, CONFIG["eos_token_id"]]
                seed += 1
            rows.append(torch.tensor(row[:long]))
        yield pad_sequence(rows, batch_first=True, padding_value=PADDING)


def share_of_rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: up in a line, level, down in a line to 0."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, (steps - step) / (steps * COOL_DOWN))


def train(model: DenseDecoder, tokenizer: Tokenizer, steps: int) -> None:
    """Train the model in place and print how it goes."""
    model.requires_grad_(True)
    # Muon learns from fewer stories than AdamW alone; it is for the matrices between the ends.
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    others = [model.embed_tokens.weight, *(p for p in model.parameters() if p.dim() == 1)]
    optimizers = (
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAM_RATE, weight_decay=0.01, betas=(0.9, 0.95)),
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, partial(share_of_rate, steps=steps))
        for o in optimizers
    ]
    seen, begin = 0, time.perf_counter()
    for step, batch in enumerate(batches(tokenizer, steps)):
        logits = model(batch[:, :-1].clamp(min=0))  # (B, T, V); T = N - 1
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        seen += int((batch[:, 1:] != PADDING).sum())
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
    torch.set_num_threads(1)  # as recorded: more threads add up in another order
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer()
    model = DenseDecoder(
        ModelSpec.from_config(CONFIG, "stories"),
        Rope(CONFIG["rope_theta"]),
        norm_eps=CONFIG["rms_norm_eps"],
        seed=SEED,
        init_std=CONFIG["initializer_range"],
    )
    print(f"training {model.spec.params_total:,} parameters; about eight minutes on one core")
    train(model, tokenizer, STEPS)
    write(model, tokenizer, folder)
    print(f"written to {folder}; now run: python -m tools.train_checkpoint.check {folder}")


if __name__ == "__main__":
    main()
