"""Each engine's counting: against logs of hybrids, by hand, and against counts by brute force."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelab import hardware, memory, models
from servelab.memory.vllm import Page
from servelab.models import (
    Attention,
    Indexer,
    LatentAttention,
    LayerSpec,
    Mlp,
    ModelSpec,
    RecurrentState,
)
from servelab.units import GiB

_TEXT = (resources.files("servelab") / "data/cases/config_cases.json").read_text(encoding="utf-8")
CONFIGS = {case["id"]: case["config"] for case in json.loads(_TEXT)}
LLAMA = models.get("llama-3-8b")
MISTRAL = models.get("mistral-7b")
H100 = hardware.get("h100-sxm-80gb")
FULL = LayerSpec(Attention(4, 2, 8), None, 0)  # 64 bytes per token
WINDOWED = LayerSpec(Attention(4, 2, 8, window=100), None, 0)
CHUNKED = LayerSpec(Attention(4, 2, 8, window=64, chunked=True), None, 0)
WIDE = LayerSpec(Attention(4, 2, 16, window=100), None, 0)  # 128 bytes per token
STATE = LayerSpec(None, None, 0, state=RecurrentState("mamba", (), 8, 4, 1000))


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("mixed", 8, 10, layers, False, 8)


def published(name: str) -> ModelSpec:
    return ModelSpec.from_config(CONFIGS[name], name)


def vllm(spec: ModelSpec, available_bytes: int, length: int, **told: Any) -> memory.Capacity:
    return memory.capacity(spec, available_bytes, length, engine="vllm", **told)


# --- hybrids, from logs -----------------------------------------------------------------------


def test_a_state_raises_the_tokens_of_a_block() -> None:
    """vllm#40691: Qwen3.5-27B printed 290,864 tokens and 33.04x of 32,768.

    The block of 784 tokens, and 0.13 % of padding, are in the start-up lines of the same model.
    """
    spec = published("Qwen/Qwen3.5-27B")
    empty = vllm(spec, 0, 32768)
    assert empty.block_size == 784
    state = spec.state_bytes_per_sequence // 48
    assert f"{784 * 4096 / state - 1:.2%}" == "0.13%"
    assert empty.blocks_per_sequence == 45  # 42 of attention and one for each of three groups
    pools = [vllm(spec, n * empty.bytes_per_block, 32768) for n in range(1450, 1550)]
    printed = [
        p.blocks for p in pools if p.tokens == 290864 and f"{p.max_concurrency:.2f}" == "33.04"
    ]
    assert printed == [1487]


@pytest.mark.parametrize(("tp", "block_size"), [(1, 4192), (2, 4192), (4, 2112)])
def test_the_block_depends_on_the_ranks(tp: int, block_size: int) -> None:
    """vllm#41037: Nemotron-3-Nano with an fp8 cache and ``--block-size 32``."""
    spec = published("nvidia/Nemotron-3-Nano-30B-A3B")
    assert vllm(spec, 0, 8192, block_size=32, kv_dtype="fp8", tp=tp).block_size == block_size


def test_windows_are_split_into_groups() -> None:
    """kvcached#215: gemma-3-4b-it printed 317,136 tokens, 102.78x of 3,072, a padding layer."""
    full, window = (LayerSpec(Attention(8, 4, 256, window=w), None, 0) for w in (None, 1024))
    spec = model(*((window,) * 5 + (full,)) * 5, *(window,) * 4)  # 29 windows, 5 full
    empty = vllm(spec, 0, 3072, max_num_batched_tokens=2048)
    assert empty.blocks_per_sequence == 192 + 6 * 193
    assert empty.bytes_per_block == 5 * 16 * 4096
    pools = [
        vllm(spec, n * empty.bytes_per_block, 3072, max_num_batched_tokens=2048)
        for n in range(138_700, 138_800)
    ]
    printed = {p.tokens for p in pools if f"{p.max_concurrency:.2f}" == "102.78"}
    assert 317_136 in printed


# --- vLLM by hand -----------------------------------------------------------------------------


def test_the_null_block_is_no_sequence_s() -> None:
    room = LLAMA.sequence_bytes(8192)
    just = vllm(LLAMA, room, 8192)
    assert (just.blocks, just.max_concurrency, just.sequences) == (512, 1.0, 0)
    assert vllm(LLAMA, room + just.bytes_per_block, 8192).sequences == 1
    assert memory.capacity(LLAMA, room, 8192).sequences == 1  # without an engine: to the byte


