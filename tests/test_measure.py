"""Device, timers and records of ``servelab.measure``; no test holds a time."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from servelab import hardware, measure, models, roofline
from servelab.decoder import packing
from servelab.measure import __main__ as command
from servelab.measure import calibration, parts, sweeps, timing, workload
from servelab.models import Attention
from servelab.roofline import attention
from servelab.serving import RooflineRunner

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

WORK = measure.Workload(
    "stories", "bf16", ((0.0, 8, 4), (0.5, 8, 1)), 9, 16, 2, 64, (((0.1, 0.4), (0.6, 0.6)),)
)
SWEEP = dataclasses.replace(
    RECORD,
    subject="sweep",
    workloads=(WORK,),
    measurements=(
        *RECORD.measurements,
        measure.Measurement("step", "bf16", (1, 1, 64), 1, (2e-3, 1e-3), "stories"),
    ),
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


def test_matrices_are_multiplied_in_the_order_of_a_linear_layer() -> None:
    """In the other one, torch takes many times as long where it has no fast kernels."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def measured(quantity: str, dtype: str, shape: tuple[int, ...], amount: int, work: Any) -> None:
        seen.append(tuple(matrix.stride() for matrix in work.args))

    list(timing._matmul_rates(dataclasses.replace(DEVICE, kind="cpu"), True, measured))
    assert seen == [((1024, 1), (1, 1024))] * 2  # fp32 and bf16


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
        (_set("schema", to=1), "schema: must be 2, got 1"),
        (_set("subject", to="speed"), "subject must be 'roofs' or 'sweep', got 'speed'"),
        (_set("workloads", to={}), "workloads: must be a list"),
        (_set("measurements", 1, "model", to="stories"), "a step and its parts have"),
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


SCHEMA = json.loads(measure.records.SCHEMA_FILE.read_text())
STORED = [p for p in measure.records.FOLDER.glob("*.json") if p != measure.records.SCHEMA_FILE]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_the_records_of_the_package_follow_the_schema(path: Path) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(path.read_text()))


def test_the_schema_is_one_and_refuses_what_the_reader_refuses() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert validator.is_valid(json.loads(SWEEP.to_json()))
    edits = [
        (_set("schema", to=1)),
        (_set("host", to="x")),
        (_set("device", "user", to="x")),
        (_set("subject", to="speed")),
        (_set("measurements", to=[])),
        (_set("measurements", 0, "seconds", to=[0.0])),
        (_set("measurements", 0, "quantity", to="speed")),
        (_set("measurements", -1, "model", to=None)),
        (_set("measurements", 0, "model", to="stories")),
        (_set("workloads", 0, "requests", 0, to=[0.0, 8])),
        (_set("workloads", 0, "num_blocks", to=0)),
        (lambda raw: raw["workloads"][0].pop("runs")),
    ]
    for edit in edits:
        raw = json.loads(SWEEP.to_json())
        edit(raw)
        assert not validator.is_valid(raw)
        with pytest.raises(ValueError, match=r"\w"):
            measure.Record.from_json(json.dumps(raw))


@pytest.mark.parametrize("record", measure.load_records(), ids=lambda record: record.name)
def test_the_records_of_the_package_are_sane(record: measure.Record) -> None:
    chip = record.as_accelerator()
    for m in record.measurements:
        if m.model is None:
            assert len(m.seconds) >= 5, "a median of a few samples says little"
            assert m.spread < 0.5, f"{record.name}: {m.quantity} {m.dtype} is mostly noise"
        if m.quantity in ("copy_bandwidth", "read_bandwidth"):
            cache = record.device.cache_bytes or 0
            assert 4 * m.shape[0] >= 4 * cache, "that would be the bandwidth of a cache"
            assert m.rate <= chip.bandwidth_bytes_per_second
        elif m.quantity == "matmul_rate":
            assert m.rate <= chip.peak(m.dtype)
        elif m.quantity == "linear_rate":
            cost = roofline.matmul(*m.shape, m.dtype, m.dtype)
            bound = roofline.time_bound(cost, chip, m.dtype)
            assert m.amount == cost.flop
            assert m.median_seconds >= bound.seconds, "no point may lie above its roof"


