"""Inverses: what a search returns fits, and one more does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelab import hardware, memory, models, roofline
from servelab.hardware import Accelerator
from servelab.memory.search import largest
from servelab.models import Attention, LatentAttention, LayerSpec, Mlp, ModelSpec, RecurrentState
from servelab.units import GiB

H100 = hardware.get("h100-sxm-80gb")
QWEN = models.get("qwen3-8b")
STATE = RecurrentState("mamba", (), 8, 4, 500)


@st.composite
def layers(draw: st.DrawFn) -> LayerSpec:
    """Full, windowed, chunked, latent and recurrent layers."""
    kind = draw(st.sampled_from(["heads", "heads", "latent", "state", "both"]))
    if kind == "latent":
        return LayerSpec(LatentAttention(2, 24, 8, 8, 8), Mlp(8), 0)
    attention = None
    if kind != "state":
        window = draw(st.one_of(st.none(), st.integers(1, 60)))
        chunked = window is not None and draw(st.booleans())
        attention = Attention(4, draw(st.sampled_from([1, 2, 4])), 8, window, chunked=chunked)
    return LayerSpec(attention, Mlp(8), 0, state=STATE if kind in ("state", "both") else None)


SPECS = st.lists(layers(), min_size=1, max_size=5).map(
    lambda found: ModelSpec("mixed", 8, 10, tuple(found), False, 8)
)


@given(st.integers(-1, 3000), st.one_of(st.none(), st.integers(0, 2000)))
def test_largest(edge: int, limit: int | None) -> None:
    found = largest(lambda n: n <= edge or n == 0, limit)
    expected = max(edge, 0) if limit is None else min(max(edge, 0), limit)
    assert found == expected
    assert largest(lambda n: True) is None
    assert largest(lambda n: True, 7) == 7


@given(
    SPECS,
    st.integers(0, 60_000),
    st.integers(1, 6),
    st.sampled_from(["logical", "reserved"]),
    st.sampled_from(["bf16", "fp32", "int8_per_token_head"]),
)
def test_the_longest_context_fits_and_one_more_does_not(
    spec: ModelSpec, room: int, sequences: int, view: Any, kv_dtype: str
) -> None:
    longest = memory.max_context(spec, room, sequences, kv_dtype, view)

    def needed(tokens: int) -> int:
        return sequences * memory.sequence_bytes(spec, tokens, kv_dtype, view)

    if longest is None:  # no length asks for more
        assert needed(10**15) == needed(10**6) <= room
        return
    assert needed(longest + 1) > room
    assert needed(longest) <= room or longest == 0  # not even the state of so many fits
    if longest:
        assert memory.max_sequences(spec, room, longest, kv_dtype, view) >= sequences
    assert memory.max_sequences(spec, room, longest + 1, kv_dtype, view) < sequences


@given(SPECS, st.integers(0, 200_000), st.integers(1, 4), st.sampled_from(memory.ENGINES))
def test_an_engine_s_longest_context_fits_and_one_more_does_not(
    spec: ModelSpec, room: int, sequences: int, engine: str
) -> None:
    told = {"engine": engine, "block_size": 4, "max_num_batched_tokens": 16}

    def fit(tokens: int) -> int:
        return memory.capacity(spec, room, tokens, **told).sequences  # type: ignore[arg-type]

    try:
        longest = memory.max_engine_context(spec, room, sequences, **told)
    except ValueError:  # refused by the engine, whatever the length
        with pytest.raises(ValueError, match=r"a ratio of its own|cannot make pages"):
            fit(1)
        return
    if longest is None:
        assert fit(10**12) >= sequences
        return
    assert fit(longest + 1) < sequences
    if longest:
        assert fit(longest) >= sequences
        limited = memory.max_engine_context(spec, room, sequences, limit_tokens=longest, **told)
        assert limited == longest


def test_a_window_s_context_is_not_found_by_slope() -> None:
    mistral = models.get("mistral-7b")  # 131,072 bytes per token up to 4,096, then none
    just = 4096 * 131072
    assert memory.max_context(mistral, just - 1) == 4095
    assert memory.max_context(mistral, just) is None
    assert memory.max_context(mistral, just, view="reserved") == 4096


def test_the_null_block_in_the_suggested_length() -> None:
    told = {"limit_tokens": 40_960}
    assert memory.suggested_context(QWEN, GiB, **told) == 7280  # 455 blocks of 2.25 MiB
    assert memory.suggested_context(QWEN, GiB, **told, null_blocks=1) == 7264
    assert memory.suggested_context(QWEN, 100 * GiB, **told) == 40_960
    assert memory.suggested_context(QWEN, 1000, **told) == 0


# --- users under targets of latency -----------------------------------------------------------

ROOM = memory.budget(QWEN, H100).available_bytes


def users(**changes: Any) -> memory.Users:
    told = {"prompt_tokens": 1024, "output_tokens": 256} | changes
    return memory.max_users(QWEN, told.pop("chip", H100), told.pop("room", ROOM), **told)


def test_memory_is_the_limit_without_targets() -> None:
    found = users()
    assert found.users == memory.max_sequences(QWEN, ROOM, 1280)
    assert (found.limit, found.target) == ("memory", "capacity")


@pytest.mark.parametrize("target", [0.006, 0.010, 0.015])
def test_the_next_user_misses_the_time_per_token(target: float) -> None:
    found = users(tpot_seconds=target)
    last = [roofline.step_time(QWEN, [(1, 1279)] * n, H100).seconds for n in range(1, 200, 7)]
    inside = [n for n, seconds in zip(range(1, 200, 7), last, strict=True) if seconds <= target]
    assert max(inside) <= found.users < max(inside) + 7  # by brute force
    one_more = [(1, 1279)] * (found.users + 1)
    assert roofline.step_time(QWEN, one_more[1:], H100).seconds <= target
    assert roofline.step_time(QWEN, one_more, H100).seconds > target
    assert (found.limit, found.target) == ("bandwidth", "tpot")


def test_the_next_user_misses_the_first_token() -> None:
    alone = roofline.step_time(QWEN, [(8192, 0)], H100)
    found = users(prompt_tokens=8192, ttft_seconds=alone.seconds * 1.001, room=500 * GiB)
    assert (found.limit, found.target) == ("compute", "ttft")
    busy = [(8192, 0), *[(1, 8447)] * found.users]
    assert roofline.step_time(QWEN, busy, H100).seconds > alone.seconds * 1.001
    assert roofline.step_time(QWEN, busy[:-1], H100).seconds <= alone.seconds * 1.001


def test_the_strictest_target_is_named() -> None:
    both = users(tpot_seconds=0.010, ttft_seconds=10.0)
    assert both == users(tpot_seconds=0.010) or both.by_target["ttft"] == both.by_target["capacity"]
    assert both.users == users(tpot_seconds=0.010).users == both.by_target["tpot"]
    assert users(tpot_seconds=0.010, efficiency=0.8).users == users(tpot_seconds=0.008).users


def test_no_user_at_all() -> None:
    found = users(tpot_seconds=0.001)  # the weights alone take 4.5 ms
    assert (found.users, found.limit) == (0, "bandwidth")
    assert users(room=0).users == 0
    assert users(room=0).limit == "memory"


def test_compute_can_be_the_limit_of_decoding() -> None:
    slow = Accelerator("slow", {"bf16": 1e12}, 10**12, 1e13)
    assert users(chip=slow, tpot_seconds=0.1).limit == "compute"


def test_a_narrower_cache_fits_more_users() -> None:
    narrow = users(precision=roofline.Precision(kv="fp8"))
    assert narrow.users == memory.max_sequences(QWEN, ROOM, 1280, "fp8")
    assert users(kv_dtype="nvfp4").users > narrow.users