@pytest.mark.parametrize(
    ("layers", "block_bytes", "needed"),
    [
        # one kind: one group with a page for each layer
        ((FULL,) * 6, 6 * 1024, 20),
        ((WINDOWED,) * 6, 6 * 1024, 9 + 1),  # 99 + 32 batched tokens: 131 in nine blocks
        ((CHUNKED,) * 6, 6 * 1024, 6),
        # widths that differ, but all keep every token: still one group
        ((FULL, LayerSpec(Attention(4, 4, 8), None, 0)), 1024 + 2048, 20),
        # two kinds: as many groups as the smallest kind goes into the others
        ((FULL, *(WINDOWED,) * 3), 1024, 20 + 3 * 10),
        ((FULL, FULL, *(WINDOWED,) * 4), 2 * 1024, 20 + 2 * 10),
        # 3 < 1.5 x 2.5: padding is cheaper than another group
        ((*(FULL,) * 3, *(WINDOWED,) * 4), 4 * 1024, 20 + 10),
        ((*(FULL,) * 2, *(WINDOWED,) * 3), 2 * 1024, 20 + 2 * 10),  # 3 is not below 1.5 x 2
        # pages made equal: the narrow layers take 32 tokens to a page
        ((FULL, WIDE), 2048, 10 + 10),
    ],
)
def test_groups(layers: tuple[LayerSpec, ...], block_bytes: int, needed: int) -> None:
    pool = vllm(model(*layers), 10**6, 320, max_num_batched_tokens=32)
    assert (pool.bytes_per_block, pool.blocks_per_sequence) == (block_bytes, needed)
    assert pool.blocks == 10**6 // block_bytes


def test_pages_that_do_not_divide_are_refused() -> None:
    odd = LayerSpec(Attention(3, 3, 8, window=100), None, 0)
    with pytest.raises(ValueError, match="cannot make pages of 1,024 and 1,536 bytes equal"):
        vllm(model(FULL, odd), 10**6, 320)


def test_state_alone_and_state_with_attention() -> None:
    alone = vllm(model(STATE, STATE), 10**6, 500)
    assert alone.bytes_per_block == 2 * STATE.state_bytes == 2 * 2048
    assert (alone.blocks_per_sequence, alone.block_size) == (1, 500)
    mixed = vllm(model(FULL, STATE), 10**6, 500)
    assert mixed.block_size == 32  # 32 tokens of 64 bytes cover a state of 2,048
    assert mixed.blocks_per_sequence == 16 + 1


def test_both_in_one_layer() -> None:
    both = replace(FULL, state=STATE.state)
    assert vllm(model(both), 10**6, 500) == vllm(model(FULL, STATE), 10**6, 500)


def test_index_keys_are_a_cache_of_their_own() -> None:
    sparse = LayerSpec(
        LatentAttention(128, 512, 128, 64, 128, indexer=Indexer(64, 128, ())), None, 0
    )
    pool = vllm(model(*(sparse,) * 61), GiB, 8192, block_size=64, kv_dtype="fp8_ds_mla")
    assert pool.bytes_per_block == 61 * 64 * (656 + 132)
    assert vllm(model(sparse), GiB, 8192, block_size=64).bytes_per_block == 64 * (1152 + 132)


def test_nothing_cached_is_said() -> None:
    for engine in memory.ENGINES:
        with pytest.raises(ValueError, match="caches nothing"):
            memory.capacity(model(LayerSpec(None, Mlp(8), 0)), GiB, 100, engine=engine)


