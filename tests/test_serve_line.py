"""`servelab fit --emit vllm`: the line follows from the numbers, and vLLM knows its flags."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from servelab import hardware, memory, models
from servelab.cli import main
from servelab.cli.emit import HUB_NAMES, served_name
from servelab.memory import serve_line, vllm_flags
from servelab.roofline import Precision
from servelab.roofline.phases import step_time

QWEN, H100 = models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")
DATA = resources.files("servelab") / "data"
Run = Callable[..., tuple[int, str, str]]
EMIT = "fit qwen3-8b --hw h100-sxm-80gb --max-model-len 8K --emit vllm"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run_line(line: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(shlex.split(line))
        return code, *capsys.readouterr()

    return run_line


def line(spec: Any = QWEN, chip: Any = H100, length: int = 8192, **options: Any) -> Any:
    return serve_line(spec, chip, "model", length, **options)


# --- the flags of a real vLLM -------------------------------------------------------------------

EVERY_FLAG = {"block_size": 32, "weight_dtype": "fp16", "tp": 16, "dcp": 2, "kv_dtype": "fp8"}


def test_every_flag_is_one_of_vllm_serve() -> None:
    known = vllm_flags()["flags"]
    assert len(known) > 300
    found = [flag.name for flag in line(**EVERY_FLAG).flags]
    assert len(found) == len(set(found)) == 10
    assert set(found) <= set(known)


def test_every_choice_is_one_of_vllm_serve() -> None:
    known = vllm_flags()["flags"]
    for kv_dtype in memory.FORMATS:
        try:
            told = line(kv_dtype=kv_dtype, weight_dtype="fp32")
        except ValueError:
            continue
        assert told["--kv-cache-dtype"] in known["--kv-cache-dtype"]["choices"]
        assert told["--dtype"] in known["--dtype"]["choices"]
    assert line(kv_dtype="nvfp4")["--kv-cache-dtype"] == "nvfp4"
    assert line(kv_dtype="fp16")["--kv-cache-dtype"] == "float16"
    assert line(kv_dtype="bf16")["--kv-cache-dtype"] == line()["--kv-cache-dtype"] == "auto"


def test_what_our_options_borrow_from_vllm_it_still_has() -> None:
    """The long names that our own commands accept in vLLM's spelling."""
    from servelab.cli.fit import command

    borrowed = {name for option in command.params for name in option.opts if len(name) > 14}
    names = set(vllm_flags()["flags"]) | {
        alias for flag in vllm_flags()["flags"].values() for alias in flag["aliases"]
    }
    assert len(borrowed) >= 7
    assert borrowed - {"--compute-dtype", "--weight-dtype"} <= names


# --- what follows -------------------------------------------------------------------------------


def test_without_a_target_as_many_as_fit_and_vllms_own_tokens_of_a_step() -> None:
    room = memory.budget(QWEN, H100, 0.85).available_bytes
    fits = memory.capacity(QWEN, room, 8192, engine="vllm")
    told = line(utilization=0.85)
    assert told["--max-num-seqs"] == str(fits.sequences)
    assert told["--gpu-memory-utilization"] == "0.85"
    assert (told["--max-model-len"], told["--tensor-parallel-size"]) == ("8192", "1")


@pytest.mark.parametrize(
    ("chip", "tokens"),
    [
        ("a100-sxm-80gb", 2048),
        ("a100-sxm-40gb", 2048),
        ("l40s", 2048),
        ("h100-sxm-80gb", 8192),
        ("h200-sxm", 8192),
        ("mi300x", 16_384),
    ],
)
def test_tokens_of_a_step_by_default_are_those_of_the_chip(chip: str, tokens: int) -> None:
    [name] = [n for n in hardware.names() if n.startswith(chip)]
    told = line(models.get("mistral-7b"), hardware.get(name))
    assert told["--max-num-batched-tokens"] == str(tokens)


@pytest.mark.parametrize("tpot", [0.012, 0.02, 0.03, 0.1])
@pytest.mark.parametrize("efficiency", [1.0, 0.7])
def test_under_a_tpot_the_step_is_the_longest_that_meets_it(tpot: float, efficiency: float) -> None:
    told = line(tpot_seconds=tpot, efficiency=efficiency)
    users, tokens = int(told["--max-num-seqs"]), int(told["--max-num-batched-tokens"])

    def seconds(chunk: int) -> float:
        step = [*[(1, 8191)] * users, (chunk, 8192 - chunk)]
        return step_time(QWEN, step, H100, Precision()).seconds / efficiency

    ridge = H100.ridge("bf16")
    assert tokens >= max(users + 1, ridge)
    assert tokens % 8 == 0
    if tokens > ridge + 8:
        assert seconds(tokens - users) <= tpot < seconds(tokens - users + 8) or tokens >= 8192
    else:
        assert seconds(tokens - users + 8) > tpot  # the ridge is already too long


def test_under_a_ttft_the_prompt_is_in_one_step_as_it_was_priced() -> None:
    told = line(ttft_seconds=0.2, prompt_tokens=4000)
    users, tokens = int(told["--max-num-seqs"]), int(told["--max-num-batched-tokens"])
    assert 0 <= tokens - (4000 + users - 1) < 8


@pytest.mark.parametrize("tpot", [None, 0.02, 0.03])
def test_a_window_is_held_beside_the_tokens_of_the_step(tpot: float | None) -> None:
    spec, chip = models.get("mistral-7b"), hardware.get("a100-sxm-80gb")
    told = line(spec, chip, 32_768, tpot_seconds=tpot)
    users, tokens = int(told["--max-num-seqs"]), int(told["--max-num-batched-tokens"])
    room = memory.budget(spec, chip).available_bytes
    fits = memory.capacity(
        spec, room, 32_768, engine="vllm", max_num_batched_tokens=tokens
    ).sequences
    assert users == fits or (tpot is not None and users <= fits)


