"""`servelab simulate`: its figures, its refusals, its progress bar, and Ctrl-C."""

import io
import json
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from servelab import hardware, memory, models
from servelab.cli import main
from servelab.serving import Engine, RooflineRunner
from servelab.simulation import percentile, poisson, simulate

Run = Callable[[str], tuple[int, str, str]]
LOAD = "simulate qwen3-8b --hw a100-sxm-40gb --rate 30 --requests 60 --prompt 300 --output 20"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_line(line: str) -> tuple[int, str, str]:
        code = main(shlex.split(line))
        return code, *capsys.readouterr()

    return run_line


def test_the_figures_are_the_simulation(run: Run) -> None:
    spec, chip = models.get("qwen3-8b"), hardware.get("a100-sxm-40gb")
    trace = poisson(30.0, [(300, 20)] * 60, seed=5)
    runner = RooflineRunner(spec, chip, efficiency=0.7, overhead_seconds=0.002, kv_dtype="fp8")
    ours = simulate(Engine(runner, enable_prefix_caching=False), trace)
    code, out, err = run(
        f"{LOAD} --seed 5 --efficiency 0.7 --overhead 2ms --kv-cache-dtype fp8 --json"
    )
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["served_requests"] == 60
    assert told["ttft_seconds"]["p90"] == percentile(ours.ttft_seconds, 90)
    assert told["tpot_seconds"]["p50"] == percentile(ours.tpot_seconds, 50)
    assert told["latency_seconds"]["p99"] == percentile(ours.latency_seconds, 99)
    assert told["output_tokens_per_second"] == ours.output_tokens_per_second
    assert told["steps"] == ours.counters.steps
    assert (told["kv_dtype"], told["overhead_seconds"]) == ("fp8", 0.002)


def test_the_pool_is_what_the_memory_leaves(run: Run) -> None:
    spec, chip = models.get("qwen3-8b"), hardware.get("a100-sxm-40gb")
    left = memory.budget(spec, chip, 0.8, reserve_bytes=2**30).available_bytes
    told = json.loads(
        run(f"{LOAD} --gpu-memory-utilization 0.8 --reserve 1GiB --block-size 32 --json")[1]
    )
    assert told["pool_blocks"] == left // (32 * spec.kv_bytes_per_token()) - 1
    given = json.loads(run(f"{LOAD} --num-gpu-blocks 100 --json")[1])
    assert given["pool_blocks"] == 99  # one is the null block


def test_limits_of_a_step_change_the_run(run: Run) -> None:
    def steps(options: str) -> int:
        told = json.loads(run(f"{LOAD} --json {options}")[1])
        assert told["served_requests"] == 60
        count = told["steps"]
        assert isinstance(count, int)
        return count

    assert steps("--max-num-seqs 4") > steps("")
    assert steps("--max-num-batched-tokens 64") > steps("")


