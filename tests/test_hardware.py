"""The catalogue of accelerators: traps of data sheets, sources, and the ridge."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from servelab import hardware
from servelab.hardware import Accelerator
from servelab.units import DTYPE_BITS, GiB

RECORDS = json.loads(
    (resources.files("servelab") / "data/hardware/accelerators.json").read_text(encoding="utf-8")
)
CHIPS = {name: hardware.get(name) for name in hardware.names()}


def test_no_record_is_lost_to_a_name_twice() -> None:
    assert hardware.names() == [record["name"] for record in RECORDS]
    assert len(set(hardware.names())) == len(RECORDS) == 46


@pytest.mark.parametrize("name", CHIPS)
def test_every_figure_names_its_source(name: str) -> None:
    chip = CHIPS[name]
    figures = {f"dense_flop_per_second.{dtype}" for dtype in chip.dense_flop_per_second}
    figures |= {"memory_bytes", "bandwidth_bytes_per_second"}
    figures |= {
        field
        for field in ("visible_memory_bytes", "link_bytes_per_second")
        if getattr(chip, field) is not None
    }
    assert set(chip.sources) == figures
    assert all(source.text.strip() for source in chip.sources.values())
    assert chip.label
    assert not chip.verified("price")


@pytest.mark.parametrize("name", CHIPS)
def test_figures_are_of_one_dense_chip(name: str) -> None:
    chip = CHIPS[name]
    assert 1e10 < chip.bandwidth_bytes_per_second < 2e13
    assert 4 * GiB <= chip.memory_bytes < 400 * GiB
    assert (chip.visible_memory_bytes or 0) <= chip.memory_bytes
    for dtype, rate in chip.dense_flop_per_second.items():
        assert 5e11 < rate < 2e16
        for narrower, faster in chip.dense_flop_per_second.items():
            if DTYPE_BITS[narrower] * 2 == DTYPE_BITS[dtype] and (name, narrower) not in UNEVEN:
                # four times would be a sparse figure beside a dense one (R8)
                assert faster == pytest.approx(2 * rate, rel=0.03), (dtype, narrower)
    bf16, fp16 = (chip.dense_flop_per_second.get(d) for d in ("bf16", "fp16"))
    if bf16 and fp16 and name not in UNEVEN_HALVES:
        assert bf16 == fp16


# Parts whose narrow formats do not run at twice the wider one; data/hardware/README.md says why.
UNEVEN = {
    (chip, dtype)
    for chip in CHIPS
    for dtype in ("int8", "fp4", "fp8")
    if chip.startswith(("b300", "rtx", "mi250", "tpu-v4", "tpu-v6e", "gaudi3"))
}
UNEVEN_HALVES = {"gaudi3"}


@pytest.mark.parametrize(
    ("name", "dtype", "dense"),
    # vendors' data sheets print the sparse figure beside or instead: 1,979, 624, 733 TFLOP/s, 242
    [
        ("h100-sxm-80gb", "bf16", 989e12),
        ("a100-sxm-80gb", "bf16", 312e12),
        ("l40s", "bf16", 362.05e12),
        ("l4", "bf16", 121e12),
    ],
)
def test_rates_are_dense(name: str, dtype: str, dense: float) -> None:
    assert CHIPS[name].peak(dtype) == dense


@pytest.mark.parametrize(
    ("name", "ridge"),
    # correctness, run 1: 295.3 (from 989.4 TFLOP/s), 153.0, 206.1 (from 989.4), 403.3 FLOP/byte
    [("h100-sxm-80gb", 295.2), ("a100-sxm-80gb", 153.0), ("h200-sxm", 206.0), ("l4", 403.3)],
)
def test_ridges(name: str, ridge: float) -> None:
    assert round(CHIPS[name].ridge("bf16"), 1) == ridge


def test_a_dtype_the_chip_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="t4 has no peak rate for 'bf16'; it has fp16, int8"):
        hardware.get("t4").ridge("bf16")
    with pytest.raises(ValueError, match="unknown dtype 'float16'"):
        hardware.get("t4").peak("float16")


@pytest.mark.parametrize(
    ("asked", "near"),
    [("H100", "h100-sxm-80gb"), ("a100-sxm-80", "a100-sxm-80gb"), ("h2oo", "h200")],
)
def test_an_unknown_name_lists_near_ones(asked: str, near: str) -> None:
    with pytest.raises(KeyError, match=rf"no accelerator '{asked}'; near: .*{near}"):
        hardware.get(asked)


def test_an_accelerator_cannot_be_changed_afterwards() -> None:
    rates = {"bf16": 2.0}
    chip = Accelerator("mine", rates, 1, 1.0)
    rates["bf16"] = 4.0
    assert chip.ridge("bf16") == 2.0
    with pytest.raises(TypeError):
        chip.dense_flop_per_second["bf16"] = 4.0  # type: ignore[index]
    assert hash(chip) == hash(Accelerator("mine", {"bf16": 2.0}, 1, 1.0))
