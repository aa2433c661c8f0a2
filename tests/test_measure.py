"""Device, timers and records of ``servelab.measure``; no test holds a time."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from servelab import measure, roofline
from servelab.measure import __main__ as command
from servelab.measure import timing

DEVICE = measure.Device("cpu", "Example CPU", 4, 2**34, 2**25, "Linux", "3.11.7", "2.13.0", None)
RECORD = measure.Record(
    "2026-01-31",
    DEVICE,
    (
        measure.Measurement("copy_bandwidth", "fp32", (500,), 4000, (2e-6, 1e-6, 4e-6)),
        measure.Measurement("read_bandwidth", "fp32", (500,), 2000, (1e-6, 1e-6, 1e-6)),
        measure.Measurement("matmul_rate", "fp32", (10, 10, 10), 2000, (1e-6, 2e-6)),
        measure.Measurement("matmul_rate", "fp32", (20, 20, 20), 16000, (2e-6,)),
        measure.Measurement("matmul_rate", "bf16", (10, 10, 10), 2000, (5e-7,)),
    ),
    note="made up",
)


def test_the_probe_names_neither_host_nor_user_nor_path() -> None:
    import getpass
    import platform

    device = measure.probe()
    told = json.dumps(dataclasses.asdict(device)) + device.report() + measure.device_line()
    assert "/" not in device.name
    for secret in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert not secret or secret not in told, secret
    assert getpass.getuser() not in device.report().split()


def test_the_probe_agrees_with_torch() -> None:
    device = measure.probe()
    assert device.kind == ("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.__version__.startswith(device.torch)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kind", "tpu", "kind must be 'cpu' or 'cuda'"),
        ("name", "", "name must be a text"),
        ("cores", 0, "cores must be at least 1"),
        ("cores", 2.0, "cores must be an int"),
        ("memory_bytes", -1, "memory_bytes must be at least 1"),
        ("cuda", 12.4, "cuda must be a text or None"),
    ],
)
def test_a_device_refuses_what_is_not_one(field: str, value: object, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        dataclasses.replace(DEVICE, **{field: value})


def test_the_timer_runs_warm_up_and_samples_and_stops_at_its_budget() -> None:
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        torch.ones(1000).sum()

    seconds = measure.sample_seconds(work, samples=5, warmup=2)
    assert (calls, len(seconds)) == (7, 5)
    assert min(seconds) > 0
    assert len(measure.sample_seconds(work, samples=50, budget_seconds=1e-12)) == 3
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        measure.sample_seconds(work, samples=0)


def test_median_rate_and_spread_of_samples() -> None:
    copied = RECORD.measurements[0]
    assert copied.median_seconds == statistics.median([2e-6, 1e-6, 4e-6]) == 2e-6
    assert copied.rate == pytest.approx(4000 / 2e-6)
    assert copied.spread == pytest.approx((3e-6 - 1.5e-6) / 2e-6)


def test_the_measured_roofs_are_the_fastest_of_each_kind() -> None:
    chip = RECORD.as_accelerator()
    assert chip.dense_flop_per_second == {
        "fp32": pytest.approx(8e9),
        "bf16": pytest.approx(4e9),
    }
    assert chip.bandwidth_bytes_per_second == pytest.approx(2e9)
    assert chip.ridge("fp32") == pytest.approx(4.0)
    bound = roofline.time_bound(roofline.matmul(1, 100, 100, "fp32", "fp32"), chip, "fp32")
    assert bound.limiter == "memory"


def test_roofs_that_were_not_measured_are_not_made_up() -> None:
    with pytest.raises(ValueError, match="no matmul_rate in fp16"):
        RECORD.best("matmul_rate", "fp16")
    unread = dataclasses.replace(RECORD, measurements=RECORD.measurements[2:])
    with pytest.raises(ValueError, match="no copy_bandwidth"):
        unread.as_accelerator()
    sizeless = dataclasses.replace(RECORD, device=dataclasses.replace(DEVICE, memory_bytes=None))
    with pytest.raises(ValueError, match="did not tell the size of its memory"):
        sizeless.as_accelerator()


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    path = RECORD.save(tmp_path)
    assert path.name == "2026-01-31-example-cpu-4-cores.json"
    assert measure.load_records(tmp_path) == (RECORD,)
    with pytest.raises(FileExistsError):
        RECORD.save(tmp_path)
    changed = dataclasses.replace(RECORD, note="again")
    changed.save(tmp_path, replace=True)
    assert measure.load_records(tmp_path) == (changed,)


def test_of_several_records_the_fastest_series_of_each_measurement_is_kept() -> None:
    slow, fast = RECORD.measurements[0], RECORD.measurements[1]
    other = dataclasses.replace(
        RECORD,
        measurements=(
            dataclasses.replace(slow, seconds=(1e-9,)),
            dataclasses.replace(fast, seconds=(1.0,)),
        ),
    )
    kept = measure.fastest([RECORD, other])
    assert kept.measurements == (other.measurements[0], *RECORD.measurements[1:])
    with pytest.raises(ValueError, match="must be of one device"):
        measure.fastest([RECORD, dataclasses.replace(RECORD, device=measure.probe())])
    with pytest.raises(ValueError, match="must be of one device"):
        measure.fastest([])


def _set(*keys: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    def edit(raw: Any) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda raw: raw.pop("note"), "note: is missing"),
        (lambda raw: raw["device"].pop("cores"), "device.cores: is missing"),
        (_set("host", to="x"), "host: is not a known key"),
        (_set("device", "user", to="x"), "device.user: is not a known key"),
        (_set("schema", to=2), "schema: must be 1, got 2"),
        (_set("date", to="31.1.2026"), "date must be YYYY-MM-DD, got '31.1.2026'"),
        (_set("measurements", to=[]), "must hold at least one"),
        (_set("measurements", to={}), "measurements: must be a list"),
        (_set("device", to=None), "device: must be an object"),
        (_set("measurements", 1, "quantity", to="speed"), r"measurements\[1\]: quantity must be"),
        (_set("measurements", 1, "dtype", to="float32"), "unknown dtype 'float32'"),
        (_set("measurements", 1, "unit", to="GB/s"), r"measurements\[1\].unit: must be 'B/s'"),
        (_set("measurements", 1, "amount", to=1.5), "amount must be an int, got 1.5"),
        (_set("measurements", 1, "seconds", to=[]), "seconds must be a list with at least one"),
        (_set("measurements", 1, "seconds", to=[-1.0]), r"measurements\[1\]: seconds must be"),
        (_set("measurements", 1, "median_seconds", to=2e-6), "the samples give 1e-06, got 2e-06"),
        (_set("device", "name", to="Another"), "must be called 2026-01-31-another-4-cores.json"),
    ],
)
def test_a_broken_record_is_refused_with_its_key(
    edit: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    path = RECORD.save(tmp_path)
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=said) as failure:
        measure.load_records(tmp_path)
    assert path.name in str(failure.value)


def test_the_records_of_the_package_are_sane() -> None:
    records = measure.load_records()
    assert records
    for record in records:
        chip = record.as_accelerator()
        cache = record.device.cache_bytes or 0
        for m in record.measurements:
            assert len(m.seconds) >= 5, "a median of a few samples says little"
            assert m.spread < 0.5, f"{record.name}: {m.quantity} {m.dtype} is mostly noise"
            if m.unit == "B/s":
                assert 4 * m.shape[0] >= 4 * cache, "that would be the bandwidth of a cache"
                assert m.rate <= chip.bandwidth_bytes_per_second
            elif m.quantity == "matmul_rate":
                assert m.rate <= chip.peak(m.dtype)
            else:
                cost = roofline.matmul(*m.shape, m.dtype, m.dtype)
                bound = roofline.time_bound(cost, chip, m.dtype)
                assert m.amount == cost.flop
                assert m.median_seconds >= bound.seconds, "no point may lie above its roof"


@pytest.fixture
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small buffers and matrices: the path is what is tested here, not the machine."""
    monkeypatch.setattr(timing, "_buffer_bytes", lambda device: 2**20)
    monkeypatch.setattr(timing, "_SMALL_MATRIX", {"cpu": 64, "cuda": 64})
    linears = timing.linears
    monkeypatch.setattr(
        command,
        "linears",
        lambda rows, d_in, d_out, *more, **named: linears([2], 96, 64, *more, **named),
    )


