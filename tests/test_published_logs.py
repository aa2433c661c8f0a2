"""Published figures of start-up logs: verdicts, and what stands behind those that do not follow."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from servelab.logs import Published, published
from servelab.units import GiB

_TEXT = (resources.files("servelab") / "data/cases/kv_log_cases.json").read_text(encoding="utf-8")
CASES = {case["id"]: case for case in json.loads(_TEXT)}
# Errors that the threads themselves correct: the records hold the engine's own arithmetic.
CORRECTED = {
    "sglang-11309-v32-before": {"size"},
    "vllm-34076-qwen3-coder-30b-pp2": {"needed", "longest context"},
    "omlx-2725-qwen38-27b": {"size"},
}
OTHER_RANK = {"vllm-13061-r1-distill-qwen14b-tp2", "vllm-21348-qwen3-235b-tp4-vllm"}


def test_only_the_known_figures_do_not_follow() -> None:
    wrong = [figure for figure in published() if not figure.agrees]
    assert {figure.name for figure in wrong} == OTHER_RANK | set(CORRECTED)
    assert all(figure.what in CORRECTED.get(figure.name, {"pool"}) for figure in wrong)


def test_the_other_verdicts_are_those_of_the_records() -> None:
    checked = [figure for figure in published() if figure.name not in CORRECTED]
    assert len(checked) == 23
    for figure in checked:
        verdicts = {
            c["ok"] for c in CASES[figure.name]["checks"] if c["kind"] in KINDS[figure.what]
        }
        assert verdicts == {figure.agrees}, figure


KINDS = {
    "pool": {"capacity_from_available", "ceil_blocks_from_fraction"},
    "swap space": {"cpu_blocks_from_swap_space"},
    "longest context": {"estimated_max_model_len"},
    "needed": {"needed_GiB_for_max_len"},
    "size": {"exact"},
}


def test_pools_are_what_the_records_predict() -> None:
    pools = [f for f in published() if f.what == "pool" and f.engine != "tensorrt-llm"]
    assert len(pools) == 7
    for figure in pools:
        [check] = [
            c for c in CASES[figure.name]["checks"] if c["kind"] == "capacity_from_available"
        ]
        assert figure.computed == check["predicted_tokens"]
        assert [figure.low, figure.high] == check["interval"]


def test_figures_that_would_agree_whatever_they_are_stay_out() -> None:
    shown = {figure.name for figure in published()}
    circular = {n for n, c in CASES.items() if all(k.get("circular") for k in c["checks"])}
    assert len(circular) >= 4
    assert not shown & circular
    assert not any("estimate" in figure.engine for figure in published())


def named(name: str, what: str) -> list[Published]:
    return [f for f in published() if (f.name, f.what) == (name, what)]


@pytest.mark.parametrize(
    ("name", "what", "gib"),
    [
        ("vllm-34076-qwen3-coder-30b-pp2", "needed", 16.0),  # the larger stage, not all 24
        ("omlx-2725-qwen38-27b", "size", 4 / 1024),
        ("llamacpp-6849-phi3-mini-128k", "size", 49248 / 1024),
    ],
)
def test_sizes(name: str, what: str, gib: float) -> None:
    assert {figure.computed for figure in named(name, what)} == {gib * GiB}


def test_index_keys_are_part_of_the_size() -> None:
    before, after = named("sglang-11309-v32-before", "size")
    assert before.computed == after.computed == (1462784 + 64) * 61 * (656 + 132)
    assert (before.agrees, after.agrees) == (False, True)