@pytest.mark.parametrize(
    "record", measure.load_records(subject="sweep"), ids=lambda record: record.name
)
def test_no_step_of_a_record_beats_its_roof(record: measure.Record) -> None:
    chip = record.as_accelerator()
    steps = [m for m in record.measurements if m.quantity.startswith("step")]
    kernels = [m for m in record.measurements if m.quantity == "paged_decode_bandwidth"]
    assert len({m.model for m in steps}) >= 2
    assert kernels
    for m in steps:
        assert m.median_seconds >= measure.bound_of(m, chip).seconds, (m.model, m.shape)
    for m in kernels:  # their keys came from memory: caches were emptied before each sample
        rows, context, *heads, _ = m.shape
        wanted = attention(Attention(*heads), [(1, context - 1)] * rows).bytes
        assert (m.amount, m.rate <= chip.bandwidth_bytes_per_second) == (wanted, True)
    for work in record.workloads:
        assert work.runs
        runner = RooflineRunner(models.get(work.model), chip, work.dtype)
        ends = [last for _, last in measure.serve(runner, work, runner.new_prompt)]
        for run in work.runs:
            assert max(last for _, last in run) > max(ends), "no run may be faster than its bounds"


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
    arguments = ["--quick", "--out", str(tmp_path), "--note", "from a test", "--only", "roofs"]
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


def test_a_sweep_survives_its_file_and_stands_beside_the_roofs_of_its_day(tmp_path: Path) -> None:
    assert RECORD.save(tmp_path) != SWEEP.save(tmp_path)
    assert measure.load_records(tmp_path, "sweep") == (SWEEP,)
    assert measure.load_records(tmp_path, "roofs") == (RECORD,)
    assert len(measure.load_records(tmp_path)) == 2


