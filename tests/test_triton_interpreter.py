"""The Triton kernels against dense attention, interpreted, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servelab.decoder.triton_attention import MAX_SPLITS, TritonAttention, choose_splits
from servelab.models import Attention
from servelab.roofline import attention, kv_append

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "triton_interpreted.py"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (Linux only)"
)


@needs_triton
def test_the_kernels_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


@needs_triton
def test_without_the_interpreter_a_cpu_is_refused_with_the_way_out() -> None:
    script = "from servelab.decoder.triton_attention import TritonAttention as T; T('cpu')"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert "TRITON_INTERPRET=1 must be in the environment" in done.stderr


def test_without_triton_the_backend_imports_and_says_what_is_missing() -> None:
    script = """
import sys
sys.modules["triton"] = None
from servelab.decoder.triton_attention import TritonAttention
try:
    TritonAttention("cuda")
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "needs the package triton, which is not installed" in done.stdout, done.stderr


@pytest.mark.parametrize("programs", [1, 3, 8, 500, 5000])
@pytest.mark.parametrize("context", [1, 64, 65, 4096, 131_072])
def test_splits_fill_the_device_and_are_never_empty_by_choice(programs: int, context: int) -> None:
    splits = choose_splits(programs, context, tile_keys=64, multiprocessors=132)
    tiles = -(-context // 64)
    assert 1 <= splits <= min(tiles, MAX_SPLITS)
    filled = programs * splits >= 8 * 132
    assert filled or splits in (tiles, MAX_SPLITS)


def test_the_traffic_that_the_kernels_state_is_the_roofline_s() -> None:
    heads, n, e = Attention(num_q_heads=32, num_kv_heads=8, head_dim=128), 4096, 2
    attended, stored = attention(heads, [(1, n - 1)]), kv_append(heads, 1)
    assert attended.read_bytes == 2 * n * 8 * 128 * e + 32 * 128 * e
    assert attended.written_bytes == 32 * 128 * e
    assert stored.read_bytes == stored.written_bytes == 2 * 8 * 128 * e


def test_b12_b13_slots_are_counted_in_64_bits() -> None:
    assert TritonAttention.index_bits == 64


def test_gpu_check_says_so_where_there_is_no_gpu() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gpu_check.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "no CUDA device here: nothing was checked and nothing measured\n"
    assert not done.stdout