def test_never_more_sequences_than_tokens_in_a_step() -> None:
    told = line(max_num_batched_tokens=16)
    assert told["--max-num-seqs"] == told["--max-num-batched-tokens"] == "16"
    assert "no more than the 16" in {f.name: f.reason for f in told.flags}["--max-num-seqs"]


def test_a_target_that_all_meet_is_not_said_to_allow_just_these() -> None:
    def reason(**options: Any) -> str:
        return {f.name: f.reason for f in line(**options).flags}["--max-num-seqs"]

    assert "49 requests of full length fit; TPOT allows all of them" in reason(tpot_seconds=0.025)
    assert "49 requests of full length fit; TPOT allows 22" in reason(tpot_seconds=0.0125)


def test_every_flag_has_a_reason_with_a_number_or_a_source() -> None:
    for flag in line(**EVERY_FLAG, tpot_seconds=0.05).flags:
        assert re.search(r"\d|given|default", flag.reason), flag


# --- what vLLM cannot do ------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"tp": 3}, "32 query heads do not divide over 3"),
    "format of the cache": ({"kv_dtype": "q8_0"}, r"0\.32\.0 has no cache in q8_0; it has auto"),
    "cache in fp32": ({"kv_dtype": "fp32"}, "has no cache in fp32"),
    "quantised weights": ({"weight_dtype": "int4"}, "as the checkpoint has them.*int4"),
    "length": ({"length": 2**17}, "131,072 is longer than the 40,960"),
    "block": ({"block_size": 8}, "8 is no multiple of 16"),
    "stages": ({"pp": 37}, "36 layers, too few for 37"),
    "no room beside the reserve": (
        {"reserve_bytes": 60 * 2**30},
        "weights of 15.26 GiB a rank and the 60 GiB set aside leave nothing",
    ),
    "no room": ({"utilization": 0.15}, "leave nothing of the .*0.15 allows"),
    "not one request": ({"utilization": 0.2, "length": 40_960}, "needs 5.62 GiB.*at most [1-9]"),
    "not in time": (
        {"tpot_seconds": 1e-3},
        "not one request of 8,192 tokens meets a TPOT of 1.00 ms",
    ),
    "context parallel": ({"tp": 8, "dcp": 2}, "8 heads over 8 ranks allow 1, got 2"),
    "group": ({"tp": 24, "dcp": 3}, "3 does not divide the 4 query heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_cannot_do_is_refused_with_value_and_rule(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        line(**options)


# --- the command --------------------------------------------------------------------------------


def test_the_command_prints_a_script_that_a_shell_reads_as_meant(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s $HOME; a "model"'
    folder.mkdir()
    text = (DATA / "configs" / "qwen3-8b.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text, encoding="utf-8")
    for config in (folder, folder / "config.json"):
        words = ["fit", str(config), "--hw", "h100-sxm-80gb", "--emit", "vllm"]
        code, out, err = run(shlex.join(words))
        assert (code, err) == (0, "")
        comments = re.findall(r"^# (--\S+) \S+: .+", out, re.M)
        shell = f'vllm() {{ printf "%s\\n" vllm "$@"; }}\n{out}'
        heard = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
        told = json.loads(run(shlex.join([*words, "--json"]))[1])
        assert heard.stdout.splitlines() == told["arguments"]
        assert comments == told["arguments"][3::2] == [flag["name"] for flag in told["flags"]]
        assert heard.stdout.splitlines()[2] == str(folder)


def test_a_name_that_looks_like_an_option_stays_a_name() -> None:
    odd = serve_line(QWEN, H100, "-x", 8192)
    assert odd.arguments[2] == "./-x"


def test_bundled_models_have_their_names_at_the_hub() -> None:
    readme = (DATA / "configs" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)\.json` \| (\S+) \|", readme, re.M))
    assert rows == HUB_NAMES
    assert set(models.names()) - set(HUB_NAMES) == {"stories"}
    assert (Path(served_name("stories")) / "model.safetensors").exists()


def test_the_command_agrees_with_fit_itself(run: Run) -> None:
    for targets in ("", "--tpot 15ms", "--tpot 30ms --ttft 2s --prompt 4K"):
        users = json.loads(run(f"{EMIT.removesuffix(' --emit vllm')} {targets} --json")[1])["users"]
        flags = json.loads(run(f"{EMIT} {targets} --json")[1])["flags"]
        assert {f["name"]: f["value"] for f in flags}["--max-num-seqs"] == str(users)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{EMIT} --engine sglang", "counts as vllm does, not as --engine sglang"),
        (f"{EMIT} --kv-dtype q4_0", "no cache in q4_0"),
        (f"{EMIT} --prompt 8192", "a prompt of 8,192 tokens leaves none to answer in"),
        (f"{EMIT} --ttft 1s --prompt 9000", "a prompt of 9,000 tokens leaves none to answer in"),
        (f"{EMIT} --efficiency 0", "must be a share, above 0 and at most 1, got '0'"),
        (f"{EMIT} --tp 3", "do not divide over 3"),
        (EMIT.replace("--emit vllm", "--emit tgi"), "'vllm'"),
    ],
)
def test_refusals_of_the_command(run: Run, line: str, message: str) -> None:
    code, out, err = run(line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_standard_input_has_no_name_to_serve(run: Run) -> None:
    text = (DATA / "configs" / "qwen3-8b.json").read_bytes()
    code, _, err = run("fit - --hw h100-sxm-80gb --emit vllm", stdin=text)
    assert code == 2
    assert "standard input is neither" in err
