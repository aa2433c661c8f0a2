"""Exercises of chapter 1: token passes, attention pairs, and what a KV head changes."""

import random
from dataclasses import replace

from servelab import models, roofline
from servelab.check.exercise import Exercise, Number, Option, Pick, Wrong
from servelab.check.function import Function
from servelab.models import ModelSpec


def passes(prompt: int, reply: int, cached: bool) -> int:
    """Return the tokens that pass through the model in a generation."""
    return sum(new for [(new, _)] in roofline.generation_steps(prompt, reply, cached))


def _factor(prompt: int, reply: int) -> float:
    return passes(prompt, reply, False) / passes(prompt, reply, True)


def pairs(new: int, cached: int) -> int:
    """Return the (query, key) pairs of one sequence's causal attention."""
    return roofline.causal_pairs(new, cached)


def _growth(attention_scale: float = 1.0) -> float:
    """Return a late step's FLOP over an early one's, attention scaled."""
    llama, flop = models.get("llama-3-8b"), []
    for context in (30_000, 30):
        cost = roofline.step_cost(llama, [(1, context - 1)])
        attention = cost.by_name()["attention"].flop
        flop.append(cost.flop - attention + attention_scale * attention)
    return flop[0] / flop[1]


def with_kv_heads(spec: ModelSpec, heads: int) -> ModelSpec:
    """Return a model with another number of KV heads in every layer."""
    layers = [
        replace(layer, attention=replace(layer.attention, num_kv_heads=heads))  # type: ignore[type-var]
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def _passes_inputs(rng: random.Random) -> tuple[object, ...]:
    return rng.randint(1, 40), rng.randint(1, 40), rng.random() < 0.5


def _pairs_inputs(rng: random.Random) -> tuple[object, ...]:
    return rng.randint(1, 30), rng.choice([0, rng.randint(1, 50)])


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "1.1",
        "A long reply to a short prompt",
        "A prompt of 128 tokens is answered with 1,024: how many times the token passes does it "
        "take without a cache?",
        "times",
        lambda: _factor(128, 1024),
        2e-4,
        (
            Wrong(
                "prompt and reply exchanged",
                lambda: _factor(1024, 128),
                "That is a prompt of 1,024 answered with 128.",
            ),
            Wrong(
                "the chapter's request",
                lambda: _factor(1024, 256),
                "That is the request of the chapter, 1,024 tokens answered with 256.",
            ),
            Wrong(
                "the last token passed too",
                lambda: passes(128, 1024, False) / (128 + 1024),
                "With a cache it is one pass fewer: the last token of the reply is drawn, and "
                "never goes through the model.",
            ),
            Wrong(
                "the limit of long replies",
                512,
                "Half the reply is the limit where the prompt is negligible. Here it is not.",
            ),
            Wrong(
                "the limit of long prompts",
                1024,
                "The number of steps is the limit for a prompt much longer than the reply.",
            ),
            Wrong(
                "every pass at full length",
                lambda: 1024 * 1152 / 1151,
                "Not every step passes all 1,152 tokens: the sequence grows by one per step.",
            ),
        ),
        minutes=10,
        tests="the passes of a generation with and without a cache, and their limits",
    ),
    Pick(
        "1.2",
        "Change the KV heads",
        "Qwen3-8B gets 32 KV heads instead of 8: which quantities change?",
        {
            "a": Option(
                "the attention FLOP of a token at context 8,192",
                "the work of a pair counts query heads. Which heads does the product of a query "
                "and a key run over?",
            ),
            "b": Option(
                "its linear FLOP",
                "look at the shapes of the key and value projections.",
            ),
            "c": Option(
                "the bytes of cache per token", "the cache holds keys and values: of which heads?"
            ),
            "d": Option(
                "the context at which attention FLOP equal linear FLOP",
                "it is a quotient; does its numerator or its denominator change?",
            ),
        },
        "bcd",
        "Sharing KV heads saves memory and traffic. It does not save the arithmetic of attention.",
        minutes=10,
        tests="what grouped-query attention changes, and what it does not",
    ),
    Number(
        "1.3",
        "Constant cost per step?",
        "By what factor does a step of Llama-3-8B cost more FLOP at context 30,000 than at 30, "
        "with a KV cache?",
        "times",
        _growth,
        0.005,
        (
            Wrong("constant", 1, "Only the linear layers are constant. Attention meets every key."),
            Wrong(
                "proportional to the context",
                1000,
                "Attention grows with the context; the linear layers, the larger part of a short "
                "step, do not.",
            ),
            Wrong(
                "KV heads in the work",
                lambda: _growth(8 / 32),
                "That counts attention's work by KV head. Every query head makes its own products.",
            ),
            Wrong(
                "multiply-adds counted once",
                lambda: _growth(0.5),
                "A multiply-add is two FLOP in attention too, and values are weighted besides "
                "the scores: four FLOP per pair, head and dimension.",
            ),
        ),
        minutes=10,
        tests="which part of a decode step grows with the context",
    ),
    Function(
        "1.4",
        "Count the passes",
        "Write the number of tokens that pass through the model for a prompt and a reply, with "
        "and without a cache.",
        _passes_inputs,
        passes,
        (
            Wrong(
                "the last token passed too",
                lambda prompt, reply, cached: (
                    prompt + reply if cached else passes(prompt, reply, False)
                ),
                "With a cache you count one pass too many: the last token of the reply is never "
                "put in.",
            ),
            Wrong(
                "every pass at full length",
                lambda prompt, reply, cached: (
                    prompt + reply - 1 if cached else reply * (prompt + reply)
                ),
                "Without a cache each step passes what there is so far, not the final length.",
            ),
            Wrong(
                "lengths counted from 1 after the prompt",
                lambda prompt, reply, cached: (
                    prompt + reply - 1 if cached else reply * prompt + reply * (reply + 1) // 2
                ),
                "Without a cache the first step passes the prompt alone: no token of the reply "
                "exists yet.",
            ),
            Wrong(
                "cache ignored",
                lambda prompt, reply, cached: passes(prompt, reply, False),
                "Your function gives the same with and without a cache.",
            ),
            Wrong(
                "cache always there",
                lambda prompt, reply, cached: passes(prompt, reply, True),
                "Your function counts as if there always were a cache.",
            ),
        ),
        minutes=10,
        tests="the number of passes, to the last token",
    ),
    Function(
        "1.5",
        "Count the pairs",
        "Write the number of (query, key) pairs of causal attention for new tokens behind cached "
        "ones.",
        _pairs_inputs,
        pairs,
        (
            Wrong(
                "no causal mask",
                lambda new, cached: new * (cached + new),
                "A new token does not see those after it: about half of the pairs among the new "
                "tokens fall away.",
            ),
            Wrong(
                "everything halved",
                lambda new, cached: new * (cached + new) // 2,
                "The causal mask halves only the pairs among the new tokens. Every new token sees "
                "all that is cached.",
            ),
            Wrong(
                "not to itself",
                lambda new, cached: new * cached + new * (new - 1) // 2,
                "Off by the diagonal: a token sees itself too.",
            ),
            Wrong(
                "cached tokens left out",
                lambda new, cached: new * (new + 1) // 2,
                "Your function leaves out the cached keys.",
            ),
        ),
        minutes=8,
        tests="what the causal mask halves, and what it does not",
    ),
)
