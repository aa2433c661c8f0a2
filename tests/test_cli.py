"""The command line: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import pytest

from servelab import hardware, memory, models, roofline
from servelab.cli import arithmetic, main
from servelab.cli.commands import MODULES, servelab
from servelab.models import ModelSpec

CONFIGS = Path(models.__file__).parents[1] / "data" / "configs"
QWEN = CONFIGS / "qwen3-8b.json"
CASES = json.loads((CONFIGS.parent / "cases" / "config_cases.json").read_text(encoding="utf-8"))
NONE = type(None)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process; returns exit code, stdout, stderr."""

    def run_line(line: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(shlex.split(line))
        out, err = capsys.readouterr()
        return code, out, err

    return run_line


def program(line: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command line as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "servelab", *shlex.split(line)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


# --- answers ------------------------------------------------------------------------------------

GOLDEN = {
    "kv qwen3-8b --tokens 32K --batch 8 --kv-dtype fp8 --tp 8": """\
qwen3-8b: 36 layers, cache in fp8

  2 x 36 layers x 8 KV heads x 128 x 1 B = 73,728 B per token
  73,728 x 32,768 B = 2,415,919,104 B per sequence of 32,768 tokens
on each of 8 tensor-parallel ranks
  2 x 36 layers x 1 KV head x 128 x 1 B = 9,216 B per token

tokens                                bytes     GiB      GB
---------------------------  --------------  ------  ------
sequence of 32K               2,415,919,104   2.250   2.416
batch of 8 x 32K             19,327,352,832  18.000  19.327
of it on the fullest rank     2,415,919,104   2.250   2.416
""",
    "fit llama-3-8b --hw h100-sxm-80gb --max-model-len 8K": """\
llama-3-8b on h100-sxm-80gb, counted as vllm does
users of 8,192 tokens, cache in bf16

term                       GiB     GB
-----------------------  -----  -----
memory of the device     79.19  85.03
of it usable             71.27  76.53
- weights                14.96  16.06
- reserve                 0.00   0.00
- outside the framework   0.00   0.00
- peak of activations     0.00   0.00
- captured graphs         0.00   0.00
- margin                  0.00   0.00
= left for the cache     56.31  60.47

  60,466,131,041 B / 2,097,152 B per block (2 MiB) = 28,832 blocks, 461,312
    tokens
  (28,832 - 1 null) / 512 blocks per user = 56 whole users (56.31x printed)
  longest context of a single user: 8,192 tokens
  nothing is set aside for activations and graphs: an engine that prints less
    takes the difference for them (--reserve)

56 users; the limit hit first is memory
""",
    "kv mistral-7b --tokens 8K": """\
mistral-7b: 32 layers, cache in bf16

  2 x 32 layers x 8 KV heads x 128 x 2 B = 131,072 B per token, at most 4,096
    kept
  131,072 x min(8,192, 4,096) B = 536,870,912 B per sequence of 8,192 tokens

tokens                           bytes    GiB     GB
------------------------  ------------  -----  -----
sequence of 8K, held       536,870,912  0.500  0.537
sequence of 8K, reserved  1,073,741,824  1.000  1.074
""",
}


@pytest.mark.parametrize("line", GOLDEN)
def test_what_people_see(run: Run, line: str) -> None:
    code, out, err = run(line)
    assert (code, err) == (0, "")
    assert re.sub("[ -]+", " ", out) == re.sub("[ -]+", " ", GOLDEN[line])


LOG = """\
INFO 11-10 12:00:01 [gpu_model_runner.py:1843] Model loading took 15.2683 GiB and 3.5 seconds
INFO 11-10 12:00:11 [gpu_worker.py:276] Available KV cache memory: 53.48 GiB
INFO 11-10 12:00:11 [kv_cache_utils.py:849] GPU KV cache size: 389,424 tokens
INFO 11-10 12:00:11 [kv_cache_utils.py:853] Maximum concurrency for 40,960 tokens per request: 9.41x
"""

# The keys of each answer with their types: what programs rely on.
KEYS: dict[str, dict[str, Any]] = {
    "kv qwen3-8b": {
        "model": str,
        "kv_dtype": str,
        "tokens": int,
        "batch_sequences": int,
        "tensor_parallel_ranks": int,
        "pipeline_parallel_stages": int,
        "kv_bytes_per_token": int,
        "kv_reserved_bytes_per_token": int,
        "state_bytes_per_sequence": int,
        "sequence_bytes": int,
        "sequence_reserved_bytes": int,
        "batch_bytes": int,
        "batch_reserved_bytes": int,
        "rank_batch_bytes": int,
        "rank_batch_reserved_bytes": int,
        "all_ranks_batch_reserved_bytes": int,
        "layers": list,
    },
    "explain qwen3-8b": {
        "model": str,
        "kv_dtype": str,
        "layers": list,
        "sequence_bytes_formula": str,
        "max_context_tokens": int,
        "params_total": int,
        "params_active": int,
        "params_other": int,
        "params_by_part": dict,
        "weight_bytes": int,
        "weight_dtype": str,
        "unknown": dict,
        "provenance": dict,
    },
    "fit qwen3-8b --hw h100-sxm-80gb --max-model-len 8K --tpot 15ms": {
        "model": str,
        "accelerator": str,
        "engine": str,
        "kv_dtype": str,
        "utilization": float,
        "max_model_len_tokens": int,
        "tensor_parallel_ranks": int,
        "pipeline_parallel_stages": int,
        "device_bytes": int,
        "usable_bytes": int,
        "weight_bytes": int,
        "reserve_bytes": int,
        "margin_bytes": int,
        "available_bytes": int,
        "block_size_tokens": int,
        "bytes_per_block": int,
        "blocks": int,
        "blocks_per_sequence": int,
        "capacity_tokens": int,
        "max_concurrency": float,
        "longest_context_tokens": int,
        "tpot_target_seconds": float,
        "ttft_target_seconds": NONE,
        "users_by_target": dict,
        "users": int,
        "limit": str,
    },
    "time qwen3-8b --hw h100-sxm-80gb": {
        "model": str,
        "accelerator": str,
        "batch_sequences": int,
        "prompt_tokens": int,
        "output_tokens": int,
        "tensor_parallel_ranks": int,
        "pipeline_parallel_stages": int,
        "weight_bits": int,
        "expert_weight_bits": NONE,
        "kv_dtype": str,
        "compute_dtype": str,
        "ttft_seconds": float,
        "tpot_seconds": float,
        "request_seconds": float,
        "output_tokens_per_second": float,
        "prefill": dict,
        "decode": dict,
        "achieved_fraction": dict,
        "warnings": dict,
    },
    "hardware": {"accelerators": list},
    "models": {"models": list},
    "hardware h100-sxm-80gb": {
        "name": str,
        "label": str,
        "dense_flop_per_second": dict,
        "ridge_flop_per_byte": dict,
        "memory_bytes": int,
        "visible_memory_bytes": int,
        "bandwidth_bytes_per_second": int,
        "link_bytes_per_second": int,
        "interconnect": str,
        "trap": str,
        "note": str,
        "sources": dict,
    },
}


@pytest.mark.parametrize("line", KEYS)
def test_what_programs_read(run: Run, line: str) -> None:
    code, out, _ = run(f"{line} --json")
    values = json.loads(out)
    assert code == 0
    assert {key: type(value) for key, value in values.items()} == KEYS[line]


def test_the_figures_are_the_calculators(run: Run) -> None:
    values = json.loads(run("kv llama-3-8b --tokens 5000 --batch 3 --json")[1])
    spec = models.get("llama-3-8b")
    assert values["batch_bytes"] == 3 * spec.sequence_bytes(5000)
    assert values["kv_bytes_per_token"] == 131_072
    parts = json.loads(run("explain llama-3-8b --json")[1])
    assert (parts["params_total"], parts["weight_bytes"]) == (8_030_261_248, 16_060_522_496)
    chip = json.loads(run("hardware l4 --json")[1])
    assert chip["memory_bytes"] == hardware.get("l4").memory_bytes


def test_ranks_replicate_heads_and_stages_take_the_worst(run: Run) -> None:
    values = json.loads(run("kv llama-3-8b --tokens 1K --tp 16 --json")[1])
    assert values["all_ranks_batch_reserved_bytes"] == 2 * values["batch_bytes"]
    staged = json.loads(run("kv qwen3-8b --tokens 1K --pp 8 --json")[1])  # 36 layers: 5 at most
    assert staged["rank_batch_bytes"] * 36 == staged["batch_bytes"] * 5


def test_a_model_published_in_fp32_is_served_in_16_bits(run: Run, tmp_path: Path) -> None:
    config = {**json.loads(QWEN.read_text(encoding="utf-8")), "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    own = models.get("qwen3-8b")
    assert json.loads(run(f"kv {tmp_path} --json")[1])["kv_bytes_per_token"] == 147456
    fit = json.loads(run(f"fit {tmp_path} --hw h100-sxm-80gb --json")[1])
    assert (fit["kv_dtype"], fit["weight_bytes"]) == ("bf16", own.weight_bytes())
    time = json.loads(run(f"time {tmp_path} --hw h100-sxm-80gb --json")[1])
    assert (time["weight_bits"], time["compute_dtype"]) == (16, "bf16")
    explained = json.loads(run(f"explain {tmp_path} --json")[1])
    assert explained["weight_bytes"] == 2 * own.weight_bytes()  # the files on disk


# --- the arithmetic that is shown ---------------------------------------------------------------


def product_of(formula: str) -> Fraction:
    """Multiply a shown product out: unlike the package, from its text alone."""
    plain = re.sub(r" layers?| KV heads?| B\b|,", "", formula).replace(" x ", " * ")
    assert re.fullmatch(r"[\d*/+() ]+", plain), formula
    return Fraction(eval(re.sub(r"(\d+)", r"Fraction(\1)", plain), {"Fraction": Fraction}))


@pytest.mark.parametrize("kv_dtype", memory.FORMATS)
def test_every_product_multiplies_out(kv_dtype: str) -> None:
    shown = 0
    for case in CASES:
        try:
            spec = ModelSpec.from_config(case["config"])
            lines = arithmetic.cache_lines(spec, kv_dtype)
        except ValueError:
            continue
        for line in lines:
            size = line.bytes_per_token + line.state_bytes
            assert (product_of(line.formula) if line.formula else 0) == size, line
        assert sum(line.bytes_per_token for line in lines) == sum(
            memory.token_bytes(layer, kv_dtype) for layer in spec.layers
        )
        assert sum(line.state_bytes for line in lines) == spec.state_bytes_per_sequence
        shown += 1
    assert shown >= (35 if kv_dtype != "fp8_ds_mla" else 3)


def test_a_sequence_of_windows_and_state_adds_up() -> None:
    for case in CASES:
        try:
            spec = ModelSpec.from_config(case["config"])
        except ValueError:
            continue
        lines = arithmetic.cache_lines(spec, "bf16")
        for tokens in (1, 511, 8193):
            formula = re.sub(
                r"min\(([\d,]+), ([\d,]+)\)",
                lambda m: str(min(int(n.replace(",", "")) for n in m.groups())),
                arithmetic.sequence_formula(lines, tokens),
            )
            assert product_of(formula) == spec.sequence_bytes(tokens), spec.name


# --- users, times, logs -------------------------------------------------------------------------


def test_fit_counts_as_the_engine_does_and_names_the_limit(run: Run) -> None:
    chip, spec = hardware.get("h100-sxm-80gb"), models.get("qwen3-8b")
    left = memory.budget(spec, chip, 0.85, reserve_bytes=2**30).available_bytes
    line = "fit qwen3-8b --hw h100-sxm-80gb --util 0.85 --reserve 1GiB --max-model-len 8K --json"
    for engine in memory.ENGINES:
        if engine == "tensorrt-llm":
            continue
        values = json.loads(run(f"{line} --engine {engine}")[1])
        size = 1 if engine == "sglang" else 16
        fits = memory.capacity(spec, left, 8192, size, engine=engine)
        assert (values["available_bytes"], values["blocks"]) == (left, fits.blocks)
        assert (values["users"], values["limit"]) == (fits.sequences, "memory")
    limits = {
        "--tpot 15ms": "bandwidth",
        "--tpot 10s": "memory",
        "--ttft 100ms --prompt 8000": "compute",
    }
    for target, limit in limits.items():
        assert json.loads(run(f"{line} {target}")[1])["limit"] == limit, target


def test_tensorrt_takes_its_share_of_what_the_weights_leave(run: Run) -> None:
    line = "fit llama-3-8b --hw h100-sxm-80gb --engine tensorrt-llm --util 0.5 --json"
    values = json.loads(run(line)[1])
    free = values["device_bytes"] - values["weight_bytes"]
    assert values["available_bytes"] == free // 2
    assert values["margin_bytes"] == free - free // 2


def test_a_model_too_large_gets_no_users_and_a_way_out(run: Run) -> None:
    code, out, _ = run("fit llama-3-70b --hw h100-sxm-80gb")
    assert code == 0
    assert "0 users: the weights leave nothing" in out
    assert "over --tp 2 they leave 5.56 GiB on each rank" in out
    assert json.loads(run("fit llama-3-70b --hw h100-sxm-80gb --json")[1])["users"] == 0


def test_time_is_the_sum_of_its_phases(run: Run) -> None:
    line = "time qwen3-8b --hw h100-sxm-80gb --batch 32 --prompt 1K --output 256"
    values = json.loads(run(f"{line} --measured-ttft 0.94s --measured-tpot 1ms --json")[1])
    times = roofline.request_time(
        models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"), 1024, 256, 32
    )
    assert values["request_seconds"] == times.seconds
    assert values["prefill"]["limiter"] == "compute"
    assert values["decode"]["limiter"] == "memory"
    assert values["decode"]["steps"] == 255
    assert values["achieved_fraction"]["ttft"] == pytest.approx(0.5, abs=0.01)
    assert list(values["warnings"]) == ["tpot"]  # faster than its bound
    assert "between devices" in run(f"{line} --tp 2")[1]
    assert "on each of 2 tensor-parallel ranks" in run(f"{line} --tp 2")[1]
    assert "summed over the 2 stages" in run(f"{line} --pp 2")[1]
    assert json.loads(run(f"{line} --output 1 --json")[1])["decode"] is None


def test_the_terms_of_a_step_are_shown_with_their_division(run: Run) -> None:
    out = run("time qwen3-8b --hw h100-sxm-80gb --batch 32")[1]
    rows = {row[0]: row[1:] for row in (re.split("  +", line) for line in out.splitlines())}
    assert rows["bound"] == ["470 ms", "6.20 ms", "1.58 s"]
    assert rows["reading weights"] == ["4.60 ms", "4.52 ms", "1.15 s"]
    assert "mean decode step, weights: 15.136 GB / 3.35 TB/s = 4.52 ms" in out
    assert "mean decode step, arithmetic: 506 GFLOP / 989 TFLOP/s = 512 µs" in out


def test_figures_without_a_source_carry_a_mark(run: Run) -> None:
    assert not hardware.get("rtx-5090").verified("dense_flop_per_second.bf16")
    marked = run("hardware rtx-5090")[1]
    assert "210 TFLOP/s*" in marked
    assert "* not read from a source" in marked
    assert "*" not in run("hardware h100-sxm-80gb")[1]
    rows = {line.split()[0]: line for line in run("hardware")[1].splitlines() if line.strip()}
    assert ("*" in rows["rtx-5090"], "*" in rows["h100-sxm-80gb"]) == (True, False)


def test_explain_tells_parameters_apart_and_where_each_value_was_read(
    run: Run, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case["id"].startswith("deepseek-ai/DeepSeek-R1"))
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    out = run(f"explain {tmp_path}")[1]
    rows = {row[0].strip(): row[-1] for row in (re.split("  +", x) for x in out.splitlines())}
    assert rows["total"] == "671,026,419,200"
    assert rows["of it active per token"] == "37,552,297,472"
    assert rows["beside the text decoder"] == "11,610,068,224"
    assert "61 layers x (512 + 64) x 2 B = 70,272 B per token" in out
    assert "  kv_lora_rank = 512\n" in out
    assert "not read: one latent per token stands for all heads" in out


def test_several_kinds_of_growing_layers_are_added_up(run: Run, tmp_path: Path) -> None:
    case = next(case for case in CASES if case["id"].startswith("MiniMaxAI/MiniMax-M3"))
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    out = run(f"kv {tmp_path} --tokens 1K")[1]
    assert "2 x 3 layers x 4 KV heads x 128 x 2 B = 6,144 B per token" in out
    assert "together 137,472 B per token" in out


def test_a_cache_without_known_weights_is_explained_and_not_priced(
    run: Run, tmp_path: Path
) -> None:
    config = json.loads(QWEN.read_text(encoding="utf-8"))
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "Parameters: not known" in run(f"explain {tmp_path}")[1]
    assert json.loads(run(f"kv {tmp_path} --json")[1])["kv_bytes_per_token"] == 147_456
    code, _, err = run(f"fit {tmp_path} --hw l4")
    assert (code, err.count("\n")) == (2, 1)
    assert "vocab_size: is missing" in err


def test_weights_that_are_published_quantised_are_read_so(run: Run, tmp_path: Path) -> None:
    config = json.loads(QWEN.read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = f"time {tmp_path} --hw l4 --json"
    assert 4 < json.loads(run(line)[1])["weight_bits"] < 8
    assert json.loads(run(f"{line} --weight-dtype int8")[1])["weight_bits"] == 8


def test_a_log_that_powershell_wrote_is_read(run: Run) -> None:
    assert (
        run("explain-log -", stdin=LOG.encode("utf-16"))[1]
        == run("explain-log -", stdin=LOG.encode())[1]
    )


def test_a_log_is_recomputed_from_itself_and_from_the_model(run: Run) -> None:
    code, out, err = run("explain-log - --config qwen3-8b --json", stdin=LOG.encode())
    values = json.loads(out)
    assert (code, err) == (0, "")
    found = {c["quantity"]: (c["line_number"], c["agrees"]) for c in values["checks"]}
    assert found["tokens"] == (3, True)  # 53.48 GiB over 2.25 MiB per block
    assert found["max_concurrency"] == (4, False)  # 9.51 follows, 9.41 was typed
    assert (values["agreeing"], values["not_following"], values["open"]) == (
        sum(c["agrees"] is True for c in values["checks"]),
        1,
        sum(c["agrees"] is None for c in values["checks"]),
    )
    assert set(values["checks"][0]) == {
        *("line_number", "line", "quantity", "unit", "reported", "recomputed", "agrees", "why"),
        "interval",
    }
    text = run("explain-log -", stdin=b"\x1b[32m" + LOG.replace("INFO", "IN\x07FO").encode())[1]
    assert "does not follow, recomputed 9.5074" in text
    assert "\x1b" not in text
    assert "\x07" not in text


# --- where a model comes from -------------------------------------------------------------------


def test_file_folder_stdin_and_bundled_name_agree(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(QWEN.read_bytes())
    answers = []
    for where in ("qwen3-8b", str(QWEN), str(tmp_path), str(tmp_path / "config.json"), "-"):
        code, out, err = run(f"kv {where} --tokens 1K --json", stdin=QWEN.read_bytes())
        assert code == 0, err
        answers.append({k: v for k, v in json.loads(out).items() if k != "model"})
    assert all(one == answers[0] for one in answers)


def test_what_is_wrong_with_stdin_is_said_of_stdin(run: Run) -> None:
    code, out, err = run("kv -", stdin=b"{]")
    assert (code, out) == (2, "")
    assert "config.json: standard input is not JSON" in err


def test_spellings_of_vllm_mean_the_same(run: Run) -> None:
    ours = run("kv qwen3-8b --kv-dtype fp8 --tp 2 --pp 2 --json")
    theirs = run(
        "kv qwen3-8b --kv-cache-dtype fp8_e4m3 --tensor-parallel-size 2 "
        "--pipeline-parallel-size 2 --json"
    )
    assert ours == theirs
    assert json.loads(ours[1])["kv_bytes_per_token"] == 73_728


# --- refusals -----------------------------------------------------------------------------------

BAD: dict[str, tuple[str, str]] = {  # line, what the message must say
    "unknown command": ("kw qwen3-8b", "no command 'kw'; near: kv"),
    "unknown option": ("kv qwen3-8b --token 3", "--tokens"),
    "no model": ("kv", "CONFIG.*servelab kv --help"),
    "unknown model": ("kv qwen", "near: qwen3-8b"),
    "hub name": ("kv Qwen/Qwen3-8B", "nothing is downloaded.*qwen3-8b"),
    "unknown hardware": ("fit qwen3-8b --hw h100", "no accelerator 'h100'; near: h100-sxm-80gb"),
    "nothing near": ("hardware zzz", "no accelerator 'zzz'; `servelab hardware` lists them"),
    "no such file": ("kv {tmp}/model.json", "no file '.*model.json'; near: .*models.json"),
    "folder without config": ("kv {tmp}", "holds no config.json; near: .*models.json"),
    "binary file": ("kv {tmp}/weights.bin", "weights.bin is a binary file"),
    "empty file": ("kv {tmp}/empty.json", "empty.json is empty"),
    "not JSON": ("kv {tmp}/notes.txt", "notes.txt is not JSON"),
    "a list": ("kv {tmp}/models.json", "holds no JSON object"),
    "wrong file": ("kv {tmp}/adapter.json", "adapter_config.json"),
    "unsupported key": ("kv {tmp}/novel.json", "novel_attention_groups: 7 is not understood"),
    "stdin empty": ("kv -", "standard input is empty"),
    "bad number": ("kv qwen3-8b --tokens 32Kb", "cannot read '32Kb' as a number of tokens"),
    "negative": ("kv qwen3-8b --tokens -5", "cannot read '-5'"),
    "negative batch": ("kv qwen3-8b --batch -5", "whole number from 1 to 65,536, got '-5'"),
    "zero": ("kv qwen3-8b --tokens 0", "at least 1, got 0"),
    "half a token": ("kv qwen3-8b --tokens 1.3", "not a whole number of tokens"),
    "endless": ("kv qwen3-8b --tokens 1e30", "at most"),
    "a million digits": ("kv qwen3-8b --batch " + "9" * 10_000, "whole number from 1"),
    "heads do not divide": ("kv qwen3-8b --tp 3", "32 query heads do not divide over 3"),
    "too many stages": ("kv qwen3-8b --pp 37", "36 layers, too few for 37"),
    "unknown format": ("kv qwen3-8b --kv-dtype fp6", "unknown .* 'fp6'; near: .*fp8"),
    "format that does not fit": ("kv qwen3-8b --kv-dtype fp8_ds_mla", "fp8_ds_mla stores latents"),
    "control signs in a folder": (
        "kv '{tmp}/odd\nname\x1b[2J'",
        "the folder .*odd name .2J holds no",
    ),
    "control signs": ("kv 'a\x1b[31mb\nc'", "no bundled model"),
    "share above one": ("fit qwen3-8b --hw l4 --util 90", "at most 1, got '90'"),
    "size without unit": ("fit qwen3-8b --hw l4 --reserve 5", "cannot read '5' as a size"),
    "unknown engine log": ("explain-log {tmp}/notes.txt", "no start-up line of vLLM, SGLang"),
    "no such log": ("explain-log {tmp}/note.txt", "no file .*; near: .*notes.txt"),
    "binary log": ("explain-log {tmp}/weights.bin", "weights.bin is a binary file, not a log"),
    "empty log": ("explain-log -", "standard input is empty"),
    "dtype the chip lacks": (
        "time llama-3-8b --hw v100-sxm2-32gb",
        "v100-sxm2-32gb has no peak rate for 'bf16'; it has fp16",
    ),
    "no link": ("time qwen3-8b --hw i9-13900k --compute-dtype fp32 --tp 2", "no known link"),
    "time without unit": ("fit qwen3-8b --hw l4 --tpot 50", "cannot read '50' as a time"),
    "no time": ("fit qwen3-8b --hw l4 --tpot 0ms", "must be .*greater than 0"),
    "prompt too long": ("fit qwen3-8b --hw l4 --max-model-len 1K --ttft 1s --prompt 1K", "leaves"),
    "unpriced format": ("fit qwen3-8b --hw l4 --tpot 1s --kv-dtype q8_0", "dtype 'q8_0'"),
    "shares that do not divide": ("fit qwen3-8b --hw l4 --tp 4 --dcp 3", "dcp must divide tp"),
    "unknown engine": ("fit qwen3-8b --hw l4 --engine vlm", "'vllm'"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files that are no configuration."""
    (tmp_path / "weights.bin").write_bytes(b"GGUF\0\0\0\1" * 100)
    (tmp_path / "odd\nname\x1b[2J").mkdir()
    (tmp_path / "empty.json").write_text("\n")
    (tmp_path / "notes.txt").write_text("the model is large\n")
    (tmp_path / "models.json").write_text("[1, 2]")
    (tmp_path / "adapter.json").write_text('{"peft_type": "LORA", "r": 16}')
    novel = json.loads(QWEN.read_text(encoding="utf-8")) | {"novel_attention_groups": 7}
    (tmp_path / "novel.json").write_text(json.dumps(novel))
    return tmp_path


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_code_2(run: Run, folder: Path, name: str) -> None:
    line, message = BAD[name]
    code, out, err = run(line.replace("{tmp}", str(folder)))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.isprintable() or err[:-1].isprintable()
    assert len(err) < 420
    assert re.search(message, err), err


def test_a_fault_of_ours_is_not_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: object, kv_dtype: str) -> None:
        raise TypeError("a fault")

    monkeypatch.setattr(arithmetic, "cache_lines", broken)
    with pytest.raises(TypeError, match="a fault"):
        run("kv qwen3-8b")


# --- help ---------------------------------------------------------------------------------------


def help_of(name: str) -> str:
    context = click.Context(servelab, info_name="servelab")
    command = servelab.get_command(context, name)
    assert command is not None
    return command.get_help(click.Context(command, info_name=name, parent=context))


CELL = {
    "cell_type": "code", "id": "one", "metadata": {}, "outputs": [], "execution_count": None,
    "source": "from servelab.check import check\ncheck('4.1', 400 * 1024)",
}  # fmt: skip
NOTEBOOK = json.dumps({"cells": [CELL], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def examples(name: str) -> list[str]:
    return re.findall(r"^ +servelab (.*)$", help_of(name).split("\n  Example")[-1], re.M)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_help_run(
    run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vllm.log").write_text(LOG)
    Path("04_kv_cache_memory.ipynb").write_text(NOTEBOOK)
    lines = examples(name)
    assert lines
    assert max(map(len, help_of(name).splitlines())) <= 80
    for line in lines:
        assert line.split()[0] == name
        code, out, err = run(line)
        assert (code, err) == (0, ""), line
        assert 20 < max(map(len, out.splitlines())) <= 80, line


def test_alone_it_explains_itself(run: Run) -> None:
    code, out, err = run("")
    assert (code, err) == (0, "")
    assert all(name in out for name in MODULES)
    assert "_SERVELAB_COMPLETE" in out
    assert run("--version")[1].startswith("servelab ")


# --- as a program -------------------------------------------------------------------------------


def test_kv_starts_without_the_heavy_libraries() -> None:
    script = (
        "import sys; from servelab.cli import main; assert main(['kv', 'qwen3-8b']) == 0; "
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "servelab" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "transformers", "triton", "tokenizers"}


def test_a_terminal_without_our_signs_still_gets_an_answer() -> None:
    line = "time qwen3-8b --hw h100-sxm-80gb"
    out, err = program(line, env=os.environ | {"PYTHONIOENCODING": "koi8-r"}).communicate()
    assert (b" ?s" in out, err) == (True, b"")  # microseconds


def test_a_closed_pipe_ends_quietly() -> None:
    process = program("hardware --json")
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    assert err == b""
    assert process.returncode not in (0, 2)


def test_ctrl_c_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Waiting(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            signal.raise_signal(signal.SIGINT)
            return b""

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Waiting()))
    # A shell ignores the signal in what it starts in the background, and so would this process.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["kv", "-"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "")


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("servelab exp", {"explain", "explain-log"}),
        ("servelab kv qw", {"qwen3-8b"}),
        ("servelab fit qwen3-8b --hw h100", {"h100-sxm-80gb", "h100-pcie-80gb", "h100-nvl-94gb"}),
        ("servelab kv qwen3-8b --kv-dtype fp8_", {"fp8_per_token_head", "fp8_ds_mla"}),
    ],
)
def test_names_complete(run: Run, monkeypatch: pytest.MonkeyPatch, typed: str, found: set[str],
                        capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("_SERVELAB_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        main([])
    out = capsys.readouterr().out
    assert found <= set(out.split()), out
    assert os.environ["COMP_WORDS"] == typed


def test_the_bundled_models_are_listed(run: Run) -> None:
    listed = json.loads(run("models --json")[1])["models"]
    assert [m["name"] for m in listed] == list(models.names())
    assert {m["name"]: m["params_total"] for m in listed}["llama-2-7b"] == 6_738_415_616
    assert "qwen3-8b" in run("models")[1]
