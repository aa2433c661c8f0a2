"""The Triton kernels, compiled for two generations of GPU on a machine that need not have any."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the kernels are interpreted in this process", allow_module_level=True)

from servelab.decoder import triton_kernels as kernels
from servelab.decoder.triton_attention import MAX_SPLITS
from tests.triton_compiled import compiled, compiled_attend, resources

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

MOST_SHARED_BYTES = 99 * 1024  # of a program on sm_86 and sm_89; sm_80 and sm_90 have more


def check(kernel: Any, most_spilled_bytes: int = 0) -> None:
    """It is machine code, fits the shared memory, and keeps its values in registers."""
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert kernel.metadata.shared <= MOST_SHARED_BYTES
    found = resources(kernel)
    assert found["REG"] <= 255
    assert found["STACK"] <= most_spilled_bytes, found


@pytest.mark.parametrize("is_partial", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "chunk"])
@pytest.mark.parametrize(
    ("capability", "dtype", "group", "head_dim"),
    [
        (80, "bfloat16", 4, 128),
        (90, "bfloat16", 4, 128),
        (90, "bfloat16", 3, 64),
        (90, "bfloat16", 7, 128),
        (90, "bfloat16", 8, 128),
        (80, "bfloat16", 3, 32),  # of the small checkpoint
        (80, "float16", 8, 64),
        (90, "float16", 1, 128),
        (80, "float32", 4, 128),
        (90, "float32", 4, 64),
    ],
)
def test_attention_multiplies_on_tensor_cores(
    capability: int, is_decode: bool, is_partial: bool, dtype: str, group: int, head_dim: int
) -> None:
    kernel = compiled_attend(
        capability, dtype, group, head_dim, is_decode=is_decode, is_partial=is_partial
    )
    check(kernel)
    ptx = kernel.asm["ptx"]
    factors = {"bfloat16": "bf16.bf16", "float16": "f16.f16", "float32": "tf32.tf32"}[dtype]
    assert re.search(rf"\bw?g?mma\.\S*\.{factors}", ptx), "no product on tensor cores"
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]+\], \[[^]]+\], 0x10", ptx), (
        "keys and values do not come 16 bytes at a time"
    )


def test_attention_where_nothing_is_a_power_of_two() -> None:
    options = {"block_size": 17, "num_kv_heads": 3, "is_partial": False}
    check(compiled_attend(90, "bfloat16", 5, 80, is_decode=True, **options))
    # A few registers of a chunk's pointers: 128 lines of 5 heads lie at odd distances.
    check(compiled_attend(80, "bfloat16", 5, 80, is_decode=False, **options), 128)


def test_b12_slots_are_counted_in_64_bits() -> None:
    kernel = compiled_attend(80, "bfloat16", 4, 128, is_decode=True, is_partial=True)
    ttir = kernel.asm["ttir"]
    assert re.search(r"arith\.extsi %block\S* : tensor<64xi32> to tensor<64xi64>", ttir)
    assert re.search(r"arith\.muli .* : tensor<64xi64>", ttir)
    assert not re.search(r"arith\.(muli|addi) .* : tensor<64x128xi32>", ttir)


@pytest.mark.parametrize("capability", [80, 90])
def test_store_and_merge(capability: int) -> None:
    pointers = dict.fromkeys(("keys", "values", "key_cache", "value_cache"), "*bf16")
    kinds = {**pointers, "slots": "*i64", "key_stride": "i32", "value_stride": "i32"}
    store = compiled(kernels.store_kernel, kinds, {"ELEMENTS": 1024, "TILE": 1024}, capability)
    check(store)
    assert "st.global.v4.b32" in store.asm["ptx"], "16 bytes at a time"
    kinds = {"partial": "*fp32", "log_sums": "*fp32", "out": "*bf16", "num_splits": "i32"}
    constants = {"HEAD_DIM": 128, "TILE_SPLITS": MAX_SPLITS, "TILE_DIM": 128}
    check(compiled(kernels.merge_kernel, kinds, constants, capability))
