"""Exercises of chapter 4: bytes per token, what fits, and the units in which it is said."""

import random
from collections.abc import Mapping
from dataclasses import replace

from servelab import hardware, memory, models
from servelab.check.exercise import Exercise, Number, Wrong
from servelab.check.function import Function
from servelab.units import GB, GiB

_FULL = 128 * 1024  # tokens


def _users(
    weights: str,
    cache: str,
    utilization: float = 0.9,
    device_bytes: int | None = None,
    reserve_bytes: int = 2 * GiB,
) -> int:
    spec, chip = models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")
    if device_bytes is not None:
        chip = replace(chip, memory_bytes=device_bytes, visible_memory_bytes=device_bytes)
    left = memory.budget(spec, chip, utilization, weights, reserve_bytes=reserve_bytes)
    return memory.max_sequences(spec, left.available_bytes, 8192, cache)


def kv_bytes_per_token(config: Mapping[str, int], element_bytes: int) -> int:
    """Return the bytes that a token leaves in the cache of a model with equal layers."""
    query_heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", query_heads)
    head_dim = config.get("head_dim", config["hidden_size"] // query_heads)
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * element_bytes


def _bytes(config: Mapping[str, int], size: int, **changed: int) -> int:
    return kv_bytes_per_token({**config, **changed}, size)


def _derived(config: Mapping[str, int]) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


def _config_inputs(rng: random.Random) -> tuple[object, ...]:
    group, kv_heads = rng.choice([2, 4, 5, 8]), rng.choice([2, 4, 8])
    width = rng.choice([64, 80, 96, 128])
    config = {
        "num_hidden_layers": rng.choice([22, 28, 36, 40]),
        "num_attention_heads": group * kv_heads,
        "hidden_size": group * kv_heads * width,
    }
    if rng.random() < 0.7:
        config["num_key_value_heads"] = kv_heads
    if rng.random() < 0.6:
        config["head_dim"] = rng.choice([64, 128, 192, 256])
    return config, rng.choice([1, 2, 4])


def users(
    device_bytes: int,
    utilization_percent: int,
    weight_bytes: int,
    reserve_bytes: int,
    bytes_per_token: int,
    context: int,
) -> int:
    """Return the sequences of a context that fit beside the weights."""
    left = device_bytes * utilization_percent // 100 - weight_bytes - reserve_bytes
    return max(0, left // (bytes_per_token * context))


def _users_inputs(rng: random.Random) -> tuple[object, ...]:
    device = rng.choice([24, 40, 80, 141]) * GB + rng.randint(0, GB)
    percent = rng.choice([80, 85, 90, 95])
    weights = int(device * rng.uniform(0.1, 1.0))
    reserve, per_token = rng.randint(1, 4) * GiB, rng.randint(16, 600) * 1024
    return device, percent, weights, reserve, per_token, rng.choice([256, 1000, 4096])


EXERCISES: tuple[Exercise, ...] = (
    Number(
        "4.1",
        "Bytes per token of OPT-13B",
        "How many bytes of cache does one token of OPT-13B leave in fp16?",
        "bytes",
        lambda: models.get("opt-13b").kv_bytes_per_token("fp16"),
        0.0,
        (
            Wrong(
                "factor 2",
                400 * 1024,
                "Half of it: a token leaves a key and a value, two vectors per layer and head.",
            ),
            Wrong(
                "kilobytes of a thousand",
                800_000,
                "That is the paper's figure read with 1,000 bytes per KB. Multiply it out.",
            ),
            Wrong("in KiB", 800, "That is in KiB; the answer is asked for in bytes."),
            Wrong(
                "four bytes",
                1600 * 1024,
                "Twice too much: an fp16 number has two bytes.",
            ),
            Wrong(
                "layers left out",
                20 * 1024,
                "That is one layer. Each of the 40 keeps keys and values of its own.",
            ),
            Wrong(
                "8 KV heads",
                160 * 1024,
                "That has 8 KV heads, as in later models. A configuration without the field has "
                "one per query head.",
            ),
        ),
        minutes=10,
        tests="the formula of the cache, for a configuration that leaves fields out",
    ),
    Number(
        "4.2",
        "Weights or cache in fp8",
        "Qwen3-8B on the chapter's H100, 8,192 tokens per user: how many users fit with the "
        "cache in fp8 and the weights in bf16?",
        "users",
        lambda: _users("bf16", "fp8"),
        0.0,
        (
            Wrong(
                "weights in fp8",
                lambda: _users("fp8", "bf16"),
                "That has the weights in fp8 and the cache in bf16.",
            ),
            Wrong(
                "nothing in fp8",
                lambda: _users("bf16", "bf16"),
                "That has everything in bf16.",
            ),
            Wrong(
                "both in fp8",
                lambda: _users("fp8", "fp8"),
                "That has both in fp8. Only the cache is.",
            ),
            Wrong(
                "the whole device",
                lambda: _users("bf16", "fp8", 1.0),
                "That uses all of the device. The engine of the chapter may use 90 % of it.",
            ),
            Wrong(
                "GB for GiB",
                lambda: _users("bf16", "fp8", device_bytes=80 * GB),
                "That reads the label as 80 * 10^9 bytes. Take what the driver shows, as the "
                "chapter does.",
            ),
            Wrong(
                "the label",
                lambda: _users("bf16", "fp8", device_bytes=80 * GiB),
                "That takes all 80 GiB of the label. The driver keeps a little of them.",
            ),
            Wrong(
                "no reserve",
                lambda: _users("bf16", "fp8", reserve_bytes=0),
                "You forget the reserve: the chapter sets 2 GiB aside.",
            ),
        ),
        minutes=10,
        tests="the budget of a device, and what a format halves",
    ),
    Number(
        "4.3",
        "A full context of Llama-3-8B",
        "How large is the bf16 cache of Llama-3-8B at 128K (131,072) tokens?",
        "GiB",
        lambda: models.get("llama-3-8b").sequence_bytes(_FULL) / GiB,
        1e-6,
        (
            Wrong(
                "GQA ignored",
                64,
                "That counts 32 heads. The model has 32 query heads, and 8 KV heads: the cache "
                "holds keys and values of the KV heads alone.",
            ),
            Wrong(
                "GB for GiB",
                lambda: models.get("llama-3-8b").sequence_bytes(_FULL) / GB,
                "That is in GB, 10^9 bytes. A GiB is 2^30.",
            ),
            Wrong(
                "GQA ignored, in GB",
                lambda: 4 * models.get("llama-3-8b").sequence_bytes(_FULL) / GB,
                "Two things: the heads of the cache are the KV heads, and GB are not GiB.",
            ),
            Wrong("factor 2", 8, "Half of it: both a key and a value are stored."),
            Wrong(
                "128,000 tokens",
                lambda: models.get("llama-3-8b").sequence_bytes(128_000) / GiB,
                "That is 128,000 tokens. 128K is 131,072.",
            ),
        ),
        minutes=8,
        tests="KV heads, and GB against GiB",
    ),
    Function(
        "4.4",
        "Bytes per token from a configuration",
        "Write the bytes of cache that a token leaves, from the fields of a config.json.",
        _config_inputs,
        kv_bytes_per_token,
        (
            Wrong(
                "GQA ignored",
                lambda config, size: _bytes(
                    config, size, num_key_value_heads=config["num_attention_heads"]
                ),
                "You count query heads. Where num_key_value_heads is given, the cache holds only "
                "those.",
            ),
            Wrong(
                "factor 2",
                lambda config, size: _bytes(config, size) // 2,
                "Half of it: both a key and a value are stored.",
            ),
            Wrong(
                "head_dim from the hidden size",
                lambda config, size: _bytes(config, size, head_dim=_derived(config)),
                "You derive the width of a head from the hidden size. Where head_dim is given, "
                "it counts.",
            ),
            Wrong(
                "GQA and head_dim ignored",
                lambda config, size: 2 * config["num_hidden_layers"] * config["hidden_size"] * size,
                "That is 2 * layers * hidden_size: right only with a KV head for each query head, "
                "and heads that fill the hidden size.",
            ),
            Wrong(
                "one head where none is given",
                lambda config, size: _bytes(
                    config, size, num_key_value_heads=config.get("num_key_value_heads", 1)
                ),
                "Where num_key_value_heads is missing there is one per query head, not one.",
            ),
            Wrong(
                "bits for bytes",
                lambda config, size: _bytes(config, 8 * size),
                "Eight times too much: are those bits?",
            ),
            Wrong(
                "always two bytes",
                lambda config, size: _bytes(config, 2),
                "You take two bytes per element, whatever element_bytes says.",
            ),
            Wrong(
                "layers left out",
                lambda config, size: _bytes(config, size, num_hidden_layers=1),
                "That is one layer. Each keeps keys and values of its own.",
            ),
        ),
        minutes=15,
        tests="the formula of the cache and its defaults",
    ),
    Function(
        "4.5",
        "Users that fit",
        "Write the number of sequences that fit beside the weights.",
        _users_inputs,
        users,
        (
            Wrong(
                "utilisation of what is left",
                lambda device, percent, weights, reserve, per_token, context: max(
                    0, (device - weights - reserve) * percent // 100 // (per_token * context)
                ),
                "The utilisation is a share of the device. You take it of what the weights leave.",
            ),
            Wrong(
                "no reserve",
                lambda device, percent, weights, reserve, per_token, context: users(
                    device, percent, weights, 0, per_token, context
                ),
                "You forget the reserve.",
            ),
            Wrong(
                "rounded up",
                lambda device, percent, weights, reserve, per_token, context: max(
                    0,
                    -(-(device * percent // 100 - weights - reserve) // (per_token * context)),
                ),
                "You round up. A part of a sequence does not fit.",
            ),
            Wrong(
                "negative",
                lambda device, percent, weights, reserve, per_token, context: (
                    (device * percent // 100 - weights - reserve) // (per_token * context)
                ),
                "Where the weights do not fit, no sequence does: not a negative number of them.",
            ),
            Wrong(
                "whole device",
                lambda device, percent, weights, reserve, per_token, context: users(
                    device, 100, weights, reserve, per_token, context
                ),
                "You use all of the device, whatever the utilisation.",
            ),
        ),
        minutes=10,
        tests="the budget of a device, to the last sequence",
    ),
)
