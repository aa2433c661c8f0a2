"""Memory: against the bytes of real tensors, and inverses that give back what went in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servelab import hardware, memory, models
from servelab.decoder import DenseCache
from servelab.hardware import Accelerator
from servelab.models import Attention, LayerSpec, Mlp, ModelSpec
from servelab.units import GB, GiB
from tests.tiny import CONFIGS

LLAMA = models.get("llama-3-8b")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Small models whose layers differ in heads and windows."""
    window = st.one_of(st.none(), st.integers(1, 50))
    layers = draw(
        st.lists(
            st.builds(
                lambda kv_heads, w: LayerSpec(Attention(kv_heads, kv_heads, 2, w), Mlp(4), 4),
                st.integers(1, 3),
                window,
            ),
            min_size=1,
            max_size=4,
        )
    )
    longest = draw(st.one_of(st.none(), st.integers(1, 60)))
    return ModelSpec("mixed", 4, 7, tuple(layers), False, 4, max_context_tokens=longest)


VIEWS = st.sampled_from(["logical", "reserved"])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_bytes_equal_real_tensors(name: str, dtype: str) -> None:
    spec = ModelSpec.from_config(CONFIGS[name])
    cache = DenseCache(spec, batch=3, max_tokens=17, dtype=DTYPES[dtype])
    assert cache.nbytes == 3 * spec.sequence_bytes(17, dtype, view="reserved")
    assert cache.nbytes == 3 * 17 * spec.kv_bytes_per_token(dtype, view="reserved")


@given(specs(), st.integers(0, 30_000), st.integers(1, 200), VIEWS)
def test_max_sequences_is_the_most_that_fit(
    spec: ModelSpec, available: int, tokens: int, view: models.View
) -> None:
    fits = memory.max_sequences(spec, available, tokens, view=view)
    each = spec.sequence_bytes(tokens, view=view)
    assert fits * each <= available < (fits + 1) * each


@given(specs(), st.integers(0, 30_000), st.integers(1, 5), VIEWS)
def test_max_context_is_the_longest_that_fits(
    spec: ModelSpec, available: int, sequences: int, view: models.View
) -> None:
    longest = memory.max_context(spec, available, sequences, view=view)
    if longest is None:  # every window is full: no length asks for more
        assert spec.kv_bytes_per_token(view=view) == 0
        assert sequences * spec.sequence_bytes(10**9, view=view) <= available
        return
    assert sequences * spec.sequence_bytes(longest, view=view) <= available
    assert sequences * spec.sequence_bytes(longest + 1, view=view) > available
    if longest:
        assert memory.max_sequences(spec, available, longest, view=view) >= sequences
    assert memory.max_sequences(spec, available, longest + 1, view=view) < sequences


def test_every_window_must_be_full_before_memory_sets_no_limit() -> None:
    near, far = (LayerSpec(Attention(1, 1, 2, window), Mlp(4), 4) for window in (10, 50))
    spec = ModelSpec("two windows", 4, 7, (near, far), False, 4)
    full = spec.sequence_bytes(50)
    assert memory.max_context(spec, full) is None
    assert memory.max_context(spec, full - 1) == 49
    assert memory.max_context(spec, spec.sequence_bytes(10)) == 10


@given(specs(), st.integers(0, 30_000), st.integers(1, 40), st.integers(1, 300))
def test_capacity_is_the_most_blocks_that_fit(
    spec: ModelSpec, available: int, block_size: int, length: int
) -> None:
    fits = memory.capacity(spec, available, length, block_size)
    block_bytes = spec.sequence_bytes(block_size, view="reserved")
    assert fits.bytes_per_block == block_bytes
    assert fits.blocks * block_bytes <= available < (fits.blocks + 1) * block_bytes
    assert fits.tokens == fits.blocks * block_size
    blocks_each = next(n for n in range(1, 301) if n * block_size >= length)
    assert fits.sequences * blocks_each <= fits.blocks < (fits.sequences + 1) * blocks_each
    assert fits.max_concurrency == fits.blocks / blocks_each
    assert fits.sequences <= memory.max_sequences(spec, available, length, view="reserved")
    exact = memory.capacity(spec, fits.blocks * block_bytes, length, block_size)
    assert exact == fits


def test_whole_sequences_are_not_rounded_through_a_float() -> None:
    per_token = LLAMA.kv_bytes_per_token()
    blocks = 3 * 10**17 - 1  # one short of 10^17 sequences of three blocks
    fits = memory.capacity(LLAMA, blocks * per_token, max_model_len=3, block_size=1)
    assert (fits.blocks, fits.sequences) == (blocks, 10**17 - 1)


def test_users_at_128k_by_either_reading_of_80_gb() -> None:
    # correctness R7: 3 with GB, 4 with GiB, if nothing but weights and KV were in memory
    for memory_bytes, users in ((80 * GB, 3), (80 * GiB, 4)):
        chip = Accelerator("80", {"bf16": 1.0}, memory_bytes, 1.0)
        left = memory.budget(LLAMA, chip, utilization=1.0).available_bytes
        assert memory.max_sequences(LLAMA, left, tokens=128 * 1024) == users


@given(
    st.floats(0.01, 1.0), st.integers(0, 10**11), st.sampled_from(["h100-sxm-80gb", "t4", "a10g"])
)
def test_the_terms_of_a_budget_add_up(utilization: float, reserve: int, name: str) -> None:
    chip = hardware.get(name)
    left = memory.budget(LLAMA, chip, utilization, reserve_bytes=reserve)
    assert left.device_bytes == (chip.visible_memory_bytes or chip.memory_bytes)
    assert 0 <= left.device_bytes * utilization - left.usable_bytes < 1
    assert left.weight_bytes == 16_060_522_496
    spent = left.weight_bytes + left.reserve_bytes + left.available_bytes
    assert spent == left.usable_bytes <= left.device_bytes


def test_the_driver_s_figure_goes_before_the_data_sheet_s() -> None:
    sheet = Accelerator("n", {"bf16": 1.0}, 100 * GB, 1.0)
    driver = Accelerator("n", {"bf16": 1.0}, 100 * GB, 1.0, visible_memory_bytes=90 * GB)
    assert memory.budget(LLAMA, sheet, 1.0).device_bytes == 100 * GB
    assert memory.budget(LLAMA, driver, 1.0).device_bytes == 90 * GB


def test_a_model_too_large_leaves_less_than_nothing() -> None:
    left = memory.budget(models.get("llama-3-70b"), hardware.get("h100-sxm-80gb"))
    assert left.available_bytes < 0
    with pytest.raises(ValueError, match="available_bytes must be at least 0, got -"):
        memory.capacity(LLAMA, left.available_bytes, max_model_len=8192)


def test_numpy_integers_do_not_overflow() -> None:
    available, tokens = np.int64(2**40), np.int32(2**14)
    assert memory.max_sequences(LLAMA, available, tokens) == 512
    assert memory.max_context(LLAMA, available, np.int32(512)) == 2**14
    fits = memory.capacity(LLAMA, available, tokens, np.int32(16))
    assert fits == memory.capacity(LLAMA, 2**40, 2**14, 16)
    assert {type(v) for v in (fits.blocks, fits.tokens, fits.sequences)} == {int}
