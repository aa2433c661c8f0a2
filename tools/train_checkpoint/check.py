"""Check the small checkpoint: do its stories keep to the grammar, and how clear are its choices?

``python -m tools.train_checkpoint.check [FOLDER]`` from the root of the repository prints the
figures of the checkpoint's README. The openings of its stories are none that it was trained on.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from servelab.decoder import DenseCache, DenseDecoder
from tools.train_checkpoint import stories

CHECKPOINT = Path(__file__).resolve().parents[2] / "src/servelab/data/checkpoint"
BOS, EOS = "<|bos|>", "<|eos|>"
MAX_TOKENS = 200  # of a story with its marks; the longest of the grammar have fewer


@dataclass(frozen=True)
class Told:
    """The ids of a prompt and of what was made of it, the marks included."""

    prompt_tokens: int
    ids: list[int]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[DenseDecoder, Tokenizer]:
    """Return the model of a folder, computing in ``dtype``, and its tokenizer."""
    model = DenseDecoder.from_pretrained(folder, dtype=dtype)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def openings(count: int) -> list[str]:
    """Return ``count`` different first sentences that no training story has."""
    return random.Random(0).sample(stories.held_out_openings(), count)


def tell(
    model: DenseDecoder, tokenizer: Tokenizer, prompts: list[str], temperature: float = 0.0
) -> list[Told]:
    """Return what the model makes of each prompt, up to its end mark; the shortest prompts first.

    Parameters: ``temperature`` 0: always the most likely token.
    """
    eos = tokenizer.token_to_id(EOS)
    encoded = sorted((tokenizer.encode(prompt).ids for prompt in prompts), key=len)
    generator = torch.Generator().manual_seed(0)
    told = []
    for length, group in groupby(encoded, key=len):
        sequence = step = torch.tensor(list(group))  # (B, N)
        dtype = model.embed_tokens.weight.dtype
        cache = DenseCache(model.spec, len(sequence), MAX_TOKENS, dtype=dtype)
        while sequence.shape[1] < MAX_TOKENS and not (sequence == eos).any(1).all():
            logits = model(step, cache, last_only=True)[:, -1]  # (B, V)
            if temperature:
                chances = (logits / temperature).softmax(-1)
                step = torch.multinomial(chances, 1, generator=generator)  # (B, 1)
            else:
                step = logits.argmax(-1, keepdim=True)  # (B, 1)
            sequence = torch.cat((sequence, step), dim=1)  # (B, N + i)
        for ids in sequence.tolist():
            told.append(Told(length, ids[: ids.index(eos) + 1] if eos in ids else ids))
    return told


def is_story(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Return whether the ids are a story of the grammar and its end mark, nothing else."""
    *story, last = ids
    try:
        stories.parse(tokenizer.decode(story, skip_special_tokens=False).removeprefix(BOS))
    except stories.NotAStory:
        return False
    return bool(last == tokenizer.token_to_id(EOS))


def smallest_gap(model: DenseDecoder, told: list[Told]) -> float:
    """Return the smallest lead of a chosen token's logit over the next best, of all greedy choices.

    It is negative where a token was not the most likely one.
    """
    smallest = float("inf")
    for story in told:
        ids = torch.tensor([story.ids])  # (1, N)
        logits = model(ids)[0, story.prompt_tokens - 1 : -1]  # (T, V): before each chosen token
        chosen = ids[0, story.prompt_tokens :, None]  # (T, 1)
        lead = logits.gather(1, chosen)  # (T, 1)
        others = logits.scatter(1, chosen, float("-inf")).amax(1, keepdim=True)  # (T, 1)
        smallest = min(smallest, (lead - others).min().item())
    return smallest


def loss_and_floor(model: DenseDecoder, tokenizer: Tokenizer, count: int) -> tuple[float, float]:
    """Return what the model, and what the grammar itself, needs in nat per token.

    The mean is over ``count`` stories, from behind their openings to their end marks. The openings
    were not trained on. No model can do better than the grammar, but for the luck of the draw.
    """
    model_nats = grammar_nats = 0.0
    tokens = 0
    for seed in range(count):
        story = stories.generate(seed, held_out=True)
        prompt_tokens = len(tokenizer.encode(stories.opening(story.kind, story.name)).ids)
        ids = torch.tensor([*tokenizer.encode(story.text).ids, tokenizer.token_to_id(EOS)])  # (N)
        logits = model(ids[None])[0, prompt_tokens - 1 : -1]  # (T, V)
        model_nats += F.cross_entropy(logits, ids[prompt_tokens:], reduction="sum").item()
        grammar_nats += stories.OPENING_LOG_PROBABILITY - story.log_probability
        tokens += len(ids) - prompt_tokens
    return model_nats / tokens, grammar_nats / tokens


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=CHECKPOINT)
    folder = parser.parse_args().folder
    model, tokenizer = load(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{model.spec.params_total:,} parameters, {size / 1e6:.2f} MB in all")
    loss, floor = loss_and_floor(model, tokenizer, 200)
    print(f"loss {loss:.4f}, grammar {floor:.4f} nat per token, 200 stories with unseen openings")
    prompts = openings(100)
    for temperature in (0.0, 1.0):
        told = tell(model, tokenizer, prompts, temperature)
        good = sum(is_story(tokenizer, story.ids) for story in told)
        print(f"temperature {temperature}: {good} of {len(told)} stories keep to the grammar")
        for story in [s for s in told if not is_story(tokenizer, s.ids)][:5]:
            try:
                stories.parse(tokenizer.decode(story.ids))
            except stories.NotAStory as error:
                print(f"  {str(error)[:300]}")
    told = tell(model.to(torch.float64), tokenizer, prompts)
    lengths = [len(story.ids) for story in told]
    print(f"greedy in float64: {min(lengths)} to {max(lengths)} tokens with prompt and marks")
    print(f"smallest gap between the two largest logits: {smallest_gap(model, told):.4f}")
    print(f"the first: {tokenizer.decode(told[0].ids)}")


if __name__ == "__main__":
    main()
