"""Work and traffic: against a FLOP counter, the bytes of real tensors, brute force, and laws."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from servelab import hardware, models, roofline
from servelab.decoder import DenseCache, DenseDecoder, dense
from servelab.hardware import Accelerator
from servelab.models import Attention, ModelSpec
from servelab.roofline import Cost, Operator, causal_pairs, keys_read, matmul, step_cost
from tests.tiny import CONFIGS, random_tokens

LLAMA = models.get("llama-3-8b")
H100 = hardware.get("h100-sxm-80gb")
# (batch, new, cached): prefill, decode, chunk, and a window of 5 before, at and after it is full
RUNS = [(1, 7, 0), (2, 1, 9), (3, 4, 6), (1, 1, 3), (1, 1, 4), (1, 1, 5), (2, 6, 3)]


def decoder(name: str, dtype: torch.dtype = torch.float32) -> DenseDecoder:
    return DenseDecoder(ModelSpec.from_config(CONFIGS[name], name), dtype=dtype)


def prepared(model: DenseDecoder, batch: int, new: int, cached: int) -> tuple[Any, DenseCache]:
    """The tokens of a step, and a cache that holds what came before."""
    dtype = model.embed_tokens.weight.dtype
    cache = DenseCache(model.spec, batch, new + cached, dtype=dtype)
    if cached:
        model(random_tokens(batch, cached), cache)
    return random_tokens(batch, new, seed=1), cache


# --- work, against a counter --------------------------------------------------------------------


def counted_flop(model: DenseDecoder, batch: int, new: int, cached: int, logits: str) -> int:
    """FLOP that torch counts. Fused attention counts as 0 there, so it is decomposed (R28)."""
    tokens, cache = prepared(model, batch, new, cached)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, cache, last_only=logits == "last")
    return int(counter.get_total_flops())


def rectangle_flop(spec: ModelSpec, batch: int, new: int, cached: int) -> int:
    """Attention as the counter sees it: every new token against every key, masked or not."""
    heads = [layer.attention.num_q_heads * layer.attention.head_dim for layer in spec.layers]
    return sum(4 * width * batch * new * (new + cached) for width in heads)


def linear_flop(cost: Cost) -> int:
    return cost.flop - cost.by_name()["attention"].flop


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("logits", ["last", "all"])
def test_flop_equal_a_counter_on_the_real_module(name: str, logits: Any) -> None:
    model = decoder(name)
    for batch, new, cached in RUNS:
        cost = step_cost(model.spec, [(new, cached)] * batch, logits=logits)
        rectangle = rectangle_flop(model.spec, batch, new, cached)
        assert counted_flop(model, batch, new, cached, logits) == linear_flop(cost) + rectangle
        # the module masks what lies behind a window, and calculates it all the same
        layer = replace(model.spec.layers[0].attention, window=None)
        unfused = roofline.attention(layer, [(new, cached)] * batch, fused=False).flop
        assert len(model.spec.layers) * unfused == rectangle


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixed_step_is_the_work_of_its_sequences_one_by_one(name: str) -> None:
    model = decoder(name)
    step = [(7, 0), (1, 9), (4, 6), (1, 1)]
    cost = step_cost(model.spec, step, logits="last")
    one_by_one = sum(counted_flop(model, 1, new, cached, "last") for new, cached in step)
    rectangles = sum(rectangle_flop(model.spec, 1, new, cached) for new, cached in step)
    assert linear_flop(cost) == one_by_one - rectangles
    pairs = sum(causal_pairs(n, c, model.spec.window(model.spec.layers[0])) for n, c in step)
    per_pair = sum(layer.attention.flop_per_pair for layer in model.spec.layers)
    assert cost.by_name()["attention"].flop == per_pair * pairs


# --- traffic, against the bytes of real tensors -------------------------------------------------


class Traffic:
    """Bytes of what each operator of a real module reads and writes, every tensor once."""

    def __init__(self, model: DenseDecoder, patch: pytest.MonkeyPatch) -> None:
        self.read: dict[str, int] = defaultdict(int)
        self.written: dict[str, int] = defaultdict(int)
        self.pairs = 0
        for name, module in model.named_modules():
            kind = name.rsplit(".", 1)[-1]
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self.linear(kind))
        model.embed_tokens.register_forward_hook(self.look_up)
        self._attend = dense.F.scaled_dot_product_attention
        patch.setattr(dense.F, "scaled_dot_product_attention", self.attend)

    def linear(self, kind: str) -> Any:
        merged = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
        merged |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        name = merged.get(kind, kind)

        def hook(module: nn.Linear, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
            first = kind not in ("k_proj", "v_proj", "up_proj")  # they share the input of the first
            self.read[name] += sum(p.nbytes for p in module.parameters()) + first * args[0].nbytes
            self.written[name] += out.nbytes
            if kind in ("k_proj", "v_proj"):
                self.read["kv_append"] += out.nbytes
                self.written["kv_append"] += out.nbytes

        return hook

    def look_up(self, module: nn.Embedding, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        self.read["embedding"] += args[0].numel() * module.weight[0].nbytes
        self.written["embedding"] += out.nbytes

    def attend(self, q: Any, k: Any, v: Any, attn_mask: Any, enable_gqa: bool) -> torch.Tensor:
        out: torch.Tensor = self._attend(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa)
        seen = attn_mask.any(0)  # the keys that some query of the step attends to
        self.read["attention"] += q.nbytes + k[:, :, seen].nbytes + v[:, :, seen].nbytes
        self.written["attention"] += out.nbytes
        self.pairs += len(q) * int(attn_mask.sum())
        return out


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_bytes_and_pairs_equal_the_real_tensors(
    name: str, dtype: str, torch_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(name, torch_dtype)
    for batch, new, cached in RUNS:
        tokens, cache = prepared(model, batch, new, cached)
        with monkeypatch.context() as patch:
            seen = Traffic(model, patch)
            model(tokens, cache)
        for module in model.modules():
            module._forward_hooks.clear()
        cost = step_cost(
            model.spec,
            [(new, cached)] * batch,
            logits="all",
            weight_dtype=dtype,
            kv_dtype=dtype,
            activation_dtype=dtype,
        )
        by_name = cost.by_name()
        assert {n: c.read_bytes for n, c in by_name.items()} == seen.read
        assert {n: c.written_bytes for n, c in by_name.items()} == seen.written
        flop_per_pair = model.spec.layers[0].attention.flop_per_pair
        assert by_name["attention"].flop == flop_per_pair * seen.pairs


def test_the_dtypes_of_weights_cache_and_activations_stand_apart() -> None:
    step = [(1, 100)] * 4
    base = step_cost(LLAMA, step).by_name()
    weights = step_cost(LLAMA, step, weight_dtype="fp8").by_name()
    cache = step_cost(LLAMA, step, kv_dtype="fp8").by_name()
    assert {n for n in base if base[n] != weights[n]} == {
        "embedding",
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
        "lm_head",
    }
    assert {n for n in base if base[n] != cache[n]} == {"kv_append", "attention"}
    kv_bytes = 4 * 101 * 131_072
    assert base["attention"].read_bytes - cache["attention"].read_bytes == kv_bytes // 2
    moved = step_cost(LLAMA, step, activation_dtype="fp32").by_name()
    assert all(moved[n].bytes > base[n].bytes for n in base)


# --- pairs and keys, against brute force --------------------------------------------------------


def seen_keys(new: int, cached: int, window: int | None) -> list[set[int]]:
    """The keys that each new token sees, one by one."""
    return [
        {k for k in range(q + 1) if window is None or q - k < window}
        for q in range(cached, cached + new)
    ]


def test_pairs_and_keys_equal_brute_force_over_all_small_cases() -> None:
    windows = [None, *range(1, 14)]
    for new, cached, window in itertools.product(range(1, 8), range(8), windows):
        seen = seen_keys(new, cached, window)
        assert causal_pairs(new, cached, window) == sum(map(len, seen))
        assert keys_read(new, cached, window) == len(set().union(*seen))


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 60))
def test_pairs_at_the_edge_of_a_window(new: int, cached: int, window: int) -> None:
    for w in (window, cached, cached + 1, cached + new - 1, cached + new, cached + new + 1):
        if w >= 1:
            seen = seen_keys(new, cached, w)
            assert causal_pairs(new, cached, w) == sum(map(len, seen))
            assert keys_read(new, cached, w) == len(set().union(*seen))


def test_pairs_of_known_steps() -> None:
    assert causal_pairs(1, 2048) == keys_read(1, 2048) == 2049  # DESIGN: a step's pair
    assert causal_pairs(512, 0) == 512 * 513 // 2  # R12
    assert causal_pairs(64, 1000) == 64 * 1000 + 64 * 65 // 2  # R13
    # R12, R13: the pairs of a prompt do not depend on how it is cut; correctness audit, N = 1,024
    whole = causal_pairs(1024, 0)
    assert whole == sum(causal_pairs(1, c) for c in range(1024))
    assert whole == sum(causal_pairs(128, c) for c in range(0, 1024, 128))
    # the audit's cached and uncached totals for 1,024 prompt tokens and 256 generated
    lengths = range(1024, 1024 + 256)
    assert sum(lengths) == 294_784
    assert sum(causal_pairs(n, 0) for n in lengths) == 170_568_320
    assert whole + sum(causal_pairs(1, n - 1) for n in lengths[1:]) == 818_560
    steps = roofline.generation_steps(1024, 256)
    assert sum(causal_pairs(n, c) for step in steps for n, c in step) == 818_560
    assert sum(n for step in steps for n, _ in step) == 1_279


# --- laws ---------------------------------------------------------------------------------------

PAIRS = st.tuples(st.integers(1, 300), st.integers(0, 300))
STEPS = st.lists(PAIRS, min_size=1, max_size=5)
SPECS = st.sampled_from([LLAMA, models.get("mistral-7b"), models.get("opt-13b")]) | st.sampled_from(
    [ModelSpec.from_config(config) for config in CONFIGS.values()]
)


@given(SPECS, STEPS, PAIRS, st.sampled_from(["last", "all"]))
def test_more_tokens_context_or_sequences_never_cost_less(
    spec: ModelSpec, step: list[tuple[int, int]], extra: tuple[int, int], logits: Any
) -> None:
    def cost(s: list[tuple[int, int]]) -> tuple[int, int, int]:
        total = step_cost(spec, s, logits=logits)
        return total.flop, total.read_bytes, total.written_bytes

    (new, cached), *rest = step
    base = cost(step)
    assert all(a > b for a, b in zip(cost([(new + 1, cached), *rest]), base, strict=True))
    assert all(a > b for a, b in zip(cost([*step, extra]), base, strict=True))
    longer = cost([(new, cached + 1), *rest])
    assert longer[0] >= base[0]
    assert longer[1] >= base[1]
    assert longer[2] == base[2]
    if spec.layers[0].attention.window is None:
        assert longer[0] > base[0]
        assert longer[1] > base[1]


@given(SPECS, STEPS, STEPS)
def test_attention_adds_up_over_sequences_and_weights_do_not(
    spec: ModelSpec, one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    a, b = step_cost(spec, one).by_name(), step_cost(spec, other).by_name()
    both = step_cost(spec, one + other).by_name()
    for name in ("attention", "kv_append", "embedding"):
        for field in ("flop", "read_bytes", "written_bytes"):
            total = getattr(a[name], field) + getattr(b[name], field)
            assert getattr(both[name], field) == total
    weights_once = 0
    for name in set(both) - {"attention", "kv_append", "embedding"}:
        assert both[name].flop == a[name].flop + b[name].flop
        assert both[name].written_bytes == a[name].written_bytes + b[name].written_bytes
        weights_once += a[name].read_bytes + b[name].read_bytes - both[name].read_bytes
    linear = [m for layer in spec.layers for m in layer.attention.linears(spec.hidden_size)]
    linear += [m for layer in spec.layers for m in layer.mlp.linears(spec.hidden_size)]
    assert weights_once == 2 * (sum(m.params for m in linear) + spec.lm_head.params)


@given(SPECS, STEPS, st.sampled_from(["last", "all"]))
def test_a_step_is_the_sum_of_its_operators(
    spec: ModelSpec, step: list[tuple[int, int]], logits: Any
) -> None:
    cost = step_cost(spec, step, logits=logits)
    named = cost.by_name().values()
    for field in ("flop", "read_bytes", "written_bytes", "bytes"):
        assert getattr(cost, field) == sum(getattr(c, field) for c in named)
        assert getattr(cost + cost, field) == 2 * getattr(cost, field)
    calls = sum(operator.count for operator in cost.parts)
    assert calls == 2 + 6 * len(spec.layers) + bool(spec.position_rows)


def test_the_rows_of_lm_head() -> None:
    step = [(5, 0), (1, 8)]
    rows = {
        logits: step_cost(LLAMA, step, logits=logits).by_name()["lm_head"].flop
        // (2 * LLAMA.lm_head.params)
        for logits in ("last", "all", (2, 0), (1, 1))
    }
    assert rows == {"last": 2, "all": 6, (2, 0): 2, (1, 1): 2}
    assert "lm_head" not in step_cost(LLAMA, step, logits=[0, 0]).by_name()
    # R14: it runs whether its weights are its own or the embedding's
    tied = models.get("smollm2-135m")
    assert step_cost(tied, [(1, 0)]).by_name()["lm_head"].read_bytes > 2 * 49_152 * 576


@given(STEPS, st.sampled_from(["h100-sxm-80gb", "l4", "tpu-v5e"]))
def test_bounds_are_ordered(step: list[tuple[int, int]], name: str) -> None:
    chip = hardware.get(name)
    bound = roofline.time_bound(step_cost(LLAMA, step), chip, "bf16")
    assert bound.seconds == max(bound.compute_seconds, bound.memory_seconds)
    assert bound.seconds <= bound.serial_seconds
    # a sum of maxima is at most the sum of both sums, so never more than twice the longer
    total = bound.compute_seconds + bound.memory_seconds
    assert bound.serial_seconds <= total * (1 + 1e-12) <= 2 * bound.seconds * (1 + 1e-12)
    assert bound.limiter == (
        "compute" if bound.compute_seconds >= bound.memory_seconds else "memory"
    )


def test_the_two_bounds_part_where_the_limiters_differ() -> None:
    chip = Accelerator("unit", {"bf16": 1.0}, 1, 1.0)
    busy, moving = Operator("busy", Cost(10, 1, 0)), Operator("moving", Cost(1, 4, 3), count=2)
    bound = roofline.time_bound(Cost.total([busy, moving]), chip, "bf16")
    assert bound == roofline.Bound(15.0, "memory", 12.0, 15.0, 24.0)
    assert roofline.time_bound(busy.cost, chip, "bf16").limiter == "compute"


@given(st.integers(1, 5000), st.integers(1, 9000), st.integers(1, 9000))
def test_intensity_stays_below_its_limits(rows: int, d_in: int, d_out: int) -> None:
    intensity = matmul(rows, d_in, d_out).intensity
    exact = Fraction(rows * d_in * d_out, rows * d_in + d_in * d_out + rows * d_out)  # R18
    assert math.isclose(intensity, exact)
    assert intensity < min(rows, d_in, d_out)
    assert intensity < matmul(rows + 1, d_in, d_out).intensity


@given(st.integers(0, 4000), st.integers(1, 8), st.integers(1, 8))
def test_decode_attention_stays_below_the_queries_per_kv_head(
    cached: int, kv_heads: int, group: int
) -> None:
    attention = Attention(kv_heads * group, kv_heads, 64)
    alone = roofline.attention(attention, [(1, cached)])
    batch = roofline.attention(attention, [(1, cached)] * 7)
    assert alone.intensity == batch.intensity < group  # R19: a batch does not help


@settings(max_examples=200)
@given(
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.sampled_from([("h100-sxm-80gb", "bf16"), ("h100-sxm-80gb", "fp8"), ("l4", "bf16")]),
)
def test_rows_to_reach_the_ridge_are_the_fewest(
    d_in: int, d_out: int, where: tuple[str, str]
) -> None:
    chip, dtype = hardware.get(where[0]), where[1]

    def limiter(rows: int) -> str:
        cost = matmul(rows, d_in, d_out, weight_dtype=dtype, activation_dtype=dtype)
        return roofline.time_bound(cost, chip, dtype).limiter

    try:
        rows = roofline.rows_to_reach_ridge(d_in, d_out, chip, dtype)
    except ValueError:
        assert limiter(10**18) == "memory"
        return
    assume(rows < 10**12)
    assert limiter(rows) == "compute"
    assert rows == 1 or limiter(rows - 1) == "memory"


# --- known numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d_in", "d_out", "at_64", "at_2048", "rows"),
    # R18, run 1: intensity at 64 and 2,048 rows, and the rows that reach the ridge of 295.3
    [
        (4096, 4096, 62.06, 1024, 346),
        (4096, 14336, 62.74, 1247, 326),
        (8192, 28672, 63.36, 1550, 310),
    ],
)
def test_exact_intensities(d_in: int, d_out: int, at_64: float, at_2048: int, rows: int) -> None:
    assert round(matmul(64, d_in, d_out).intensity, 2) == at_64
    assert round(matmul(2048, d_in, d_out).intensity) == at_2048
    chip = Accelerator("989.4 TFLOP/s", {"bf16": 989.4e12}, 80 * 2**30, 3.35e12)
    assert roofline.rows_to_reach_ridge(d_in, d_out, chip, "bf16") == rows


@pytest.mark.parametrize(
    ("tokens", "ratio"),
    # R15, run 1: 2 P S over the true work of a prefill, lm_head on the last row only
    [(128, 1.147), (512, 1.139), (2048, 1.108), (8192, 0.997), (32768, 0.712), (131072, 0.332)],
)
def test_where_two_flop_per_parameter_fails(tokens: int, ratio: float) -> None:
    true_flop = step_cost(LLAMA, [(tokens, 0)]).flop
    assert round(2 * LLAMA.params_total * tokens / true_flop, 3) == ratio


def test_two_flop_per_parameter_with_all_logits() -> None:
    # R15: 6 % with all rows
    flop = step_cost(LLAMA, [(512, 0)], logits="all").flop
    assert round(2 * LLAMA.params_total * 512 / flop, 2) == 1.06


@pytest.mark.parametrize(
    ("context", "limit"),
    # correctness, section 4: the whole decode step as the batch grows, weights and activations
    # amortised away
    [(256, 451), (1024, 115.8), (4096, 32.0), (8192, 18.0), (32768, 7.5)],
)
def test_the_limit_of_decode_as_the_batch_grows(context: int, limit: float) -> None:
    cost = step_cost(LLAMA, [(1, context - 1)])
    queries = cost.by_name()["attention"].written_bytes  # the output has the shape of the queries
    kv_bytes = cost.by_name()["attention"].read_bytes - queries
    assert kv_bytes == context * 131_072
    assert round(cost.flop / kv_bytes, 0 if limit == 451 else 1) == limit
    batch = step_cost(LLAMA, [(1, context - 1)] * 4096).intensity
    assert step_cost(LLAMA, [(1, context - 1)] * 64).intensity < batch < limit


def test_where_attention_overtakes_the_linear_layers_and_the_cache_the_weights() -> None:
    # correctness, section 4: equal work at 28,628 tokens, equal bytes at 114,512; both to the unit
    cost = step_cost(LLAMA, [(1, 28_628 - 1)])
    assert cost.by_name()["attention"].flop == linear_flop(cost)
    assert LLAMA.sequence_bytes(114_512) == 2 * LLAMA.matmul_params


def test_decode_of_one_token_on_an_h100() -> None:
    # correctness, section 4: 4.48 ms for the weights, 0.015 ms for the work, at batch 1
    bound = roofline.time_bound(step_cost(LLAMA, [(1, 0)]), H100, "bf16")
    assert (bound.limiter, round(bound.seconds * 1e3, 2)) == ("memory", 4.48)
    assert round(bound.compute_seconds * 1e3, 3) == 0.015
    assert roofline.attainable(1.0, H100, "bf16") == 3.35e12
    assert roofline.attainable(1e6, H100, "bf16") == 989e12
    assert roofline.attainable(H100.ridge("bf16"), H100, "bf16") == pytest.approx(989e12)


def test_unfused_attention_moves_the_scores_four_times() -> None:
    attention = Attention(num_q_heads=6, num_kv_heads=2, head_dim=4)
    fused = roofline.attention(attention, [(5, 3), (1, 9)])
    unfused = roofline.attention(attention, [(5, 3), (1, 9)], fused=False)
    scores = 2 * 6 * (5 * 8 + 1 * 10)
    assert unfused.read_bytes - fused.read_bytes == 2 * scores
    assert unfused.written_bytes - fused.written_bytes == 2 * scores


def test_numpy_integers_do_not_overflow() -> None:
    big = np.int32(2**20)
    assert matmul(big, big, big).flop == 2 * 2**60
    assert causal_pairs(big, np.int32(0)) == 2**20 * (2**20 + 1) // 2
    assert causal_pairs(big, big, big) == 2**40
    step: list[Any] = [(big, np.int32(7))]
    assert step_cost(LLAMA, step) == step_cost(LLAMA, [(2**20, 7)])
    assert Cost(np.int32(2**30), 0, 0).flop * 4 == 2**32
    assert type(step_cost(LLAMA, step).flop) is int