@given(
    window=st.integers(1, 40),
    batched=st.integers(1, 40),
    length=st.integers(1, 90),
    block_size=st.integers(1, 9),
    kind=st.sampled_from(["window", "chunk"]),
)
def test_pages_cover_every_step(
    window: int, batched: int, length: int, block_size: int, kind: Any
) -> None:
    """Prefill by steps of every size: the blocks that hold what is still seen never exceed ours."""
    window *= block_size if kind == "chunk" else 1  # chunks of a fraction of a block do not occur
    told = memory.Settings(length, block_size, max_num_batched_tokens=batched)
    pages = Page(kind, window, block_size, 1).pages(told)
    most = 0
    for done in range(length):
        for new in range(1, min(batched, length - done) + 1):
            first = done - window + 1 if kind == "window" else done // window * window
            most = max(most, (done + new - 1) // block_size - max(first, 0) // block_size + 1)
    assert most <= pages
    if kind == "window":
        assert pages <= most + 1 + (block_size > 1)  # and no more than rounding above it


# --- ranks, stages, shared contexts -----------------------------------------------------------


def test_the_smallest_rank_of_the_worst_stage_decides() -> None:
    rooms = [9, 7, 8, 4]  # GiB of tp 2 x pp 2
    sizes = tuple(room * GiB for room in rooms)
    for engine in ("exact", "vllm", "sglang", "tensorrt-llm"):
        both = memory.capacity(LLAMA, sizes, 8192, 16, engine=engine, tp=2, pp=2)
        assert both == memory.capacity(LLAMA, 4 * GiB, 8192, 16, engine=engine, tp=2, pp=2)
        assert both.bytes_per_block == 16 * 65536 // 2
    with pytest.raises(ValueError, match="one count or 4, got 2"):
        memory.capacity(LLAMA, sizes[:2], 8192, tp=2, pp=2)


def test_a_stage_with_more_layers_fits_less() -> None:
    even = vllm(LLAMA, GiB, 8192, pp=2)
    uneven = vllm(LLAMA, GiB, 8192, pp=2, layers_per_stage=(8, 24))
    assert (even.blocks, uneven.blocks) == (GiB // 2**20, GiB // (24 * 2**16))


def test_contexts_shared_over_ranks() -> None:
    spec = model(*(LayerSpec(LatentAttention(16, 512, 64, 64, 64), None, 0),) * 4)
    alone = vllm(spec, GiB, 8192, tp=8)
    shared = vllm(spec, GiB, 8192, tp=8, dcp=4)
    assert (shared.blocks, shared.tokens) == (alone.blocks, 4 * alone.tokens)
    assert shared.max_concurrency == 4 * alone.max_concurrency
    assert vllm(spec, GiB, 8193, tp=8, dcp=4).blocks_per_sequence == 129
    with pytest.raises(ValueError, match="8 heads over 16 ranks allow 2, got 4"):
        vllm(models.get("llama-3-70b"), GiB, 8192, tp=16, dcp=4)
    with pytest.raises(ValueError, match="does not share a window's tokens"):
        vllm(model(LayerSpec(Attention(8, 1, 8, window=9), None, 0)), GiB, 99, tp=8, dcp=4)
    with pytest.raises(ValueError, match="dcp must divide tp, got 3 and 8"):
        vllm(spec, GiB, 8192, tp=8, dcp=3)
    with pytest.raises(ValueError, match="dcp is known of vllm only"):
        memory.capacity(spec, GiB, 8192, engine="sglang", tp=8, dcp=4)


# --- the others -------------------------------------------------------------------------------


def test_each_engine_rounds_its_own_way() -> None:
    room = 1000 * 131072 + 5  # a thousand tokens and a few bytes
    counted = {
        engine: memory.capacity(LLAMA, room, 100, 16, engine=engine).tokens
        for engine in memory.ENGINES
    }
    assert counted == {
        "exact": 992,
        "vllm": 992,  # floor to blocks
        "sglang": 992,
        "tensorrt-llm": 1008,  # blocks that hold them all
        "llama.cpp": 3 * 256,  # contexts of padded cells
    }


def test_blocks_are_the_engine_s_own_where_none_are_given() -> None:
    room = 1000 * 131072 + 5
    counted = {e: memory.capacity(LLAMA, room, 100, engine=e).tokens for e in memory.ENGINES}
    assert counted == {
        "exact": 992,
        "vllm": 992,
        "sglang": 1000,  # every token
        "tensorrt-llm": 1024,  # blocks of 32
        "llama.cpp": 768,
    }


def test_llama_cpp_sets_contexts_aside() -> None:
    one = memory.capacity(MISTRAL, 0, 32768, engine="llama.cpp")
    assert one.needed_bytes == (4096 + 512) * 131072
    short = memory.capacity(MISTRAL, 0, 1000, engine="llama.cpp")
    assert short.needed_bytes == 1024 * 131072
    odd = memory.capacity(MISTRAL, 0, 32768, engine="llama.cpp", max_num_batched_tokens=300)
    assert odd.needed_bytes == (4096 + 512) * 131072
    hybrid = memory.capacity(model(FULL, STATE), 0, 256, engine="llama.cpp")
    assert hybrid.needed_bytes == 256 * 64 + 2 * STATE.state_bytes  # fp32, not bf16
    with pytest.raises(ValueError, match="cuts a model by layers"):
        memory.capacity(LLAMA, GiB, 8192, engine="llama.cpp", tp=2)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_a_division_that_is_not_known_is_refused(engine: str) -> None:
    with pytest.raises(ValueError, match="a ratio of its own"):
        memory.capacity(model(FULL, STATE), GiB, 8192, engine=engine)


def test_the_exact_count_covers_state_with_blocks() -> None:
    spec = model(FULL, STATE)
    fits = memory.capacity(spec, 100_000, 320)
    assert fits.needed_bytes == 320 * 64 + 2048  # 2,048 bytes of state are two blocks exactly
    assert fits.sequences == 100_000 // fits.needed_bytes


def test_an_unknown_engine_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown engine 'tgi'; known: exact, vllm, sglang"):
        memory.capacity(LLAMA, GiB, 8192, engine="tgi")


def test_views_stand_side_by_side() -> None:
    fits = vllm(MISTRAL, 16 * GiB, 32768, tp=2)
    assert fits.logical_sequence_bytes == 4096 * 65536
    assert fits.reserved_sequence_bytes == 32768 * 65536
    assert fits.logical_sequence_bytes < fits.needed_bytes < fits.reserved_sequence_bytes


# --- laws -------------------------------------------------------------------------------------

LAYERS = st.sampled_from([FULL, WINDOWED, CHUNKED, STATE])
SPECS = st.lists(LAYERS, min_size=1, max_size=7).map(lambda layers: model(*layers))


@given(SPECS, st.integers(0, 10**6), st.integers(1, 500), st.sampled_from(memory.ENGINES))
def test_more_memory_or_shorter_contexts_never_fit_less(
    spec: ModelSpec, room: int, length: int, engine: str
) -> None:
    def count(room: int, length: int) -> memory.Capacity:
        return memory.capacity(spec, room, length, engine=engine, max_num_batched_tokens=32)

    if STATE in spec.layers and engine in ("sglang", "tensorrt-llm"):
        with pytest.raises(ValueError, match="a ratio of its own"):
            count(room, length)
        return
    fits = count(room, length)
    assert count(room + 1000, length).sequences >= fits.sequences
    assert count(room, length + 1).sequences <= fits.sequences
    assert fits.blocks * fits.bytes_per_block <= room or engine == "tensorrt-llm"
    assert fits.sequences <= fits.max_concurrency
    logical = memory.max_sequences(spec, room, length)
    assert fits.sequences <= logical + (engine == "tensorrt-llm")  # it alone rounds up


# --- budget -----------------------------------------------------------------------------------


def test_every_term_of_a_budget_counts_once() -> None:
    terms = {
        "reserve_bytes": 1,
        "non_torch_bytes": 20,
        "activation_bytes": 300,
        "graph_bytes": 4000,
        "margin_bytes": 50_000,
    }
    bare, full = memory.budget(LLAMA, H100), memory.budget(LLAMA, H100, **terms)
    assert bare.available_bytes - full.available_bytes == 54_321
    for name, size in terms.items():
        assert f"{size / 1e9:,.2f}" in full.table()
        assert getattr(full, name) == size


def test_a_share_of_free_memory_has_its_weights_behind_it() -> None:
    share = memory.budget(LLAMA, H100, 0.9, free_bytes=50 * GiB)
    assert share.available_bytes == int(50 * GiB * 0.9)


def test_weights_are_shared_by_ranks_and_stages() -> None:
    whole = memory.budget(LLAMA, H100).weight_bytes
    assert memory.budget(LLAMA, H100, tp=8).weight_bytes == pytest.approx(whole / 8, rel=1e-3)
    halves = [memory.budget(LLAMA, H100, pp=2).weight_bytes, whole // 2]
    assert halves[0] == pytest.approx(halves[1], rel=0.02)
    assert halves[0] > halves[1]  # the stage with lm_head is the larger


def test_a_budget_holds_no_negative_term() -> None:
    with pytest.raises(ValueError, match="graph_bytes must be at least 0, got -1"):
        memory.budget(LLAMA, H100, graph_bytes=-1)