@pytest.mark.usefixtures("small_work")
def test_make_measure_stores_a_record_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--out", str(tmp_path), "--note", "from a test"]
    assert command.main(arguments) == 0
    (record,) = measure.load_records(tmp_path)
    assert record.note == "from a test"
    assert record.device == measure.probe()
    wanted = {"copy_bandwidth", "read_bandwidth", "matmul_rate", "linear_rate"}
    assert {m.quantity for m in record.measurements} == wanted
    assert wanted < set(measure.Measurement.UNITS)  # the others are tools/gpu_check.py's
    assert record.measurements[-1].shape == (2, 96, 64)
    assert record.name in capsys.readouterr().out
    assert command.main(arguments) == 2
    told = capsys.readouterr()
    assert "--replace" in told.err
    assert "measuring" not in told.out  # refused before the work, not after it
    assert measure.load_records(tmp_path) == (record,)


def test_buffers_exceed_the_cache_fourfold_and_leave_room_for_others() -> None:
    def buffer(cache: int | None, memory: int | None) -> int:
        return timing._buffer_bytes(
            dataclasses.replace(DEVICE, cache_bytes=cache, memory_bytes=memory)
        )

    assert buffer(2**25, 2**35) == 2**28
    assert buffer(2**28, 2**35) == 2**30
    assert buffer(None, None) == 2**28
    assert buffer(2**25, 2**30) == 2**27