def test_a_trace_its_slice_and_its_rate(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    rows = [f"2024-01-01 00:00:{n:02}.5,{100 + n},{5 + n}" for n in range(20)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    line = f"simulate qwen3-8b --hw l4 --trace {path} --json"
    whole = json.loads(run(line)[1])
    assert (whole["trace"], whole["requests"]) == ("mine", 20)
    assert whole["generated_tokens"] == sum(5 + n for n in range(20))
    part = json.loads(run(f"{line} --requests 5")[1])
    assert (part["requests"], part["generated_tokens"]) == (5, 35)
    fast = json.loads(run(f"{line} --rate 100")[1])
    assert fast["seconds"] < whole["seconds"] / 2


def test_lengths_of_sharegpt(run: Run) -> None:
    line = "simulate qwen3-8b --hw h200-sxm --rate 50 --requests 300 --lengths sharegpt --json"
    told = json.loads(run(line)[1])
    prompts = told["computed_tokens"] - told["generated_tokens"] + 300
    assert prompts / 300 == pytest.approx(161, rel=0.25)
    assert told["generated_tokens"] / 300 == pytest.approx(338, rel=0.2)
    assert run(line)[1] == run(line)[1] != run(f"{line} --seed 1")[1]


def test_prefixes_are_cached_where_the_trace_names_them(run: Run) -> None:
    line = "simulate qwen3-8b --hw h200-sxm --trace mooncake_synthetic --requests 40 --json"
    told = json.loads(run(line)[1])
    assert told["prefix_queried_tokens"] >= told["computed_tokens"] - told["generated_tokens"]
    off = json.loads(run(f"{line} --no-enable-prefix-caching")[1])
    assert (off["prefix_queried_tokens"], off["prefix_hit_tokens"]) == (0, 0)
    alone = json.loads(run(f"{LOAD} --json")[1])
    assert alone["prefix_queried_tokens"] == 0
    asked = json.loads(run(f"{LOAD} --enable-prefix-caching --json")[1])
    assert asked["prefix_queried_tokens"] == 60 * 300
    assert asked["prefix_hit_tokens"] == 0


def test_the_text_says_what_it_is(run: Run) -> None:
    code, out, err = run(LOAD)
    assert (code, err) == (0, "")
    for part in ("60 requests", "p50      p90", "nearest rank", "takes its bound: a real service"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 80
    assert "its bound / 0.5 + 1.00 ms" in run(f"{LOAD} --efficiency 0.5 --overhead 1ms")[1]


def test_refused_requests_are_told(run: Run) -> None:
    code, out, _ = run("simulate qwen3-8b --hw l4 --rate 1 --requests 3 --prompt 64K")
    assert code == 0
    assert "3 requests refused; the first: the prompt has 65536 tokens" in " ".join(out.split())
    one_token = "simulate qwen3-8b --hw l4 --rate 1 --requests 3 --output 1"
    assert "TPOT" not in run(one_token)[1]
    assert "tpot_seconds" not in json.loads(run(f"{one_token} --json")[1])


BAD = {
    "neither": ("simulate qwen3-8b --hw l4", "give --trace FILE, or --rate R with --requests N"),
    "no number": ("simulate qwen3-8b --hw l4 --rate 3", "give --trace FILE, or --rate R with"),
    "bad rate": (
        "simulate qwen3-8b --hw l4 --rate -1 --requests 3",
        "requests per second, above 0",
    ),
    "hardly a rate": (
        "simulate qwen3-8b --hw l4 --rate 1e-310 --requests 3",
        "per_second must be at least 1e-09",
    ),
    "a rate that no clock tells": (
        "simulate qwen3-8b --hw l4 --trace azure_2023_conv --rate 1e-20 --requests 3",
        "must not decrease, nor exceed 1e+09 s",
    ),
    "no trace": ("simulate qwen3-8b --hw l4 --trace none.csv", "bundled traces: azure_2023_code"),
    "bad trace": ("simulate qwen3-8b --hw l4 --trace {bad}", "bad.csv, line 2: 1 values for 3"),
    "a folder": ("simulate qwen3-8b --hw l4 --trace {tmp}", "Is a directory"),
    "too large": ("simulate qwen3-8b --hw t4 --dtype half --rate 1 --requests 3", "does not fit"),
    "no rate of it": ("simulate qwen3-8b --hw t4 --rate 1 --requests 3", "no peak rate for 'bf16'"),
    "one block": ("simulate qwen3-8b --hw l4 --rate 1 --requests 3 --num-gpu-blocks 1", "least 2"),
    "efficiency": ("simulate qwen3-8b --hw l4 --rate 1 --requests 3 --efficiency 2", "at most 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_code_2(run: Run, tmp_path: Path, name: str) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnonsense")
    line, message = BAD[name]
    code, out, err = run(line.format(bad=bad, tmp=tmp_path))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_ctrl_c_prints_what_is_done(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(RooflineRunner):
        steps = 0

        def execute(self, plan):  # type: ignore[no-untyped-def]
            self.steps += 1
            if self.steps == 150:
                signal.raise_signal(signal.SIGINT)
            return super().execute(plan)

    monkeypatch.setattr("servelab.cli.simulate.RooflineRunner", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = run(f"{LOAD.replace('60', '400')} --json")
    finally:
        signal.signal(signal.SIGINT, before)
    told = json.loads(out)
    assert code == 130
    assert told["interrupted"] is True
    assert 0 < told["served_requests"] < 400
    assert err == (
        f"servelab: interrupted; these are the figures of {told['served_requests']} requests "
        "out of 400\n"
    )


def test_a_terminal_sees_progress(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    code, out, _ = run(f"{LOAD} --json")
    assert code == 0
    assert json.loads(out)["served_requests"] == 60
    assert "requests" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_quantised_weights_need_a_format(run: Run, tmp_path: Path) -> None:
    config = json.loads(
        (Path(models.__file__).parents[1] / "data/configs/qwen3-8b.json").read_text("utf-8")
    )
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    line = LOAD.replace("qwen3-8b", str(path))
    code, _, err = run(line)
    assert code == 2
    assert "give one with --weight-dtype" in err
    assert run(f"{line} --weight-dtype int4")[0] == 0
