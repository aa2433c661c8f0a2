"""vLLM beside our engine: the pipe, the record, and what a real vLLM wrote, printed and did."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from servelab import logs, memory, models
from servelab.decoder import BUNDLED_CHECKPOINT, TorchRunner
from servelab.measure import Device, beside_vllm, vllm_process
from servelab.measure.beside_vllm import Batch, Beside, compare, load_beside
from servelab.measure.vllm_process import VARIABLE, Ours, Vllm, interpreter
from servelab.units import GiB

DATA = beside_vllm.FOLDER
DEVICE = Device("cpu", "Example CPU", 2, None, None, "Linux", "3.11.7", "2.13.0", None)
# What the worker needs of vLLM: counts upwards from the last token of a prompt.
STAND_IN = """
__version__ = "9.9.9"
class SamplingParams:
    def __init__(self, max_tokens, **options):
        assert options == {"temperature": 0, "ignore_eos": True, "detokenize": False}
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, skip_tokenizer_init, enable_prefix_caching, **settings):
        print("noise on standard output")
        if model == "broken":
            raise OSError("no such model")
        self.short = settings.get("short", False)
    def generate(self, prompts, params, use_tqdm):
        from types import SimpleNamespace as Of
        return [Of(outputs=[Of(token_ids=range(p["prompt_token_ids"][-1] + 1,
                p["prompt_token_ids"][-1] + 1 + q.max_tokens - self.short))])
                for p, q in zip(prompts, params)]
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "vllm.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Path(sys.executable)


# --- the pipe -----------------------------------------------------------------------------------


def test_prompts_go_through_and_come_back(python: Path) -> None:
    with Vllm(Path("any"), python, 1, dtype="float32") as vllm:
        assert vllm.version == "9.9.9"
        seconds, tokens = vllm.generate([[5, 7], [1]], [2, 3])
        assert tokens == [[8, 9], [2, 3, 4]]
        assert seconds > 0
        assert vllm.generate([[3]], [1])[1] == [[4]]
        assert "noise" in vllm.log.read_text(encoding="utf-8")
    assert not vllm.log.exists()


def test_what_it_said_last_is_told_when_it_does_not_start(python: Path) -> None:
    with pytest.raises(RuntimeError, match="it last said: OSError: no such model"):
        Vllm(Path("broken"), python, 1)


def test_answers_of_other_lengths_are_refused(python: Path) -> None:
    with (
        Vllm(Path("any"), python, 1, short=True) as vllm,
        pytest.raises(RuntimeError, match="other lengths"),
    ):
        vllm.generate([[1]], [2])


def test_the_interpreter_is_named_or_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert interpreter() == Path(sys.executable)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    with pytest.raises(FileNotFoundError, match=VARIABLE):
        interpreter()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(vllm_process.importlib.util, "find_spec", lambda name: None)
    assert interpreter() is None
    with pytest.raises(SystemExit):
        beside_vllm.main([])


def test_our_engine_speaks_the_same_protocol() -> None:
    runner = TorchRunner.from_pretrained(BUNDLED_CHECKPOINT, "cpu", dtype="fp32")
    seconds, tokens = Ours(runner).generate([[0, 5, 9], [0, 4]], [3, 6])
    assert [len(answer) for answer in tokens] == [3, 6]
    assert Ours(runner, 4).generate([[0, 4]], [6])[1] == tokens[1:]
    assert seconds > 0


class Fixed:
    """Answers with given tokens; a step takes a millisecond."""

    def __init__(self, tokens: list[list[int]]) -> None:
        self.tokens = tokens

    def generate(self, prompts: object, lengths: list[int]) -> tuple[float, list[list[int]]]:
        return 0.5 + lengths[0] / 1000, [row[: lengths[0]] for row in self.tokens]


def test_the_comparison_counts_equal_answers_and_takes_a_step_by_difference() -> None:
    theirs, own = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]]
    batch = compare(Fixed(theirs), Fixed(own), [[9], [8]], 3, rounds=2)
    assert (batch.size, batch.equal, batch.new_tokens) == (2, 1, 3)
    assert batch.vllm_tokens == ((1, 2, 3), (4, 5, 6))
    assert batch.vllm_step == pytest.approx(1e-3)
    assert len(batch.ours_seconds) == 2
    assert compare(Fixed(theirs), Fixed(own), [[9], [8]], 3, 1, keep_tokens=False).prompts == ()


