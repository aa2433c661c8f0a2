"""Bad input: every public function refuses it in its own words, naming the value and the rule.

One table of calls that work; each argument in turn is replaced by what it must not be. An error
counts only if the package raised it on purpose: its type is one that the docstrings promise, it
comes from a `raise` of ours, and its text holds the bad value.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import servelab
from servelab import hardware, memory, models, roofline, units
from servelab.decoder import DenseCache, DenseDecoder, Rope, greedy
from servelab.hardware import Accelerator
from servelab.models import Attention, LayerSpec, Linear, Mlp, ModelSpec
from servelab.roofline import Cost, Operator
from tests.tiny import CONFIGS, random_tokens

PACKAGE = str(Path(servelab.__file__).parent)
LLAMA = models.get("llama-3-8b")
H100 = hardware.get("h100-sxm-80gb")
HEADS = Attention(4, 2, 8)
LAYER = LayerSpec(HEADS, Mlp(8), 8)
TINY = ModelSpec.from_config(CONFIGS["llama-gqa"])
DECODER = DenseDecoder(TINY)
NAN, INF = float("nan"), float("inf")

# What each kind of argument must refuse.
NOT_A_COUNT_FROM_0: list[Any] = [-1, -(10**30), True, False, 1.0, 2.5, NAN, INF, "3", None, [3]]
NOT_A_COUNT: list[Any] = [0, *NOT_A_COUNT_FROM_0]
NOT_POSITIVE: list[Any] = [0, 0.0, -1, -0.5, NAN, INF, -INF, True, "0.5", None, [0.5]]
NOT_FINITE: list[Any] = [NAN, INF, -INF, True, "0.5", None, [0.5], 1j]
NOT_A_DTYPE: list[Any] = ["float16", "BF16", "", 16, None, True, ["bf16"], np.dtype("float32")]
NOT_A_FLAG: list[Any] = [0, 1, 2, None, "yes", "False", NAN, np.True_]
NOT_A_STEP: list[Any] = [
    [],
    None,
    5,
    "ab",
    [1],
    [(1,)],
    [(1, 2, 3)],
    [None],
    [(0, 1)],
    [(1, -1)],
    [(-1, 1)],
    [(True, 1)],
    [(1, False)],
    [(1.0, 1)],
    [(1, 2.0)],
    [("1", 1)],
    [(1, None)],
    [(NAN, 1)],
    np.array([[1, 2], [3, 4]]),
]
NOT_TEXT: list[Any] = [None, 16, 2.0, True, b"16 GiB", ["16 GiB"]]
ALL_OPTIONAL = [v for v in NOT_A_COUNT if v is not None]  # where None has a meaning of its own

# name: (function, arguments that work, what each argument must not be)
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, list[Any]]]] = {
    "check_count": (
        units.check_count,
        {"name": "n", "value": 1},
        {"value": NOT_A_COUNT},
    ),
    "check_positive": (
        units.check_positive,
        {"name": "n", "value": 1},
        {"value": NOT_POSITIVE},
    ),
    "dtype_bits": (units.dtype_bits, {"dtype": "bf16"}, {"dtype": NOT_A_DTYPE}),
    "size_bytes": (
        units.size_bytes,
        {"elements": 1, "dtype": "bf16"},
        {"elements": NOT_A_COUNT_FROM_0, "dtype": NOT_A_DTYPE},
    ),
    "format_count": (units.format_count, {"value": 1}, {"value": NOT_A_COUNT_FROM_0}),
    "format_tokens": (units.format_tokens, {"value": 1}, {"value": NOT_A_COUNT_FROM_0}),
    "format_bytes": (
        units.format_bytes,
        {"value": 1, "unit": "GB"},
        {"value": NOT_FINITE, "unit": ["GBs", "gb", "", 1]},
    ),
    "format_flop": (units.format_flop, {"value": 1}, {"value": NOT_FINITE}),
    "format_flop_rate": (units.format_flop_rate, {"value": 1}, {"value": NOT_FINITE}),
    "format_bandwidth": (units.format_bandwidth, {"value": 1}, {"value": NOT_FINITE}),
    "format_seconds": (units.format_seconds, {"value": 1}, {"value": NOT_FINITE}),
    "parse_bytes": (units.parse_bytes, {"text": "1 GB"}, {"text": NOT_TEXT}),
    "parse_tokens": (units.parse_tokens, {"text": "1K"}, {"text": NOT_TEXT}),
    "parse_seconds": (units.parse_seconds, {"text": "1 s"}, {"text": NOT_TEXT}),
    "Accelerator": (
        Accelerator,
        {
            "name": "a",
            "dense_flop_per_second": {"bf16": 1.0},
            "memory_bytes": 1,
            "bandwidth_bytes_per_second": 1.0,
            "visible_memory_bytes": 1,
            "link_bytes_per_second": 1.0,
        },
        {
            "dense_flop_per_second": [
                {},
                None,
                5.0,
                [("bf16", 1.0)],
                {"float16": 1.0},
                *({"bf16": rate} for rate in NOT_POSITIVE),
            ],
            "memory_bytes": NOT_A_COUNT,
            "bandwidth_bytes_per_second": NOT_POSITIVE,
            "visible_memory_bytes": ALL_OPTIONAL,
            "link_bytes_per_second": [v for v in NOT_POSITIVE if v is not None],
        },
    ),
    "Accelerator.peak": (H100.peak, {"dtype": "bf16"}, {"dtype": [*NOT_A_DTYPE, "fp64", "fp4"]}),
    "Accelerator.ridge": (H100.ridge, {"dtype": "bf16"}, {"dtype": [*NOT_A_DTYPE, "fp64"]}),
    "hardware.get": (
        hardware.get,
        {"name": "t4"},
        {"name": ["", "T4", "h100", None, 4, True, ["t4"], {}]},
    ),
    "models.get": (
        models.get,
        {"name": "qwen3-8b"},
        {"name": ["", "Qwen3-8B", "llama", None, 8, True, ["qwen3-8b"], {}]},
    ),
    "Linear": (
        Linear,
        {"name": "m", "d_in": 1, "d_out": 1, "bias": False},
        {"d_in": NOT_A_COUNT, "d_out": NOT_A_COUNT, "bias": NOT_A_FLAG},
    ),
    "Attention": (
        Attention,
        {
            "num_q_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "window": 1,
            "qkv_bias": False,
            "out_bias": False,
            "qk_norm": False,
        },
        {
            "num_q_heads": [*NOT_A_COUNT, 3],
            "num_kv_heads": [*NOT_A_COUNT, 3, 8],
            "head_dim": NOT_A_COUNT,
            "window": ALL_OPTIONAL,
            "qkv_bias": NOT_A_FLAG,
            "out_bias": NOT_A_FLAG,
            "qk_norm": NOT_A_FLAG,
        },
    ),
    "Mlp": (
        Mlp,
        {"width": 1, "gated": True, "bias": False},
        {"width": NOT_A_COUNT, "gated": NOT_A_FLAG, "bias": NOT_A_FLAG},
    ),
    "LayerSpec": (
        LayerSpec,
        {"attention": HEADS, "mlp": Mlp(1), "norm_params": 0},
        {"norm_params": NOT_A_COUNT_FROM_0},
    ),
    "ModelSpec": (
        ModelSpec,
        {
            "name": "m",
            "hidden_size": 1,
            "vocab_size": 1,
            "layers": (LAYER,),
            "tied_embeddings": True,
            "final_norm_params": 0,
            "max_context_tokens": 1,
            "position_rows": 0,
            "weight_dtype": "bf16",
        },
        {
            "hidden_size": NOT_A_COUNT,
            "vocab_size": NOT_A_COUNT,
            "layers": [(), None, 3, LAYER, [None], (LAYER, HEADS)],
            "tied_embeddings": NOT_A_FLAG,
            "final_norm_params": NOT_A_COUNT_FROM_0,
            "max_context_tokens": ALL_OPTIONAL,
            "position_rows": NOT_A_COUNT_FROM_0,
            "weight_dtype": NOT_A_DTYPE,
        },
    ),
    "weight_bytes": (
        LLAMA.weight_bytes,
        {"weight_dtype": "bf16"},
        {"weight_dtype": [d for d in NOT_A_DTYPE if d is not None]},
    ),
    "kv_bytes_per_token": (
        LLAMA.kv_bytes_per_token,
        {"kv_dtype": "bf16", "view": "logical"},
        {"kv_dtype": NOT_A_DTYPE, "view": ["", "Logical", None, 1, True]},
    ),
    "sequence_bytes": (
        LLAMA.sequence_bytes,
        {"tokens": 0, "kv_dtype": "bf16", "view": "reserved"},
        {
            "tokens": NOT_A_COUNT_FROM_0,
            "kv_dtype": NOT_A_DTYPE,
            "view": ["", "Logical", None, 1, True],
        },
    ),
    "Cost": (
        Cost,
        {"flop": 0, "read_bytes": 0, "written_bytes": 0},
        {
            "flop": NOT_A_COUNT_FROM_0,
            "read_bytes": NOT_A_COUNT_FROM_0,
            "written_bytes": NOT_A_COUNT_FROM_0,
        },
    ),
    "Operator": (
        Operator,
        {"name": "o", "cost": Cost(0, 0, 0), "count": 1},
        {"count": NOT_A_COUNT},
    ),
    "matmul": (
        roofline.matmul,
        {
            "rows": 1,
            "d_in": 1,
            "d_out": 1,
            "weight_dtype": "bf16",
            "activation_dtype": "bf16",
            "bias": False,
        },
        {
            "rows": NOT_A_COUNT,
            "d_in": NOT_A_COUNT,
            "d_out": NOT_A_COUNT,
            "weight_dtype": NOT_A_DTYPE,
            "activation_dtype": NOT_A_DTYPE,
            "bias": NOT_A_FLAG,
        },
    ),
    "causal_pairs": (
        roofline.causal_pairs,
        {"new_tokens": 1, "cached_tokens": 0, "window": 1},
        {
            "new_tokens": NOT_A_COUNT,
            "cached_tokens": NOT_A_COUNT_FROM_0,
            "window": ALL_OPTIONAL,
        },
    ),
    "keys_read": (
        roofline.keys_read,
        {"new_tokens": 1, "cached_tokens": 0, "window": 1},
        {
            "new_tokens": NOT_A_COUNT,
            "cached_tokens": NOT_A_COUNT_FROM_0,
            "window": ALL_OPTIONAL,
        },
    ),
    "attention": (
        roofline.attention,
        {
            "spec": HEADS,
            "step": [(1, 0)],
            "kv_dtype": "bf16",
            "activation_dtype": "bf16",
            "fused": True,
        },
        {
            "step": NOT_A_STEP,
            "kv_dtype": NOT_A_DTYPE,
            "activation_dtype": NOT_A_DTYPE,
            "fused": NOT_A_FLAG,
        },
    ),
    "kv_append": (
        roofline.kv_append,
        {"spec": HEADS, "new_tokens": 1, "kv_dtype": "bf16", "activation_dtype": "bf16"},
        {"new_tokens": NOT_A_COUNT, "kv_dtype": NOT_A_DTYPE, "activation_dtype": NOT_A_DTYPE},
    ),
    "embedding": (
        roofline.embedding,
        {"new_tokens": 1, "hidden_size": 1, "weight_dtype": "bf16", "activation_dtype": "bf16"},
        {
            "new_tokens": NOT_A_COUNT,
            "hidden_size": NOT_A_COUNT,
            "weight_dtype": NOT_A_DTYPE,
            "activation_dtype": NOT_A_DTYPE,
        },
    ),
    "step_cost": (
        roofline.step_cost,
        {
            "spec": LLAMA,
            "step": [(2, 0)],
            "logits": "last",
            "weight_dtype": "bf16",
            "kv_dtype": "bf16",
            "activation_dtype": "bf16",
        },
        {
            "step": NOT_A_STEP,
            "logits": ["", "none", None, 1, True, [], [1, 1], [3], [-1], [True], [1.0], ["1"]],
            "weight_dtype": NOT_A_DTYPE,
            "kv_dtype": NOT_A_DTYPE,
            "activation_dtype": NOT_A_DTYPE,
        },
    ),
    "generation_steps": (
        roofline.generation_steps,
        {"prompt_tokens": 1, "new_tokens": 1},
        {"prompt_tokens": NOT_A_COUNT, "new_tokens": NOT_A_COUNT},
    ),
    "time_bound": (
        roofline.time_bound,
        {"cost": Cost(1, 1, 1), "chip": H100, "dtype": "bf16"},
        {"dtype": [*NOT_A_DTYPE, "fp64"]},
    ),
    "attainable": (
        roofline.attainable,
        {"intensity": 1.0, "chip": H100, "dtype": "bf16"},
        {"intensity": NOT_POSITIVE, "dtype": [*NOT_A_DTYPE, "fp64"]},
    ),
    "rows_to_reach_ridge": (
        roofline.rows_to_reach_ridge,
        {"d_in": 4096, "d_out": 4096, "chip": H100, "dtype": "bf16"},
        {"d_in": NOT_A_COUNT, "d_out": NOT_A_COUNT, "dtype": [*NOT_A_DTYPE, "fp64"]},
    ),
    "budget": (
        memory.budget,
        {
            "spec": LLAMA,
            "chip": H100,
            "utilization": 0.9,
            "weight_dtype": "bf16",
            "reserve_bytes": 0,
        },
        {
            "utilization": [*NOT_POSITIVE, 1.0001, 90, 10**30],
            "weight_dtype": [d for d in NOT_A_DTYPE if d is not None],
            "reserve_bytes": NOT_A_COUNT_FROM_0,
        },
    ),
    "capacity": (
        memory.capacity,
        {
            "spec": LLAMA,
            "available_bytes": 0,
            "max_model_len": 1,
            "block_size": 16,
            "kv_dtype": "bf16",
        },
        {
            "available_bytes": NOT_A_COUNT_FROM_0,
            "max_model_len": NOT_A_COUNT,
            "block_size": ALL_OPTIONAL,
            "kv_dtype": NOT_A_DTYPE,
        },
    ),
    "max_sequences": (
        memory.max_sequences,
        {
            "spec": LLAMA,
            "available_bytes": 0,
            "tokens": 1,
            "kv_dtype": "bf16",
            "view": "logical",
        },
        {
            "available_bytes": NOT_A_COUNT_FROM_0,
            "tokens": NOT_A_COUNT,
            "kv_dtype": NOT_A_DTYPE,
            "view": ["", "all", None, 1],
        },
    ),
    "max_context": (
        memory.max_context,
        {
            "spec": LLAMA,
            "available_bytes": 0,
            "sequences": 1,
            "kv_dtype": "bf16",
            "view": "logical",
        },
        {
            "available_bytes": NOT_A_COUNT_FROM_0,
            "sequences": NOT_A_COUNT,
            "kv_dtype": NOT_A_DTYPE,
            "view": ["", "all", None, 1],
        },
    ),
    "DenseDecoder": (
        DenseDecoder,
        {"spec": TINY, "norm_eps": 1e-5, "init_std": 0.02},
        {"norm_eps": NOT_POSITIVE, "init_std": NOT_POSITIVE},
    ),
    "Rope": (Rope, {"theta": 1e4}, {"theta": NOT_POSITIVE}),
    "DenseCache": (
        DenseCache,
        {"spec": TINY, "batch": 1, "max_tokens": 1},
        {"batch": NOT_A_COUNT, "max_tokens": NOT_A_COUNT},
    ),
    "greedy": (
        greedy,
        {"model": DECODER, "prompt": random_tokens(1, 2), "new_tokens": 1},
        {"new_tokens": NOT_A_COUNT, "prompt": [None, [[1, 2]], "text", 3]},
    ),
}


def bad_calls() -> Iterator[Any]:
    for name, (_, good, wrong) in CALLS.items():
        assert set(wrong) <= set(good), name
        for argument in wrong:
            yield pytest.param(name, argument, id=f"{name}-{argument}")


def leaves(value: object) -> Iterator[str]:
    """The texts by which an error may name a value: its own, or that of something inside it."""
    yield repr(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple) or (isinstance(value, str) and len(value) > 1):
        for inner in value:
            yield from leaves(inner)
    else:
        yield str(value)


def error_of(function: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    try:
        function(**arguments)
    except (TypeError, ValueError, KeyError) as error:
        return error
    return None


RULES = (
    "must|unknown|is read from|a step is|has no peak|no accelerator|no bundled|asks for|at least"
)


@pytest.mark.parametrize("name", CALLS)
def test_the_call_works_with_good_values(name: str) -> None:
    function, good, _ = CALLS[name]
    function(**good)


@pytest.mark.parametrize(("name", "argument"), list(bad_calls()))
def test_bad_values_are_refused_by_name_and_rule(name: str, argument: str) -> None:
    function, good, wrong = CALLS[name]
    for value in wrong[argument]:
        error = error_of(function, good | {argument: value})
        assert error is not None, f"{name} took {argument}={value!r} without a word"
        last = traceback.extract_tb(error.__traceback__)[-1]
        source = f"{argument}={value!r}: {type(error).__name__}: {error}"
        assert last.filename.startswith(PACKAGE), f"foreign error for {source}"
        assert "raise" in (last.line or ""), f"an accident, not a check, for {source}"
        assert any(leaf and leaf in str(error) for leaf in leaves(value)), f"not named: {source}"
        assert re.search(RULES, str(error)), f"no rule for {source}"


HUGE = [
    (name, argument)
    for name, (_, _, wrong) in CALLS.items()
    for argument, values in wrong.items()
    if any(values is counts for counts in (NOT_A_COUNT, NOT_A_COUNT_FROM_0, ALL_OPTIONAL))
    and name not in ("DenseCache", "greedy", "generation_steps")  # they allocate what is asked for
]


@pytest.mark.parametrize(("name", "argument"), HUGE)
def test_a_huge_count_is_a_count(name: str, argument: str) -> None:
    function, good, _ = CALLS[name]
    function(**good | {argument: 10**30})