def test_a_matrix_is_measured_at_each_number_of_rows() -> None:
    one, many = measure.linears([1, 8], 96, 64, "fp32", samples=3)
    assert (one.amount, many.amount) == (2 * 96 * 64, 2 * 8 * 96 * 64)
    with pytest.raises(ValueError, match="dtype must be one of fp32, bf16, fp16, got 'fp8'"):
        measure.linears([1], 96, 64, "fp8")
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        measure.linears([0], 96, 64, "fp32")


@pytest.mark.gpu
def test_events_on_a_gpu_time_the_device_and_not_the_launch() -> None:
    a = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    seconds = statistics.median(measure.sample_seconds(lambda: a @ a, samples=5))
    assert 2 * 8192**3 / seconds < 1e16  # a launch alone would return in microseconds


@pytest.mark.gpu
def test_work_before_a_sample_hides_the_launch() -> None:
    x, busy = torch.zeros(1, device="cuda"), torch.ones(2**28, device="cuda")
    bare = measure.sample_seconds(lambda: x.add_(1), samples=21)
    behind = measure.sample_seconds(lambda: x.add_(1), samples=21, before=busy.sum)
    assert statistics.median(behind) < 0.7 * statistics.median(bare)


def test_what_runs_before_a_sample_is_not_timed() -> None:
    calls: list[str] = []
    measure.sample_seconds(
        lambda: calls.append("work"), samples=3, warmup=0, before=lambda: calls.append("before")
    )
    assert calls == ["before", "work"] * 3


def test_a_memory_too_small_to_outgrow_the_cache_is_refused() -> None:
    device = dataclasses.replace(DEVICE, memory_bytes=2**28, cache_bytes=2**25)
    with pytest.raises(RuntimeError, match="a cache would be measured"):
        timing._buffer_bytes(device)


@pytest.mark.gpu
def test_the_roofs_of_a_gpu_stay_below_ten_times_any_data_sheet() -> None:
    chip = measure.roofs(quick=True).as_accelerator()
    assert 1e10 < chip.bandwidth_bytes_per_second < 8e13
    assert chip.peak("bf16") > chip.peak("fp32")