# --- the record ---------------------------------------------------------------------------------


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    batch = Batch(1, 2, 1, (1e-3,), (2e-3,), ((1, 2),), ((3, 4),))
    record = Beside("2026-11-29", "quiet", DEVICE, "0.32.0", "stories", "fp32", (batch,))
    path = record.save(tmp_path)
    assert path.name == "2026-11-29-example-cpu-2-cores-stories-fp32.json"
    assert load_beside(tmp_path) == (record,)
    broken = json.loads(path.read_text(encoding="utf-8")) | {"schema": 2}
    with pytest.raises(ValueError, match="schema must be 1"):
        Beside.from_json(json.dumps(broken))


@pytest.mark.parametrize(
    "changed",
    [
        {"equal": 2},
        {"size": 0},
        {"vllm_seconds": (0.0,)},
        {"ours_seconds": ()},
        {"prompts": ((1,), (2,))},
        {"vllm_tokens": ((-1,),)},
    ],
)
def test_a_batch_that_cannot_be_is_refused(changed: dict[str, object]) -> None:
    batch = Batch(1, 2, 1, (1e-3,), (2e-3,), ((1, 2),), ((3, 4),))
    with pytest.raises((TypeError, ValueError)):
        dataclasses.replace(batch, **changed)


def test_the_records_of_the_package_are_what_our_engine_writes() -> None:
    runner = TorchRunner.from_pretrained(BUNDLED_CHECKPOINT, "cpu", dtype="fp64")
    records = load_beside()
    assert records
    for record in records:
        assert (DATA / f"{record.name}.json").exists()
        assert record.vllm == memory.vllm_flags()["version"]
        for batch in record.batches:
            assert batch.equal == batch.size
            if batch.prompts:
                lengths = [batch.new_tokens] * batch.size
                _, tokens = Ours(runner).generate(batch.prompts, lengths)
                assert tokens == [list(row) for row in batch.vllm_tokens]


# --- what vLLM printed --------------------------------------------------------------------------

START = (DATA / "start_0.32.0.log").read_text(encoding="utf-8")


def test_the_recorded_start_follows_from_the_model() -> None:
    checks = logs.explain_log(START, models.get("stories"))
    verdicts = {c.quantity: c.agrees for c in checks if c.agrees is not None}
    assert verdicts == {"tokens": True, "max_concurrency": True}
    [available] = [c for c in checks if c.quantity == "available"]
    assert (available.reported, available.unit) == (1.0, "GiB")


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen3-8b"])
def test_it_does_not_follow_from_another_model(model: str) -> None:
    checks = logs.explain_log(START, models.get(model))
    assert False in [c.agrees for c in checks if c.quantity == "tokens"]


def test_it_does_not_follow_from_other_memory() -> None:
    checks = logs.explain_log(START.replace("(1.0/23.54)", "(1.25/23.54)"), models.get("stories"))
    assert [c.agrees for c in checks if c.quantity == "tokens"] == [False]


def test_the_line_of_a_cpu_has_two_sizes_before_one_unit() -> None:
    lines = {
        "Explicitly set (1.0/23.54) GiB for KV cache on node 0.": (1.0, 23.54),
        "Auto set (7.25/15.4) GiB for KV cache on node 0, with 8.0 GiB requested memory for the "
        "worker.": (7.25, 15.4),
    }
    for line, sizes in lines.items():
        checks = logs.explain_log(f"Initializing a V1 LLM engine (v0.32.0)\n{line}")
        told = {c.quantity: c.reported for c in checks}
        assert (told["available"], told["total"]) == sizes


def test_the_log_names_no_machine() -> None:
    for private in ("/root", "/home", "192.", "site-packages"):
        assert private not in START


def test_the_recorded_replay_keeps_what_the_document_loses() -> None:
    replay = json.loads((DATA / "prefix_replay.json").read_text(encoding="utf-8"))
    steps = {step["time"]: step for step in replay["steps"]}
    assert 4 in steps[7]["cached"]  # block 3 of the document
    assert [block - 1 for block in steps[6]["free"][:2]] == [6, 4]  # without a hash: to the front
    assert sorted(steps[6]["free"]) == list(range(1, 11))


def test_the_log_is_of_a_line_that_was_emitted() -> None:
    spec, chip = models.get("stories"), "i9-13900k"
    from servelab import hardware

    line = memory.serve_line(
        spec, hardware.get(chip), "stories", 512, utilization=0.1, weight_dtype="fp32",
        block_size=128, max_num_batched_tokens=512,
    )  # fmt: skip
    told = {
        flag.name.removeprefix("--").replace("-", "_"): flag.value
        for flag in line.flags
        if flag.value not in ("1", "auto")
    }
    [said] = [row for row in START.splitlines() if "non-default args" in row]
    for name, value in told.items():
        assert f"'{name}': {value}" in said or f"'{name}': '{value}'" in said, name
    assert memory.capacity(spec, GiB, 512, 128, "fp32", engine="vllm").printed_tokens == 419_328
