"""The pricer against `step_cost`: to the last FLOP and byte, for every kind of layer."""

import json
import math
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servelab.hardware import Accelerator
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
from servelab.roofline import Pricer, step_cost, time_bound

CASES = json.loads(
    (resources.files("servelab") / "data/cases/config_cases.json").read_text(encoding="utf-8")
)
KNOWN = {c["id"]: c["config"] for c in CASES if c["expected"]["total_params"] is not None}
PLAIN = ModelSpec("m", 64, 100, (LayerSpec(Attention(4, 2, 8), Mlp(16), 64),), True, 64)
CHIP = Accelerator("tiny", {"bf16": 40e9, "fp8": 90e9, "int4": 70e9}, 2**30, 1e9)
DTYPES = st.sampled_from(["bf16", "fp8", "int4"])

windows = st.none() | st.integers(1, 24)
indexers = st.none() | st.builds(Indexer, st.integers(1, 3), st.integers(1, 5), st.just(()))
tops = st.none() | st.integers(1, 12)


@st.composite
def attentions(draw):
    kv_heads, window = draw(st.integers(1, 3)), draw(windows)
    return Attention(
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        draw(st.integers(1, 9)),
        window=window,
        chunked=window is not None and draw(st.booleans()),
        v_head_dim=draw(st.none() | st.integers(1, 9)),
        shares_kv=draw(st.booleans()),
        top_tokens=draw(tops),
        indexer=draw(indexers),
        qkv_bias=draw(st.booleans()),
    )


latents = st.builds(
    LatentAttention,
    num_q_heads=st.integers(1, 4),
    kv_lora_rank=st.integers(1, 40),
    qk_nope_head_dim=st.integers(1, 40),
    qk_rope_head_dim=st.integers(0, 4),
    v_head_dim=st.integers(1, 40),
    q_lora_rank=st.none() | st.integers(1, 8),
    top_tokens=tops,
    indexer=indexers,
)
states = st.builds(
    RecurrentState,
    st.just("mamba"),
    st.just((Linear("in_proj", 64, 9),)),
    st.integers(1, 50),
    st.integers(1, 4),
    st.integers(1, 50),
)
mixtures = st.builds(
    lambda experts, k, width, shared: Experts(
        experts, min(k, experts), Mlp(width), shared=Mlp(3) if shared else None
    ),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 30),
    st.booleans(),
)
layers = st.builds(
    LayerSpec,
    st.none() | attentions() | latents,
    st.none() | mixtures | st.builds(Mlp, st.integers(1, 90)),
    st.just(64),
    st.none() | states,
)
specs = st.builds(
    lambda kinds, tied: ModelSpec("m", 64, 100, tuple(kinds), tied, 64),
    st.lists(layers, min_size=1, max_size=4),
    st.booleans(),
)
pairs = st.tuples(st.integers(1, 40) | st.just(1), st.integers(0, 60))
steps = st.lists(pairs | st.tuples(st.just(1), st.integers(0, 5000)), min_size=1, max_size=8)


def same(pricer, step, cost):
    price = pricer.price(step)
    assert (price.flop, price.read_bytes, price.written_bytes) == (
        cost.flop,
        cost.read_bytes,
        cost.written_bytes,
    )
    bound = time_bound(cost, pricer.chip, pricer.dtype)
    assert math.isclose(price.seconds, bound.serial_seconds, rel_tol=1e-12)


@settings(max_examples=200)
@given(specs, st.lists(steps, min_size=1, max_size=3), DTYPES, DTYPES, DTYPES)
def test_equals_step_cost(spec, several, dtype, kv_dtype, weight_dtype):
    pricer = Pricer(spec, CHIP, dtype, kv_dtype, weight_dtype)
    for step in several * 2:  # the second time from what it remembers
        same(pricer, step, step_cost(spec, step, "last", weight_dtype, kv_dtype, dtype))


@pytest.mark.parametrize("name", KNOWN)
def test_equals_step_cost_for_published_models(name):
    try:
        spec = ModelSpec.from_config(KNOWN[name])
        pricer = Pricer(spec, CHIP)
    except UnsupportedConfig:
        pytest.skip("no cost: the configuration leaves something out")
    for step in ([(1, 100), (1, 9000), (1, 0)], [(700, 5000), (1, 5000), (3, 1)]):
        same(pricer, step, step_cost(spec, step))


@given(steps, st.data())
def test_rows_of_logits(step, data):
    counts = [data.draw(st.integers(0, min(new, 3))) for new, _ in step]
    price, cost = Pricer(PLAIN, CHIP).price(step, sum(counts)), step_cost(PLAIN, step, counts)
    assert (price.flop, price.read_bytes) == (cost.flop, cost.read_bytes)


def test_refuses_as_step_cost():
    pricer = Pricer(PLAIN, CHIP)
    for bad in ([], [(0, 3)], [(1, -1)], [(1, 2, 3)], [1]):
        with pytest.raises((TypeError, ValueError)):
            pricer.price(bad)
    with pytest.raises(ValueError, match="logit_rows"):
        pricer.price([(1, 2)], -1)
    with pytest.raises(ValueError, match="no peak rate for 'fp16'"):
        Pricer(pricer.spec, CHIP, "fp16")
