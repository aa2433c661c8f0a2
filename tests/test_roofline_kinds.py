"""The price of every kind of layer: counted one query, one token, one draw of experts at a time."""

import itertools
import json
import math
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servelab.models import (
    Attention,
    Experts,
    Indexer,
    LatentAttention,
    LayerSpec,
    Linear,
    Mlp,
    ModelSpec,
    RecurrentState,
    UnsupportedConfig,
)
from servelab.roofline import causal_pairs, keys_read, step_cost
from servelab.roofline.operators import attention, experts, latent_attention

CASES = json.loads(
    (resources.files("servelab") / "data/cases/config_cases.json").read_text(encoding="utf-8")
)
KNOWN = {c["id"]: c["config"] for c in CASES if c["expected"]["total_params"] is not None}
STEPS = [[(1, 100)], [(1, 700), (1, 3)], [(64, 0)], [(5, 40), (1, 9000), (33, 0)]]


def model(layer, context=None):
    return ModelSpec("m", 64, 100, (layer,), tied_embeddings=True, final_norm_params=64,
                     max_context_tokens=context)  # fmt: skip


def seen_keys(position, window, chunked):
    """Return the positions that a query sees, itself among them."""
    first = 0
    if window is not None:
        first = position // window * window if chunked else max(0, position - window + 1)
    return range(first, position + 1)


@given(st.integers(1, 30), st.integers(0, 40), st.none() | st.integers(1, 20), st.booleans())
def test_pairs_and_keys_by_enumeration(new, cached, window, chunked):
    chunked = chunked and window is not None
    views = [seen_keys(p, window, chunked) for p in range(cached, cached + new)]
    assert causal_pairs(new, cached, window, chunked) == sum(map(len, views))
    assert keys_read(new, cached, window, chunked) == len(set(itertools.chain(*views)))


@pytest.mark.parametrize(("num_experts", "k", "rows"), [(4, 1, 3), (4, 2, 2), (3, 3, 2), (5, 2, 3)])
def test_expected_distinct_experts_by_enumeration(num_experts, k, rows):
    draws = list(itertools.product(itertools.combinations(range(num_experts), k), repeat=rows))
    mean = sum(len(set(itertools.chain(*draw))) for draw in draws) / len(draws)
    found = Experts(num_experts, k, Mlp(8)).expected_distinct(rows)
    assert math.isclose(found, mean, rel_tol=1e-12)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 10_000))
def test_experts_read_are_bounded_and_grow(num_experts, k, rows):
    k = min(k, num_experts)
    mixture = Experts(num_experts, k, Mlp(16))
    touched = mixture.expected_distinct(rows)
    assert k * (1 - 1e-9) <= touched <= min(num_experts, rows * k) * (1 + 1e-9)
    assert mixture.expected_distinct(rows + 1) >= touched
    whole = num_experts * mixture.params_per_expert(32)
    read = [cost.read_bytes - 2 * rows * k * (32 if "gate_up" in name else 16)
            for name, cost in experts(mixture, rows, 32)]  # fmt: skip
    assert sum(read) <= 2 * whole + 2
    assert all(type(bytes_read) is int for bytes_read in read)


def test_a_small_batch_reads_few_experts_and_always_router_and_shared():
    mixture = Experts(64, 2, Mlp(32), shared=Mlp(48), shared_gate=True)
    spec = model(LayerSpec(Attention(4, 2, 16), mixture, 128))
    one = step_cost(spec, [(1, 0)]).by_name()
    assert one["experts_gate_up_proj"].read_bytes == 2 * (2 * 64 + 2 * 64 * 2 * 32)
    assert one["experts_gate_up_proj"].flop == 2 * 2 * 64 * 2 * 32
    assert one["router"].read_bytes == 2 * (64 + 64 * 64)
    assert one["shared_gate_up_proj"].flop == 2 * 64 * 96
    assert one["shared_gate"].flop == 2 * 64
    many = step_cost(spec, [(1, 0)] * 5000).by_name()
    assert many["experts_down_proj"].read_bytes == 2 * (10_000 * 32 + 64 * 32 * 64)


@pytest.mark.parametrize("name", sorted(KNOWN))
@pytest.mark.parametrize("step", STEPS)
def test_matrices_cost_two_flop_per_weight_and_row(name, step):
    spec = ModelSpec.from_config(KNOWN[name])
    cost = step_cost(spec, step, logits="all")
    rows = sum(new for new, _ in step)
    rest = sum(
        cost.by_name()[part].flop
        for part in ("attention", "recurrence", "index")
        if part in cost.by_name()
    )
    assert cost.flop - rest == 2 * rows * spec.matmul_params
    appended = cost.by_name()["kv_append"].written_bytes
    assert appended == rows * spec.kv_bytes_per_token(view="reserved")
    assert all(type(n) is int for n in (cost.flop, cost.read_bytes, cost.written_bytes))


# --- latents --------------------------------------------------------------------------------------

MLA = LatentAttention(8, 32, 16, 8, 12, q_lora_rank=24)


