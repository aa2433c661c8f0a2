"""The dense decoder: against transformers, against itself with a cache, and where it must refuse.

Tolerances are those of DESIGN's correctness section: transformers computes norms and rotary angles
in float32 whatever the model's dtype (its written-out softmax too), so against it as published
1e-5, and 1e-9 only where it is widened.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servelab import models
from servelab.decoder import DenseCache, DenseDecoder, greedy
from servelab.models import ModelSpec
from tests.tiny import CONFIGS, pair, random_tokens, widen

TOKENS = 14  # behind a window of 5


@pytest.fixture(scope="module")
def decoders() -> dict[str, DenseDecoder]:
    return {name: pair(name)[1] for name in CONFIGS}


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# --- against transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    tokens = random_tokens(2, TOKENS)
    for dtype in (torch.float32, torch.float64):
        reference, ours = pair(name, dtype)
        expected = reference(tokens).logits
        assert expected.std() > 0.1, "logits near 0 would agree with anything"
        close(ours(tokens), expected, 1e-5)
    close(ours(tokens), widen(reference, CONFIGS[name]["rope_theta"])(tokens).logits, 1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers(name: str) -> None:
    reference, ours = pair(name)
    prompt = random_tokens(1, 6, seed=3)
    ours_tokens = greedy(ours, prompt, 12)[0].tolist()
    sequence, compared = prompt, 0
    for token in ours_tokens:
        first, second = reference(sequence).logits[0, -1].topk(2).values.tolist()
        if first - second < 1e-4:  # a tie: either token is right, and what follows may differ
            break
        best = int(reference(sequence).logits[0, -1].argmax())
        assert token == best, f"token {compared}"
        sequence = torch.cat((sequence, torch.tensor([[best]])), dim=1)
        compared += 1
    assert compared >= 8, "the guard stopped the test before it said anything"


# --- against itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=12)
@given(cuts=st.sets(st.integers(1, TOKENS - 1)), batch=st.integers(1, 3))
def test_any_split_into_chunks_gives_the_uncached_logits(
    decoders: dict[str, DenseDecoder], name: str, cuts: set[int], batch: int
) -> None:
    model, tokens = decoders[name], random_tokens(batch, TOKENS, seed=batch)
    cache = DenseCache(model.spec, batch, TOKENS, dtype=torch.float64)
    for stored in cache.keys + cache.values:
        stored.fill_(torch.nan)  # a slot that nobody wrote must never be read
    chunks = tokens.tensor_split(sorted(cuts), dim=1)
    close(torch.cat([model(c, cache) for c in chunks], dim=1), model(tokens), 1e-9)
    assert cache.length == TOKENS


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_of_a_batch_is_the_sequence_alone(
    decoders: dict[str, DenseDecoder], name: str
) -> None:
    model, tokens = decoders[name], random_tokens(3, TOKENS)
    alone = torch.cat([model(row[None]) for row in tokens])
    close(model(tokens), alone, 1e-9)
    close(model(tokens, last_only=True), alone[:, -1:], 1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_with_and_without_cache(decoders: dict[str, DenseDecoder], name: str) -> None:
    model, prompt = decoders[name], random_tokens(2, 5, seed=1)
    cached = greedy(model, prompt, 10)
    assert torch.equal(cached, greedy(model, prompt, 10, cached=False))
    assert len(set(cached.flatten().tolist())) > 3, "a constant answer proves nothing"
    # what was chosen is the most likely token at each place, by a clear margin
    logits = model(torch.cat((prompt, cached), dim=1))[:, 4:-1]
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    assert (best - second).min() > 1e-6
    assert torch.equal(logits.argmax(-1), cached)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 10, 11])
def test_a_token_reaches_exactly_the_queries_whose_window_holds_it(window: int | None) -> None:
    config = CONFIGS["mistral-window"] | {"num_hidden_layers": 1, "sliding_window": window}
    model = DenseDecoder(ModelSpec.from_config(config), init_std=0.3, dtype=torch.float64)
    tokens = random_tokens(1, 10)
    before = model(tokens)[0]
    for changed in range(10):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 97
        moved = (model(other)[0] - before).abs().amax(-1) > 1e-9
        reached = [changed <= q and (window is None or q - changed < window) for q in range(10)]
        assert moved.tolist() == reached


def test_a_window_no_legal_sequence_fills_is_no_window() -> None:
    short = CONFIGS["mistral-window"] | {"max_position_embeddings": 5}
    assert set(DenseDecoder(ModelSpec.from_config(short)).windows) == {None}


def test_a_cache_that_is_rolled_back_forgets(decoders: dict[str, DenseDecoder]) -> None:
    model, tokens = decoders["llama-gqa"], random_tokens(1, TOKENS)
    cache = DenseCache(model.spec, 1, TOKENS, dtype=torch.float64)
    model(random_tokens(1, TOKENS, seed=9), cache)
    cache.length = 0
    close(model(tokens[:, :6], cache), model(tokens[:, :6]), 1e-9)
    cache.length = 3
    close(model(tokens[:, 3:], cache), model(tokens)[:, 3:], 1e-9)


def test_the_same_seed_gives_the_same_weights_in_every_dtype() -> None:
    spec = ModelSpec.from_config(CONFIGS["llama-gqa"])
    one, same, other = DenseDecoder(spec), DenseDecoder(spec), DenseDecoder(spec, seed=1)
    wide = DenseDecoder(spec, dtype=torch.float64)
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert torch.equal(one.lm_head.weight.double(), wide.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert not any(p.requires_grad for p in one.parameters())


def test_tied_embeddings_are_one_tensor() -> None:
    tied = DenseDecoder(ModelSpec.from_config(CONFIGS["llama-mha-tied"]))
    assert tied.lm_head.weight is tied.embed_tokens.weight


# --- refusals -----------------------------------------------------------------------------------


def test_a_full_cache_refuses_more(decoders: dict[str, DenseDecoder]) -> None:
    model = decoders["llama-gqa"]
    cache = DenseCache(model.spec, 1, 4, dtype=torch.float64)
    model(random_tokens(1, 3), cache)
    with pytest.raises(ValueError, match="room for 4 tokens: it holds 3, and 2 more do not fit"):
        model(random_tokens(1, 2), cache)
    model(random_tokens(1, 1), cache)  # the refusal left it as it was
    with pytest.raises(ValueError, match="it holds 4, and 1 more"):
        model(random_tokens(1, 1), cache)


def test_a_foreign_cache_is_refused(decoders: dict[str, DenseDecoder]) -> None:
    model = decoders["llama-gqa"]
    other = decoders["qwen3"].spec
    for cache in (
        DenseCache(model.spec, 2, 8, dtype=torch.float64),  # another batch
        DenseCache(model.spec, 1, 8, dtype=torch.float32),  # another dtype
        DenseCache(other, 1, 8, dtype=torch.float64),  # another model
    ):
        with pytest.raises(ValueError, match="the cache is for"):
            model(random_tokens(1, 1), cache)
        assert cache.length == 0


@pytest.mark.parametrize("token", [-1, 97, 10**6])
def test_a_token_outside_the_vocabulary_is_named(
    decoders: dict[str, DenseDecoder], token: int
) -> None:
    tokens = torch.tensor([[0, 96, token, 1]])
    for call in (decoders["llama-gqa"], lambda t: greedy(decoders["llama-gqa"], t, 1)):
        with pytest.raises(ValueError, match=f"id {token} is not in the vocabulary, 0 to 96"):
            call(tokens)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([[1, 2]], TypeError),
        (None, TypeError),
        (torch.tensor([[1.0]]), TypeError),
        (torch.tensor([[True]]), TypeError),
        (torch.tensor([1, 2]), ValueError),
        (torch.tensor([[[1]]]), ValueError),
        (torch.empty((1, 0), dtype=torch.long), ValueError),
        (torch.empty((0, 3), dtype=torch.long), ValueError),
    ],
)
def test_what_is_no_batch_of_tokens_is_refused(
    decoders: dict[str, DenseDecoder], tokens: object, error: type[Exception]
) -> None:
    for call in (decoders["qwen3"], lambda t: greedy(decoders["qwen3"], t, 1)):
        with pytest.raises(error, match="tokens must"):
            call(tokens)


def test_a_shape_that_is_not_of_the_llama_type_is_refused() -> None:
    with pytest.raises(ValueError, match="opt-13b has learned positions"):
        DenseDecoder(models.get("opt-13b"), device="meta")
    spec = ModelSpec.from_config(CONFIGS["llama-gqa"])
    layer = spec.layers[0]
    for wrong in (
        replace(layer, mlp=replace(layer.mlp, gated=False)),
        replace(layer, norm_params=2 * layer.norm_params),
    ):
        with pytest.raises(ValueError, match="not of the Llama type"):
            DenseDecoder(replace(spec, layers=(wrong,)))
    odd = replace(layer, attention=replace(layer.attention, head_dim=7))
    wide = replace(layer, attention=replace(layer.attention, head_dim=16))
    for layers, named in (((odd,), r"\[7\]"), ((layer, wide), r"\[8, 16\]")):
        with pytest.raises(ValueError, match=f"one even number, got {named}"):
            DenseDecoder(replace(spec, layers=layers))


def test_a_decoder_can_be_copied(decoders: dict[str, DenseDecoder]) -> None:
    model, tokens = decoders["llama-gqa"], random_tokens(1, TOKENS)
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))
    assert pickle.loads(pickle.dumps(model.spec)) == model.spec