def test_of_several_sweeps_the_faster_workload_is_kept() -> None:
    slow = dataclasses.replace(SWEEP, workloads=(WORK.at((((0.2, 0.9), (2.6, 2.6)),)),))
    assert measure.fastest([slow, SWEEP]).workloads == (WORK,)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("requests", (), "at least one, in order of arrival"),
        ("requests", ((1.0, 8, 4), (0.5, 8, 1)), "in order of arrival"),
        ("requests", ((0.0, 8),), "rows of 3 numbers"),
        ("runs", (((0.1, 0.4),),), "times of all 2 requests"),
        ("runs", (((0.4, 0.1), (0.6, 0.6)),), "cannot come before the first"),
        ("num_blocks", 0, "num_blocks must be at least 1"),
        ("dtype", "float32", "unknown dtype"),
    ],
)
def test_a_workload_refuses_what_is_none(field: str, value: object, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        dataclasses.replace(WORK, **{field: value})


def test_latencies_of_a_workload() -> None:
    assert WORK.ttft_seconds(0) == pytest.approx([0.1, 0.1])
    assert WORK.tpot_seconds(0) == pytest.approx([0.1])
    assert WORK.tokens_per_second(0) == pytest.approx(5 / 0.6)


def test_real_and_predicted_engine_take_the_same_steps() -> None:
    requests = workload.mixed(6, rate=200, prompt=(4, 40), output=(2, 9), seed=3)
    work = measure.Workload("stories", "bf16", requests, 40, 16, 4, 32)
    seen: dict[str, list[list[tuple[int, int]]]] = {}
    chip = hardware.get("h100-sxm-80gb")
    predicted = RooflineRunner(models.get("stories"), chip, overhead_seconds=1.0)
    real = workload.WallClockRunner(parts.model_of("stories", measure.probe().kind))
    for name, runner in (("predicted", predicted), ("real", real)):
        steps: list[list[tuple[int, int]]] = seen.setdefault(name, [])
        execute = runner.execute

        def noted(plan: Any, steps: Any = steps, execute: Any = execute) -> Any:
            steps.append(plan.pairs)
            return execute(plan)

        runner.execute = noted  # type: ignore[method-assign]
        everyone = dataclasses.replace(work, requests=tuple((0.0, p, o) for _, p, o in requests))
        times = measure.serve(runner, everyone)
        assert len(times) == 6
        assert all(0 < first <= last for first, last in times)
    assert seen["real"] == seen["predicted"]


def test_a_fit_finds_the_two_numbers_it_was_made_with() -> None:
    bounds = [1e-3 * 1.7**i for i in range(9)]
    made = measure.Calibration(0.37, 2.5e-3)
    found, own, others = measure.cross_checked(bounds, [made.seconds(b) for b in bounds])
    assert found.efficiency == pytest.approx(0.37)
    assert found.overhead_seconds == pytest.approx(2.5e-3)
    assert max(map(abs, [*own, *others])) < 1e-9
    assert (len(own), len(others)) == (5, 4)


def test_a_fit_never_beats_the_bound_and_is_the_best_of_its_neighbours() -> None:
    bounds, measured = [1.0, 2.0, 4.0, 8.0], [1.9, 2.2, 5.5, 9.0]
    for seconds in (measured, [b * 0.9 for b in bounds], [b * 3 - 0.5 for b in bounds]):
        found = measure.fit(bounds, seconds)
        assert 0 < found.efficiency <= 1
        assert found.overhead_seconds >= 0
        least = sum(e * e for e in found.errors(bounds, seconds))
        for e in (0.99, 1.01):
            for o in (-0.01, 0.0, 0.01):
                other = measure.Calibration(found.efficiency * e, found.overhead_seconds + o)
                if other.efficiency <= 1 and other.overhead_seconds >= 0:
                    assert sum(x * x for x in other.errors(bounds, seconds)) >= least - 1e-12


def test_a_fit_refuses_what_it_cannot_answer() -> None:
    with pytest.raises(ValueError, match="two different bounds"):
        measure.fit([1.0, 1.0], [2.0, 3.0])
    with pytest.raises(ValueError, match="at least four steps"):
        measure.cross_checked([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="seconds must be"):
        measure.fit([1.0, 2.0], [1.0, 0.0])
    assert calibration.halves(4) == ([0, 2], [1, 3])


def test_a_step_and_its_parts_are_of_the_shapes_they_are_called_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeps, "_effort", lambda full: (3, 1, 0.01))
    monkeypatch.setattr(timing, "_buffer_bytes", lambda device: 2**20)
    sizes = sweeps.Sizes((16,), ((2, 40),), ((2, 1, 40),), ())
    model = parts.model_of("stories", measure.probe().kind)
    found = list(sweeps.steps("stories", model, sizes, False, lambda line: None))
    assert {m.model for m in found} == {"stories"}
    assert [m.shape for m in found if m.quantity == "step"] == [(1, 16, 16), (2, 1, 40)]
    apart = {m.quantity for m in found if m.shape == (2, 1, 40)}
    wanted = {"step", "bookkeeping", "staging", "matrices", "attention", "elementwise"}
    assert wanted | {"sampling", "matrices_cold", "hollow"} <= apart
    can_pack = model.device.type == "cpu" and packing.available()
    assert {"matrices_packed", "step_packed"} & apart == (
        {"matrices_packed", "step_packed"} if can_pack else set()
    )
    assert apart <= {"step", *measure.records.PARTS}
    record = dataclasses.replace(SWEEP, measurements=(*RECORD.measurements, *found))
    assert measure.taken_apart(record) == [("stories", (2, 1, 40))]
    took = measure.causes(record, "stories", (2, 1, 40))
    step = measure.parts_of(record, "stories", (2, 1, 40))
    whole = step["step"].median_seconds + step["bookkeeping"].median_seconds
    assert sum(took.values()) == pytest.approx(whole)
    assert all(seconds >= 0 for name, seconds in took.items() if name != "not accounted for")
    with pytest.raises(ValueError, match="has no step of stories with shape"):
        measure.causes(record, "stories", (3, 1, 40))


def test_a_step_and_its_parts_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program on the machine then slows all of them, and not the one it happens to meet."""
    monkeypatch.setattr(sweeps, "_effort", lambda full: (7, 1, 60.0))
    order: list[str] = []
    works: sweeps.Works = {
        "step": (lambda: order.append("step"), None),
        "matrices": (lambda: order.append("matrices"), lambda: order.append("before")),
    }
    step, matrices = sweeps.in_turn("stories", (1, 1, 16), works, True)
    one = ["step"] * 4 + ["matrices", *["before", "matrices"] * 3]  # one of each is warm-up
    if not torch.cuda.is_available():
        assert order == 3 * one
    assert (step.quantity, len(step.seconds), len(matrices.seconds)) == ("step", 9, 9)
    order.clear()
    assert [len(m.seconds) for m in sweeps.in_turn("stories", (1, 1, 16), works, False)] == [7, 7]
    assert order.index("matrices") == 8  # in one go where it has to be quick


def test_the_parts_do_the_work_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    model = parts.model_of("stories", measure.probe().kind)
    runner = parts.StepRunner(model).of(rows=3, new=1, context=33)
    linear = runner.attention.operators.linear
    monkeypatch.setattr(
        type(runner.attention.operators),
        "linear",
        lambda self, x, w, b: calls.append((len(x), *w.shape)) or linear(x, w, b),
    )
    work = runner.matrices()
    with torch.inference_mode():
        work()
    spec = models.get("stories")
    cost = roofline.step_cost(spec, [(1, 32)] * 3)
    flop = sum(2 * rows * out * width for rows, out, width in calls)
    names = [m.name for part in spec.layers[0].plain() for m in part.linears(spec.hidden_size)]
    assert flop == sum(cost.by_name()[name].flop for name in [*names, "lm_head"])
    assert runner.store.data.isfinite().all()
    assert runner.store.data[:, :, 1:].abs().amin() > 0  # memory that was never touched is no cache
    with pytest.raises(ValueError, match="no room for 5 new tokens"):
        runner.of(rows=1, new=5, context=4)