def test_decoding_absorbs_and_a_long_prefill_expands():
    decode = latent_attention(MLA, [(1, 999)])
    assert decode.flop == 1000 * 2 * 8 * (32 + 8 + 32)
    assert decode.read_bytes == 2 * (8 * (16 + 8) + 1000 * (32 + 8))
    assert decode.written_bytes == 2 * 8 * 12
    prefill = latent_attention(MLA, [(1000, 0)])
    assert prefill.flop == 500_500 * 2 * 8 * (16 + 8 + 12)
    both = latent_attention(MLA, [(1, 999), (1000, 0)])
    assert both.flop == decode.flop + prefill.flop
    assert both.read_bytes == decode.read_bytes + prefill.read_bytes


@given(st.integers(1, 50), st.integers(0, 300))
def test_latent_attention_takes_the_cheaper_way(new, cached):
    pairs = causal_pairs(new, cached)
    expand = 2 * 32 * 8 * (16 + 12) * cached
    ways = pairs * MLA.absorbed_flop_per_pair, pairs * MLA.expanded_flop_per_pair + expand
    assert latent_attention(MLA, [(new, cached)]).flop == min(ways)


# --- windows, chunks, sparse and shared caches --------------------------------------------------


def test_layers_that_share_a_cache_read_it_and_append_nothing():
    own, shared = (LayerSpec(Attention(4, 2, 16, shares_kv=s), Mlp(32), 128) for s in (False, True))
    cost, less = (step_cost(model(x), [(1, 499)]).by_name() for x in (own, shared))
    assert less["attention"] == cost["attention"]
    assert "kv_append" in cost
    assert "kv_append" not in less
    assert less["q_proj"].flop == cost["qkv_proj"].flop - 2 * 64 * 2 * 2 * 16


def test_windows_and_chunks_bound_what_is_read():
    sliding, chunked = (
        model(LayerSpec(Attention(4, 2, 16, window=128, chunked=c), Mlp(32), 128), 10_000)
        for c in (False, True)
    )
    read = [step_cost(s, [(1, 1027)]).by_name()["attention"].read_bytes for s in (sliding, chunked)]
    assert read == [2 * 64 * (1 + 128), 2 * 64 * (1 + 4)]  # position 1027 is fourth of its chunk
    unfilled = model(LayerSpec(Attention(4, 2, 16, window=128, chunked=True), Mlp(32), 128), 128)
    assert step_cost(unfilled, [(1, 99)]).by_name()["attention"].read_bytes == 2 * 64 * 101


def test_sparse_attention_reads_its_choice_and_scores_every_key():
    indexer = Indexer(2, 8, (Linear("index_k_proj", 64, 8),), extra_params=16)
    spec = model(LayerSpec(Attention(4, 2, 16, top_tokens=50, indexer=indexer), Mlp(32), 128))
    parts = step_cost(spec, [(1, 999)]).by_name()
    assert parts["attention"].read_bytes == 2 * (64 + 50 * 64)
    assert parts["attention"].flop == 50 * 4 * 4 * 16
    assert parts["index"].flop == 1000 * 2 * 2 * 8
    assert parts["index"].read_bytes == 2 * (2 * 8 + 1000 * 8)
    assert parts["kv_append"].written_bytes == 2 * (64 + 8)
    dense = attention(Attention(4, 2, 16), [(20, 10)])
    assert attention(Attention(4, 2, 16, top_tokens=50), [(20, 10)]) == dense


# --- recurrent state ------------------------------------------------------------------------------


def test_state_is_read_and_written_once_per_sequence():
    state = RecurrentState(
        "mamba", (Linear("in_proj", 64, 256), Linear("out_proj", 128, 64)), 128, 4, 128 * 16,
        matrix_dtype="fp32",
    )  # fmt: skip
    held = 2 * 128 * 3 + 4 * 128 * 16
    assert state.state_bytes == held
    parts = step_cost(model(LayerSpec(None, None, 64, state)), [(1, 900), (30, 5)]).by_name()
    per_token = 2 * 128 * 4 + 5 * 128 * 16
    assert parts["recurrence"].read_bytes == parts["recurrence"].written_bytes == 2 * held
    assert parts["recurrence"].flop == 31 * per_token
    assert parts["in_proj"].flop == 2 * 31 * 64 * 256
    assert {"attention", "kv_append"}.isdisjoint(parts)


def test_unknown_weights_have_no_price():
    openelm = next(c["config"] for c in CASES if "OpenELM" in c["id"])
    with pytest.raises(UnsupportedConfig, match="normalize_qk_projections"):
        step_cost(ModelSpec.from_config(openelm), [(1, 10)], logits=[0])


def test_matrices_beside_the_parts_are_priced():
    extra = (Linear("per_layer_input_gate", 64, 16), Linear("per_layer_projection", 16, 64))
    spec = model(LayerSpec(None, None, 64, extra=extra))
    parts = step_cost(spec, [(3, 0)], logits=[0]).by_name()
    assert parts["per_layer_input_gate"].flop == 2 * 3 * 64 * 16
    assert parts["per_layer_projection"].flop == 2 * 3 * 16 * 64
    assert spec.matmul_params == 2 * 16 * 64 + 64 * 100


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(KNOWN)),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20_000)), min_size=1, max_size=4),
)
def test_a_longer_step_never_costs_less(name, step):
    spec = ModelSpec.from_config(KNOWN[name])
    cost = step_cost(spec, step)
    more = step_cost(spec, [*step, (1, 7)])
    assert more.flop > cost.flop
    assert more.read_bytes > cost.read_bytes
    assert more.written_bytes > cost.written_bytes
